"""`reef discover` against a real server that trains on its grids: releases, a kill in the middle, the way on, the files."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import LIMIT_S, Server, clean_environment, command, serving, until

pytestmark = pytest.mark.slow

TTTD = {
    "reef.recipe": "recipes.tttd.recipe:TTTDRecipe",
    "reef.batch_size": "6",
    "reef.group_size": "3",
    "reef.lr": "1e-3",
    "reef.min_ess": "0",
    "reef.gate_every": "1000",
    "evaluation.max_kl": "1000",
    "evaluation.smoke_items": "0",
}
PROBLEM = "tests.discovery.toy:Letters"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("home") / "h", tiny_model, **TTTD) as running:
        yield running


def words(server: Server, *more: str) -> list[str]:
    return command("discover", PROBLEM, "--home", str(server.home), "--run", "letters", *more)


def discover(server: Server, *more: str, fails: bool = False) -> Any:
    done = subprocess.run(
        words(server, "--json", *more), capture_output=True, text=True, timeout=LIMIT_S, env=clean_environment(), check=False
    )
    assert (done.returncode != 0) is fails, done.stderr + server.words()[-3000:]
    return json.loads(done.stdout or done.stderr)


def rows(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((server.home / "discovery" / "letters" / "best.json").read_text())["history"]
    return found


def test_a_run_learns_is_killed_goes_on_and_shows_its_results(server: Server) -> None:
    first = discover(server, "--steps", "1")
    assert first["steps"] == 1 and first["tries"] == 6 and first["valid"] and first["strict"] > 1.0
    (row,) = first["history"]
    assert row["trained"] is True and row["head"] == server.head("letters") and server.head("letters").startswith("r1-")
    (job,) = server.ledger.jobs()
    assert job["state"] == "settled" and job["outcome"] == "select"
    for name in ("best.json", "curve.svg", "report.html"):
        assert Path(first["files"][name]).stat().st_size > 0

    child = subprocess.Popen(words(server, "--steps", "1"), env=clean_environment(), stderr=subprocess.DEVNULL)
    archive = server.home / "discovery" / "letters" / "archive.db"
    until(lambda: tries(archive) > 6, "a try of the second step")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    kept = tries(archive)
    second = discover(server, "--steps", "1")
    assert second["tries"] == 12 and kept <= 12 and second["history"][1]["trained"] is True
    assert second["strict"] >= first["strict"] and server.head("letters") == second["history"][1]["head"]
    assert len([job for job in server.ledger.jobs() if job["state"] == "settled"]) == 2

    child = subprocess.Popen(words(server, "--steps", "5"), env=clean_environment(), stderr=subprocess.PIPE, text=True)
    until(lambda: tries(archive) > 12, "a try of the third step")
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 130 and "goes on" in said
    shown = discover(server, "--steps", "0")
    assert shown["history"][:2] == second["history"]

    refused = discover(server, "--steps", "1", "--groups", "5", fails=True)
    assert "2 x 3" in refused["error"]["message"]


def test_a_frozen_run_reports_and_trains_nothing(server: Server) -> None:
    before = len(server.ledger.jobs())
    found = discover(
        server, "--steps", "1", "--frozen", "--run", "still", "--scenario", "still", "--groups", "2", "--rollouts", "2"
    )
    assert found["tries"] == 4 and len(server.ledger.jobs()) == before and server.head("still").startswith("r0-")
    counts = next(row for row in server.status()["scenarios"] if row["name"] == "still")["counts"]
    assert counts["reports"] == 4 and counts["refused:opted_out"] == 4


def tries(archive: Path) -> int:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(f"file:{archive}?mode=ro", uri=True, timeout=10)) as connection:
        return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])
