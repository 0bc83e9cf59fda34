"""Coding tasks as folders: what an agent is asked, what its work folder holds, and the unit tests that grade what it left.

    <task>/task.toml      prompt, and optionally split, weight, must_not_regress
    <task>/files/         the work folder at the start
    <task>/tests/         test_*.py, never shown to the agent

Tests run after the agent's processes are gone, in a sandbox of their own with the work folder and no network. The score is the
share of tests that passed.
"""

import hashlib
import json
import secrets
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ConfigError
from reef_cli.harness import files
from reef_cli.harness.episodes import Task
from reef_cli.harness.tree import canonical
from reef_cli.sandbox import program

_SCRIPT = Path(__file__).with_name("unit_tests.py")
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "split": lambda value: value in ("heldout", "development"),
    "weight": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1000,
    "must_not_regress": lambda value: isinstance(value, bool),
}
_KEYS = {"prompt", *_FITS}
LIMITS = program.Limits(seconds=60.0)


@dataclass(frozen=True, slots=True)
class CodingTask:
    """A task with its tests. `facts` are the keys of `task.toml` besides the prompt."""

    task: Task
    tests: Path
    facts: Mapping[str, Any]

    def digest(self) -> str:
        """Of everything that decides what the task is."""
        mark = hashlib.sha256(canonical({"id": self.task.id, "prompt": self.task.prompt, "facts": dict(self.facts)}))
        for name, file in (*sorted(self.task.files.items()), *sorted(files.read(self.tests).items())):
            mark.update(f"{name}\0{len(file.data)}\0".encode() + file.data)
        return mark.hexdigest()


def load_tasks(folder: Path) -> list[CodingTask]:
    """The tasks of a folder, by name. `ConfigError` names the task and what is wrong with it."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder of tasks", hint="reef.tasks names a folder with one folder per task")
    found = [_load(path.parent) for path in sorted(folder.glob("*/task.toml"))]
    if not found:
        raise ConfigError(f"{folder} holds no task", hint="a task is a folder with task.toml, files/ and tests/")
    return found


def _load(folder: Path) -> CodingTask:
    try:
        raw = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / 'task.toml'}", why=str(error)) from error
    if set(raw) - _KEYS or not isinstance(raw.get("prompt"), str):
        raise ConfigError(f"task {folder.name} is malformed", hint=f"the keys of task.toml are {', '.join(sorted(_KEYS))}")
    tests = folder / "tests"
    if not list(tests.glob("test_*.py")):
        raise ConfigError(f"task {folder.name} has no tests", hint="put test_*.py into its folder tests/")
    start = files.read(folder / "files") if (folder / "files").is_dir() else {}
    facts = {key: value for key, value in raw.items() if key != "prompt"}
    if wrong := [key for key, value in facts.items() if not _FITS[key](value)]:
        raise ConfigError(f"task {folder.name} is malformed", why=f"{wrong[0]} cannot be {facts[wrong[0]]!r}")
    return CodingTask(Task(folder.name, raw["prompt"], start), tests, facts)


def run_tests(tests: Path, work: Path, limits: program.Limits = LIMITS) -> tuple[float, str]:
    """Score of a work folder and a sentence for a person. Raises `MissingDependency` without a sandbox."""
    word = secrets.token_hex(8)
    done = program.run(
        program.Program(
            (str(Path(sys.executable).resolve()), "-I", "/reef/unit_tests.py", "/reef/tests", "/reef/work"),
            writable={"/reef/work": work},
            readable={"/reef/tests": tests, "/reef/unit_tests.py": _SCRIPT},
            cwd="/reef/work",
            stdin=f"{word}\n".encode(),
            limits=limits,
        )
    )
    line = next((line for line in reversed(done.output.splitlines()) if line.startswith(f"{word} ")), None)
    if line is None:
        return 0.0, "the tests did not end in time" if done.timed_out else f"the tests ended with status {done.code}"
    result = json.loads(line.removeprefix(f"{word} "))
    run, wrong = int(result["run"]), list(result["wrong"])
    passed = max(0, run - len(wrong) - int(result["skipped"]))
    if run == 0:
        return 0.0, "no test ran"
    return passed / run, f"{passed} of {run} tests passed" + (f"; not {', '.join(wrong[:3])}" if wrong else "")
