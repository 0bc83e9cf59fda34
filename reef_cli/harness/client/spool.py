"""Receipts per run, and reporting each run exactly once.

A run appends to `<run>.open` and renames it to `<run>.done` at its end; a run whose wrapper died counts as done. Reporting
claims a file by renaming it to `<run>.claim-<pid>`; a dead claimer's file can be claimed again, and since the report's id is
made from the run, a report that was already sent is not counted twice. A reported file becomes `<run>.sent`.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .store import alive


def new_run() -> str:
    """An id that sorts by time and names the process that owns it."""
    return f"{int(time.time() * 1000):013d}-{os.getpid()}-{secrets.token_hex(3)}"


class Run:
    """The spool of one run."""

    def __init__(self, spool: Path, run: str) -> None:
        spool.mkdir(parents=True, exist_ok=True)
        self.id = run
        self.path = spool / f"{run}.open"
        self._lock = threading.Lock()
        self.count = 0

    def add(self, receipt: Mapping[str, Any]) -> None:
        """Append one receipt; a line is written at once, so that a killed wrapper loses none."""
        with self._lock, self.path.open("ab", buffering=0) as file:
            file.write((json.dumps(receipt) + "\n").encode())
            self.count += 1

    def close(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".done"))


class Claim:
    """One run's receipts, held by this process until `sent` or `release`."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run
        self.receipts = list(_receipts(path))

    def sent(self) -> None:
        self.path.replace(self.path.with_name(f"{self.run}.sent"))

    def release(self) -> None:
        self.path.replace(self.path.with_name(f"{self.run}.done"))


def claim(spool: Path, only: str | None = None) -> Iterator[Claim]:
    """Claim finished runs, oldest first; what another process claims first is left to it."""
    for path in sorted(spool.glob("*")) if spool.is_dir() else []:
        run, _, state = path.name.rpartition(".")
        if not run or (only is not None and run != only) or not _free(run, state):
            continue
        mine = path.with_name(f"{run}.claim-{os.getpid()}")
        try:
            path.replace(mine)
        except FileNotFoundError:
            continue
        yield Claim(mine, run)


def pending(spool: Path) -> int:
    """Runs that wait to be reported."""
    return sum(_free(*path.name.rpartition(".")[::2]) for path in spool.glob("*")) if spool.is_dir() else 0


def _free(run: str, state: str) -> bool:
    if state == "done":
        return True
    if state == "open":
        return not alive(int(run.split("-")[1]))
    return state.startswith("claim-") and not alive(int(state[6:]))


def _receipts(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in path.read_bytes().splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("receipt"):
            yield value
