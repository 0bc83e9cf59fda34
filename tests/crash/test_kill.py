"""`kill -9` of server, engine and trainer with a job held in each of its states, on real processes.

One home lives through all of it, so that each case also meets what the earlier ones left. A state is held by SQLite's write
lock (see `tests.e2e.ledger`); when a moment of a millisecond is missed, another job is started and caught.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from reef_cli.releases.service import ReleaseService
from tests.e2e.ledger import STATES
from tests.e2e.server import SAO, Server, serving, until

pytestmark = pytest.mark.slow
RETRY_S = 240.0


@pytest.fixture(scope="module")
def lifelong(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("home") / "h", tiny_model, **SAO) as server:
        server.scored(2)
        quiet(server)
        yield server


@pytest.fixture
def survivor(lifelong: Server) -> Server:
    """The server of all cases, running, also after a case that failed half-way."""
    if lifelong.process is None or lifelong.process.poll() is not None:
        lifelong.start().ready()
    return lifelong


def quiet(server: Server) -> None:
    """Wait until every report is consumed and no job is open."""
    until(
        lambda: set(server.ledger.samples().values()) == {"consumed"} and not server.ledger.open_jobs(),
        "all reports being trained once",
        RETRY_S,
    )


def sound(server: Server) -> None:
    """Every promise about jobs, reports and releases, over the home's whole life."""
    ledger, releases = server.ledger, server.releases()
    of_job = Counter(row["job_id"] for row in releases if row["operation"] == "training")
    for job in ledger.jobs():
        ends = [state for state in ledger.history(job["id"]) if state in ("settled", "failed")]
        assert len(ends) == 1, (job, ledger.history(job["id"]))
        selected = job["state"] == "settled" and job["outcome"] == "select"
        assert of_job[job["id"]] == int(selected), (job, ledger.history(job["id"]))
    consumed = Counter(one for row in releases if row["operation"] == "training" for one in row["evidence"]["consumed"])
    assert set(consumed.values()) == {1} and set(consumed) == set(ledger.samples())
    assert sum(row["current"] for row in releases) == 1
    problems = ReleaseService(server.home).verify("default")
    assert not problems, problems


class Reporter(threading.Thread):
    """Sends two scored answers, and two more whenever a job ended uncaught; may be cut off by the kill."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.caught = threading.Event()
        self.start()

    def run(self) -> None:
        with suppress(httpx.HTTPError, AssertionError):
            while not self.caught.is_set():
                self.server.scored(2)
                while not self.caught.wait(0.1) and not self._ended():
                    pass

    def _ended(self) -> bool:
        return set(self.server.ledger.samples().values()) == {"consumed"} and not self.server.ledger.open_jobs()


@contextmanager
def job_in(server: Server, state: str) -> Iterator[None]:
    """A job held in `state` while the body runs."""
    reporter = Reporter(server)
    try:
        with server.ledger.held(state, RETRY_S):
            reporter.caught.set()
            yield
    finally:
        reporter.caught.set()
        reporter.join()


def serves_a_good_release(server: Server) -> None:
    reply = server.ask("after the crash")
    chain = {row["release_id"] for row in server.releases() if not row["pending"]}
    assert reply.headers["x-reef-release-id"] in chain
    spans = server.get(f"/reef/scenarios/default/records/{reply.headers['x-reef-agent-record-id']}")["tokens"]["spans"]
    assert {span["version"] for span in spans} == {reply.headers["x-reef-weight-version"]}


def restart(server: Server) -> None:
    begun = time.monotonic()
    server.start().ready()
    print(f"ready {time.monotonic() - begun:.1f} s after the restart")


@pytest.mark.parametrize("state", STATES)
def test_the_server_is_killed(survivor: Server, state: str) -> None:
    with job_in(survivor, state):
        survivor.kill()
    restart(survivor)
    serves_a_good_release(survivor)
    quiet(survivor)
    sound(survivor)


def test_the_server_is_killed_between_the_chain_and_the_ledger(survivor: Server) -> None:
    """The release is in the chain, its job still says `publishing`: the next start must not publish it again."""
    chain = ReleaseService(survivor.home)
    before = chain.head("default")
    with job_in(survivor, "publishing"):
        moved = until(lambda: chain.head("default") if chain.head("default") != before else None, "the head moving")
        survivor.kill()
    restart(survivor)
    assert survivor.head() == moved.release_id == survivor.ask("now").headers["x-reef-release-id"]
    quiet(survivor)
    sound(survivor)


@pytest.mark.parametrize("state", STATES)
def test_the_engine_is_killed(survivor: Server, state: str) -> None:
    engine, restarts = survivor.engine_pid(), survivor.status()["engine"]["restarts"]
    with job_in(survivor, state):
        os.kill(engine, signal.SIGKILL)
    until(lambda: survivor.status()["engine"]["restarts"] > restarts, "the restart")
    survivor.ready()
    serves_a_good_release(survivor)
    quiet(survivor)
    sound(survivor)


@pytest.mark.parametrize("state", STATES)
def test_the_trainer_is_killed(survivor: Server, state: str) -> None:
    with job_in(survivor, state):
        for pid in survivor.trainer_pids():
            os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    serves_a_good_release(survivor)
    assert time.monotonic() - begun < 10, "serving does not wait for the trainer"
    quiet(survivor)
    sound(survivor)
