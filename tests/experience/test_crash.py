"""`kill -9` under load, and a disk that refuses to grow: every id that was acknowledged is there afterwards."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reef_cli.core.types import Inference, Report
from reef_cli.experience.log import ExperienceLog

CHILD = Path(__file__).with_name("appender.py")


@contextmanager
def child(path: Path, durability: str, workers: int, limit: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(CHILD), str(path), durability, str(workers), str(limit)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def acknowledged(process: subprocess.Popen[str], enough: int) -> list[str]:
    """Whole lines until there are `enough`; then the child is killed, and what was still in the pipe counts as well."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if len(lines) == enough:
            process.kill()
    return [line.strip() for line in lines if line.endswith("\n")]


def check(path: Path, lines: list[str]) -> None:
    log = ExperienceLog.open(path)
    with log.read() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        orphans = "SELECT count(*) FROM records r LEFT JOIN payloads p ON p.seq = r.seq WHERE p.seq IS NULL"
        assert connection.execute(orphans).fetchone() == (0,)
        counted = connection.execute("SELECT kind, count(*) FROM records GROUP BY kind").fetchall()
    for line in lines:
        kind, identifier = line.split()
        assert isinstance(log.get("s1", identifier), Inference if kind == "record" else Report), line
    counts = log.counts("s1")
    assert dict(counted).get("inference", 0) == counts["inferences"]
    assert dict(counted).get("report", 0) == counts["reports"]
    log.close()


@pytest.mark.parametrize(("durability", "workers"), [("process", 64), ("process", 1), ("power", 16)])
def test_acknowledged_records_survive_kill_9(tmp_path: Path, durability: str, workers: int) -> None:
    path = tmp_path / "experience.db"
    for _ in range(2):
        with child(path, durability, workers) as process:
            lines = acknowledged(process, 400)
        assert len(lines) >= 400
        check(path, lines)


def test_a_disk_that_refuses_to_grow_loses_nothing_it_took(tmp_path: Path) -> None:
    path = tmp_path / "experience.db"
    with child(path, "process", 8, limit=4_000_000) as process:
        assert process.stdout is not None
        lines: list[str] = []
        refused = 0
        for line in process.stdout:
            refused += line == "full\n"
            lines.append(line.strip())
            if refused >= 20:
                process.kill()
    stored = [line for line in lines if line != "full"]
    assert len(stored) > 100
    assert refused >= 20
    check(path, stored)
