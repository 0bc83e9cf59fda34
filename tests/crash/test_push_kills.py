"""`kill -9` of trainer, engine and server at each point of a push of all weights, on real processes.

The engine runs on its own and is reached by its address, through a door that holds one control call of the push; so every point
is met exactly, with no hook in the product. One home lives through all of it. After each kill requests must be answered within
seconds, by weights that are bit for bit those of the head, and the job must end exactly once.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from reef_cli.releases.service import ReleaseService
from reef_cli.weights import contract
from reef_cli.weights.group import free_port
from tests.crash.gate import Gate, gate
from tests.crash.test_kill import Reporter, job_in, quiet
from tests.e2e.server import LIMIT_S, SAO, Server, stopped, until
from tests.engines.live import Live, make_model

pytestmark = pytest.mark.slow
SECONDS = 60.0
"""Longest wait for an answer after everything that was killed is there again, on a machine that does many other things."""
POINTS = {
    "paused": ("/pause_generation", 1, False),
    "group formed": ("/begin_weight_update", 1, True),
    "half the buckets": ("/update_weights_from_distributed", 4, True),
    "version set": ("/update_weight_version", 2, False),
}
STATES = {"before commit": "publishing", "after commit": "loaded"}
FLAGS = ("--skip-invariance-check", "--incremental-streaming-output")
FULL = {"trainer.method": "full", "trainer.transport": "group", "trainer.bucket_mb": "1", "reef.policy_lr": "1e-4"}


class Engine(Protocol):
    """An engine that somebody else runs."""

    @property
    def url(self) -> str: ...

    @property
    def dead(self) -> bool: ...

    def kill(self) -> None: ...

    def again(self) -> None:
        """Start it as its owner would: under the same address, with its own first weights."""

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any: ...

    def label(self) -> str: ...


class Embedded:
    """The embedded engine in this role."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log, self._port = model, log, free_port()
        self._start()
        self.url = self._live.url

    def _start(self) -> None:
        self._live = Live(self._model, self._log, "--port", str(self._port), *FLAGS)
        self._live.url = f"http://127.0.0.1:{self._port}"
        self._live.wait()

    @property
    def dead(self) -> bool:
        return self._live.process.poll() is not None

    def kill(self) -> None:
        os.killpg(self._live.process.pid, signal.SIGKILL)
        self._live.process.wait(20)

    def again(self) -> None:
        self._start()

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._live.post(path, dict(body or {})).json()

    def label(self) -> str:
        return str(httpx.get(f"{self.url}/model_info", timeout=30).json()["weight_version"])

    def stop(self) -> None:
        self._live.stop()


@dataclass
class World:
    """A server, the engine it reaches through a door, and the folder of its model."""

    server: Server
    engine: Engine
    door: Gate
    model: Path

    def up(self) -> None:
        """Everything running, also after a case that failed half-way."""
        self.door.open()
        if self.engine.dead:
            self.engine.again()
        if self.server.process is None or self.server.process.poll() is not None:
            self.server.start().ready(LIMIT_S)

    def kill(self, victim: str) -> None:
        if victim == "engine":
            self.engine.kill()
        elif victim == "trainer":
            for pid in self.server.trainer_pids():
                os.kill(pid, signal.SIGKILL)
        else:
            self.server.kill()

    def survived(self) -> None:
        """All that must be true after a kill, once what was killed is started again."""
        self.up()
        begun = time.monotonic()
        until(self._answers, "an answer", SECONDS, every_s=0.2)
        print(f"answered {time.monotonic() - begun:.1f} s after everything was there again")
        self._answers_well()
        quiet(self.server)
        sound(self.server)
        self._runs_the_head()

    def _answers_well(self) -> None:
        """By releases of the chain alone; an answer under way when the head moves has a span for each."""
        reply = self.server.ask("after the crash")
        record = self.server.get(f"/reef/scenarios/default/records/{reply.headers['x-reef-agent-record-id']}")
        good = {"base", *(f"default@{row['release_id']}" for row in self.server.releases())}
        spans = record["tokens"]["spans"]
        assert record["complete"] and {span["version"] for span in spans} <= good, spans

    def _answers(self) -> bool:
        return self.server.client().post("/v1/chat/completions", json=self.server.body("still")).status_code == 200

    def _runs_the_head(self) -> None:
        """The engine says so, and loading the head's files anew changes no bit."""
        chain = ReleaseService(self.server.home)
        head = chain.head("default")
        assert head is not None
        folder = self.model if head.kind == "base" else chain.directory(head.content_id)
        label = "base" if head.kind == "base" else f"default@{head.release_id}"
        until(lambda: self.engine.label() == label, f"the engine running {label}", SECONDS)
        held = self._checksum()
        assert self.engine.post("/update_weights_from_disk", contract.read_disk(str(folder), label))["success"]
        assert self._checksum() == held, "it held other weights than it said"

    def _checksum(self) -> str:
        return str(self.engine.post("/weights_checker", {"action": "checksum", "selector": "all"})["per_engine_checksum"])


def cut_off(world: World, point: str, victim: str) -> None:
    """Kill the victim when a push has come to a point, and see what comes after."""
    world.up()
    world.door.hold(*POINTS[point])
    reporter = Reporter(world.server)
    assert world.door.caught.wait(240), f"no push came to {point!r}"
    reporter.caught.set()
    world.kill(victim)
    world.survived()


def sound(server: Server) -> None:
    """Over the home's whole life: every job ended once, every report is in one release that stayed, and no release without its
    job's success stays at the head."""
    ledger, releases = server.ledger, server.releases()
    kept = []
    for job in ledger.jobs():
        history = ledger.history(job["id"])
        assert sum(state in ("settled", "failed") for state in history) == 1, (job, history)
        if "training" not in history:
            continue  # a gate: it judges the steps since the last one when the stream goes quiet
        made = [row for row in releases if row["job_id"] == job["id"] and row["operation"] == "training"]
        assert len(made) <= 1, (job, made)
        if job["state"] == "settled" and job["outcome"] == "select":
            kept += made
            assert made, (job, history)
        elif made:  # published, not loaded: the chain went back in the next release
            after = next(row for row in releases if row["parent_release_id"] == made[0]["release_id"])
            assert after["operation"] == "rollback", (job, after)
    consumed = Counter(one for row in kept for one in row["evidence"]["consumed"])
    assert set(consumed.values()) == {1} and set(consumed) == set(ledger.samples())
    assert sum(row["current"] for row in releases) == 1
    assert not ReleaseService(server.home).verify("default")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("push")
    model = make_model(folder / "m", width=8192)
    engine = Embedded(model, folder / "engine.log")
    with gate(engine.url) as door:
        settings = {"engine.kind": "sglang", "engine.url": door.url, "engine.model": str(model), **SAO, **FULL}
        server = Server(folder / "h", settings)
        try:
            with stopped(server):
                server.start().ready()
                server.scored(2)
                quiet(server)
                yield World(server, engine, door, model)
        finally:
            engine.stop()


@pytest.mark.parametrize("victim", ["trainer", "engine", "server"])
@pytest.mark.parametrize("point", POINTS)
def test_a_push_is_cut_off(world: World, point: str, victim: str) -> None:
    cut_off(world, point, victim)


@pytest.mark.parametrize("victim", ["trainer", "engine", "server"])
@pytest.mark.parametrize("moment", STATES)
def test_a_publication_is_cut_off(world: World, moment: str, victim: str) -> None:
    world.up()
    with job_in(world.server, STATES[moment]):
        world.kill(victim)
    world.survived()
