"""Trackers: the JSONL file survives a cut line, the others write what their own readers read back."""

import json
import os
from pathlib import Path

import pytest

from reef_cli.core.errors import ConfigError, MissingDependency
from reef_cli.telemetry import trackers
from reef_cli.telemetry.trackers import JsonlTracker, Point, numbers, open_trackers


def point(sequence: int, scenario: str = "default", **values: float) -> Point:
    return Point(sequence, scenario, sequence, f"job{sequence}", "select", 1000.0 + sequence, values or {"reward_mean": 0.5})


def test_a_line_cut_by_a_crash_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "steps.jsonl"
    first = JsonlTracker(path)
    first.write(point(1))
    first.write(point(2))
    first.close()
    os.truncate(path, path.stat().st_size - 5)
    again = JsonlTracker(path)
    assert again.last == 1
    again.write(point(2))
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["sequence"] for line in lines] == [1, 2]
    assert lines[1]["values"] == {"reward_mean": 0.5}


def test_numbers_are_flattened_and_the_rest_left_out() -> None:
    metrics = {
        "loss": 0.5,
        "gate": {"wins": 3, "note": "x"},
        "bad": float("nan"),
        "far": float("inf"),
        "none": None,
        "on": True,
    }
    assert numbers(metrics) == {"loss": 0.5, "gate/wins": 3.0, "on": 1.0}


def test_an_unknown_tracker_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'clearml'"):
        open_trackers(["clearml"], tmp_path)


def test_a_missing_extra_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(MissingDependency) as caught:
        open_trackers(["wandb"], tmp_path)
    assert caught.value.hint == "pip install 'reef-cli[wandb]'"


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = trackers.TensorBoardTracker(tmp_path)
    tracker.write(point(1, reward_mean=0.25))
    tracker.write(point(2, reward_mean=0.75))
    tracker.close()
    found = events.EventAccumulator(str(tmp_path / "default"))
    found.Reload()
    assert [(event.step, event.tensor_proto.float_val[0]) for event in found.Tensors("reward_mean")] == [(1, 0.25), (2, 0.75)]


def test_wandb_keeps_an_offline_run_per_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb.sdk")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = trackers.WandbTracker(tmp_path / "wandb")
    tracker.write(point(1, "left"))
    tracker.write(point(1, "right"))
    tracker.close()
    runs = list((tmp_path / "wandb").rglob("run-*.wandb"))
    assert len(runs) == 2
    assert all(run.stat().st_size > 0 for run in runs)


def test_mlflow_needs_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="no server is named"):
        trackers.MlflowTracker(tmp_path)


def test_mlflow_keeps_a_metric_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    tracker = trackers.MlflowTracker(tmp_path)
    tracker.write(point(1, reward_mean=0.25))
    tracker.write(point(2, reward_mean=0.75))
    tracker.close()
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("reef/default")
    (run,) = client.search_runs([experiment.experiment_id])
    assert [metric.value for metric in client.get_metric_history(run.info.run_id, "reward_mean")] == [0.25, 0.75]
