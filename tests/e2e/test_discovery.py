"""`reef discover` against a real server that trains on its grids: releases, a kill in the middle, the way on, the files."""

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
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


def words(server: Server, run: str, *more: str) -> list[str]:
    return command("discover", PROBLEM, "--home", str(server.home), "--run", run, *more)


def discover(server: Server, run: str, *more: str, fails: bool = False) -> Any:
    done = subprocess.run(
        words(server, run, "--json", *more),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=clean_environment(),
        check=False,
    )
    assert (done.returncode != 0) is fails, done.stderr + server.words()[-3000:]
    return json.loads(done.stdout or done.stderr)


def tries(server: Server, run: str) -> int:
    """Tries in a run's archive so far."""
    archive = server.home / "discovery" / run / "archive.db"
    if not archive.exists():
        return 0
    with closing(sqlite3.connect(f"file:{archive}?mode=ro", uri=True, timeout=10)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])
        except sqlite3.OperationalError:
            return 0  # the tables are not there yet


def serves(server: Server, scenario: str, release_id: str) -> bool:
    """Whether the head has the content of `release_id`, a trained one; an idle gate gives the same content a new release."""
    content = {row["release_id"]: row["content_id"] for row in server.releases(scenario)}
    first = server.releases(scenario)[-1]["content_id"]
    return content[server.head(scenario)] == content[release_id] != first


def test_a_run_learns_from_a_step_and_writes_its_results(server: Server) -> None:
    found = discover(server, "learns", "--steps", "1")
    assert found["steps"] == 1 and found["tries"] == 6 and found["valid"] and found["strict"] > 1.0
    (row,) = found["history"]
    assert row["trained"] is True and serves(server, "learns", row["head"])
    job = next(job for job in server.ledger.jobs() if job["scenario"] == "learns")
    assert job["state"] == "settled" and job["outcome"] == "select"
    for name in ("best.json", "curve.svg", "report.html"):
        assert Path(found["files"][name]).stat().st_size > 0
    assert discover(server, "learns", "--steps", "0")["history"] == found["history"]
    refused = discover(server, "learns", "--steps", "1", "--groups", "5", fails=True)
    assert "2 x 3" in refused["error"]["message"]


def test_a_killed_run_goes_on_without_asking_twice(server: Server) -> None:
    child = subprocess.Popen(words(server, "killed", "--steps", "1"), env=clean_environment(), stderr=subprocess.DEVNULL)
    until(lambda: tries(server, "killed"), "a first try")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    kept = tries(server, "killed")
    found = discover(server, "killed", "--steps", "1")
    assert found["tries"] == 6 >= kept > 0 and found["history"][0]["trained"] is True
    assert serves(server, "killed", found["history"][0]["head"])
    counts = next(row for row in server.status()["scenarios"] if row["name"] == "killed")["counts"]
    assert counts["reports"] == 6 == counts["consumed"]
    assert 6 <= counts["inferences"] <= 6 + 16, "at most the answers under way were asked for again"


def test_ctrl_c_keeps_what_was_found_and_a_frozen_run_trains_nothing(server: Server) -> None:
    frozen = ("--frozen", "--groups", "2", "--rollouts", "3")
    child = subprocess.Popen(
        words(server, "stopped", "--steps", "500", *frozen), env=clean_environment(), stderr=subprocess.PIPE, text=True
    )
    until(lambda: tries(server, "stopped"), "a first try")
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 130 and "goes on" in said
    kept = tries(server, "stopped")
    found = discover(server, "stopped", "--steps", "1", *frozen)
    assert found["tries"] >= max(kept, 6) and found["tries"] % 6 == 0
    assert not [job for job in server.ledger.jobs() if job["scenario"] == "stopped"] and server.head("stopped").startswith(
        "r0-"
    )
    counts = next(row for row in server.status()["scenarios"] if row["name"] == "stopped")["counts"]
    assert counts["reports"] == found["tries"] == counts["refused:opted_out"]
