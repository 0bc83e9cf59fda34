"""Experiment trackers: where the numbers of each learning step are kept for people to plot.

A JSONL file is always written; TensorBoard, Weights & Biases and MLflow are extras that are imported only when they are
chosen. Calls block and belong in a thread. Knows nothing of jobs: a `Point` is numbers at a step of one scenario.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from reef_cli.core.errors import ConfigError, MissingDependency


@dataclass(frozen=True, slots=True)
class Point:
    """The numbers of one ended step. `sequence` orders points over all scenarios; `at` is Unix time in seconds."""

    sequence: int
    scenario: str
    step: int
    job: str
    outcome: str
    at: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """Takes points in order. A second point with the same scenario and step replaces or follows the first."""

    def write(self, point: Point) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """One line per point; `last` is the sequence of the newest whole line, so that a restart goes on after it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines, whole = _whole_lines(path)
        self.last = max((int(json.loads(line)["sequence"]) for line in lines), default=0)
        self._file = path.open("ab")
        if self._file.tell() > whole:  # a crash cut the last line; the point is written again
            self._file.truncate(whole)

    def write(self, point: Point) -> None:
        self._file.write(json.dumps(asdict(point), sort_keys=True).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Event files below `folder`, one run per scenario, one chart per value."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._make = _load("tensorboard.summary", "tensorboard").Writer
        self._writers: dict[str, Any] = {}

    def write(self, point: Point) -> None:
        if point.scenario not in self._writers:
            self._writers[point.scenario] = self._make(str(self._folder / point.scenario))
        writer = self._writers[point.scenario]
        for name, value in point.values.items():
            writer.add_scalar(name, value, point.step, wall_time=point.at)
        writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandbTracker:
    """One Weights & Biases run per scenario; project, entity, key and mode come from its own `WANDB_*` variables."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wandb = _load("wandb", "wandb")
        self._runs: dict[str, Any] = {}

    def write(self, point: Point) -> None:
        if point.scenario not in self._runs:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._runs[point.scenario] = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "reef"),
                name=point.scenario,
                group=point.scenario,
                dir=str(self._folder),
                reinit="create_new",
                settings=self._wandb.Settings(console="off", silent=True),
            )
        self._runs[point.scenario].log(dict(point.values), step=point.step)

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


class MlflowTracker:
    """One MLflow experiment per scenario, on the server that MLflow's own `MLFLOW_TRACKING_URI` names."""

    def __init__(self, _folder: Path) -> None:
        module = _load("mlflow", "mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ConfigError(
                "telemetry.trackers has mlflow, but no server is named", hint="set MLFLOW_TRACKING_URI to an MLflow server"
            )
        self._client = module.MlflowClient()
        self._metric = _load("mlflow.entities", "mlflow").Metric
        self._runs: dict[str, str] = {}

    def write(self, point: Point) -> None:
        if point.scenario not in self._runs:
            self._runs[point.scenario] = self._open(f"reef/{point.scenario}")
        metrics = [self._metric(name, value, int(point.at * 1000), point.step) for name, value in point.values.items()]
        self._client.log_batch(self._runs[point.scenario], metrics=metrics)

    def _open(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        return str(self._client.create_run(experiment).info.run_id)

    def close(self) -> None:
        for run in self._runs.values():
            self._client.set_terminated(run)


TRACKERS: Mapping[str, Callable[[Path], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def open_trackers(names: Sequence[str], folder: Path) -> dict[str, Tracker]:
    """The chosen trackers, each with a folder of its own. Raises `ConfigError` or `MissingDependency`."""
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ConfigError(f"telemetry.trackers has no {unknown[0]!r}", hint=f"one of {', '.join(sorted(TRACKERS))}")
    return {name: TRACKERS[name](folder / name) for name in names}


def numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of nested metrics under joined names (`gate/candidate`); all else is left out."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float) and abs(float(value)) < float("inf"):
            found[prefix + name] = float(value)
    return found


def _load(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependency(f"{extra} is not installed", hint=f"pip install 'reef-cli[{extra}]'") from error


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """The complete lines of a file and their length in bytes."""
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    return data[:end].splitlines(), end
