"""The lines of @TITLE@ that are no data: how to read what it wrote. Optional functions: finish, mcp_server."""

from collections.abc import Sequence
from pathlib import Path

from reef_cli.harness.trajectory import Trajectory, lines, of_chat


def read_trajectory(files: Sequence[Path], _output: str) -> Trajectory:
    return of_chat([entry for path in files for entry in lines(path) if "role" in entry])
