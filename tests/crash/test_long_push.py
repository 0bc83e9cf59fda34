"""A push of all weights that lasts longer than the engine's watchdog allows one thing to last, on real processes.

SGLang's watchdog (300 s) kills it when requests are under way and nothing was computed for that long, weight calls included. A
push of six minutes is 1.2 times that; here the watchdog has 5 s and the push at least 6. The engine lives because
requests are taken back before the push (`retract`; paused `in_place` it counts as stuck) and the weights come in short calls.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from reef_cli.weights import contract
from tests.crash.gate import Gate, gate
from tests.crash.test_kill import quiet
from tests.crash.test_push_kills import FULL, Embedded
from tests.e2e.server import SAO, Server, frames, stopped, until
from tests.engines.live import make_model

pytestmark = pytest.mark.slow
WATCHDOG_S = 5.0
BUCKET_S = 1.2
PUSH_WAIT_S = 2.0
SEND = "/update_weights_from_distributed"


@dataclass
class Watchdog:
    """What SGLang's does, from outside: kills the engine when one thing occupies it for too long."""

    engine: Embedded
    door: Gate
    bites: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._enough.set()
        self._thread.join(20)

    def _run(self) -> None:
        while not self._enough.wait(0.1):
            if (why := self.stuck()) and not self.bites:
                self.bites.append(why)
                self.engine.kill()

    def stuck(self) -> str | None:
        """What has gone on for too long, if anything has."""
        late = time.monotonic() - WATCHDOG_S
        for call in list(self.door.calls):
            if call.ended is None and call.begun < late and call.path.startswith(("/update", "/flush", "/begin", "/end")):
                return f"{call.path} has been under way for {WATCHDOG_S:g} s"
        pauses = [call for call in list(self.door.calls) if call.path in ("/pause_generation", "/continue_generation")]
        if pauses and pauses[-1].path == "/pause_generation" and pauses[-1].begun < late and pauses[-1].body:
            mode = orjson.loads(pauses[-1].body).get("mode")
            return None if mode == "retract" else f"paused {mode!r} for {WATCHDOG_S:g} s with requests under way"
        return None


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Server, Gate, Watchdog]]:
    model = make_model(tmp_path / "m", width=8192)
    engine = Embedded(model, tmp_path / "engine.log")
    with gate(engine.url) as door:
        settings = {"engine.kind": "sglang", "engine.url": door.url, "engine.model": str(model), **SAO, **FULL}
        server = Server(tmp_path / "h", settings | {"reef.push_wait_s": str(PUSH_WAIT_S)})
        watchdog = Watchdog(engine, door)
        try:
            with stopped(server):
                server.start().ready()
                yield server, door, watchdog
        finally:
            watchdog.stop()
            engine.stop()


class Client:
    """Streams one long answer after the other; told to come again, it does."""

    def __init__(self, server: Server) -> None:
        self.answers: list[tuple[float, float, str]] = []
        """Begin, end and receipt."""
        self.faults: list[Any] = []
        self._server, self._enough = server, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._enough.set()
        self._thread.join(60)

    def _run(self) -> None:
        client = self._server.client()
        body = self._server.body("go on", stream=True, ignore_eos=True, max_tokens=300)
        while not self._enough.is_set():
            begun = time.monotonic()
            with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code == 503 and reply.headers.get("retry-after"):
                    self._enough.wait(0.2)
                    continue
                told = list(frames(reply)) if reply.status_code == 200 else [{"error": reply.status_code}]
            self.faults += [frame for frame in told if "error" in frame]
            self.answers.append((begun, time.monotonic(), reply.headers.get("x-reef-agent-record-id", "")))


def test_a_push_longer_than_the_watchdog_costs_no_engine_and_no_request(guarded: tuple[Server, Gate, Watchdog]) -> None:
    server, door, watchdog = guarded
    first = server.head()
    door.slow(SEND, BUCKET_S)
    client = Client(server)
    try:
        server.scored(2)
        until(lambda: any(call.path == SEND for call in door.calls), "a push", 240)
        refused = server.client().post("/v1/chat/completions", json=server.body("now"))
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) <= 5, "it waited for so long and no longer"
        assert _asks_until_served(server).status_code == 200
    finally:
        client.stop()

    begun = next(call.begun for call in door.calls if call.path == "/pause_generation")
    ended = next(call.ended for call in door.calls if call.path == "/continue_generation" and call.begun > begun)
    sends = [call for call in door.calls if call.path == SEND]
    assert ended is not None and ended - begun > 1.2 * WATCHDOG_S, "the push was long"
    assert len(sends) >= 4 and max((call.ended or 0) - call.begun for call in sends) < WATCHDOG_S, "and came in short calls"
    assert watchdog.bites == [] and not watchdog.engine.dead
    assert not client.faults
    (crossing,) = [receipt for start, end, receipt in client.answers if start < begun and end > ended]
    spans = server.get(f"/reef/scenarios/default/records/{crossing}")["tokens"]["spans"]
    door.open()
    quiet(server)
    assert len(spans) == 2 and spans[0]["version"] == "base", "what was under way went on, and says where the weights changed"
    assert server.head() != first and watchdog.engine.label() == f"default@{server.head()}"


def _asks_until_served(server: Server) -> Any:
    """A client that does as it is told: again after a moment, as long as the answer is 503."""
    client = server.client()

    def once() -> Any:
        reply = client.post("/v1/chat/completions", json=server.body("still"))
        assert reply.status_code in (200, 503), reply.text
        return reply if reply.status_code == 200 else None

    return until(once, "an answer after the push", 120, every_s=0.5)


def test_the_watchdog_of_this_test_does_bite(tmp_path: Path) -> None:
    """It ends an engine that is paused in place, and one that a single call occupies for too long."""
    engine = Embedded(make_model(tmp_path / "m"), tmp_path / "engine.log")
    with gate(engine.url) as door:
        for bitten in ("in_place", "one call"):
            engine = engine if not engine.dead else Embedded(tmp_path / "m", tmp_path / "again.log")
            door.calls.clear()
            door.target = engine.url
            watchdog = Watchdog(engine, door)
            try:
                if bitten == "in_place":
                    _post(door, "/pause_generation", {"mode": "in_place"})
                else:
                    door.slow("/update_weight_version", WATCHDOG_S + 3)
                    threading.Thread(
                        target=_post, args=(door, "/update_weight_version", contract.label("x")), daemon=True
                    ).start()
                until(lambda dog=watchdog: dog.bites and dog.engine.dead, "the engine's end", 30)
                assert bitten.partition(" ")[0] in watchdog.bites[0] or "/update" in watchdog.bites[0]
            finally:
                watchdog.stop()
                engine.stop()


def _post(door: Gate, path: str, body: dict[str, Any]) -> None:
    import httpx

    with contextlib.suppress(httpx.HTTPError):  # the engine is ended under it
        httpx.post(door.url + path, json=body, timeout=60)
