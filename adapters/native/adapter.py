"""The native agent writes chat messages, one a line."""

from collections.abc import Sequence
from pathlib import Path

from reef_cli.harness.trajectory import Trajectory, lines, of_chat


def read_trajectory(files: Sequence[Path], _output: str) -> Trajectory:
    return of_chat([entry["message"] for path in files for entry in lines(path) if entry.get("type") == "message"])
