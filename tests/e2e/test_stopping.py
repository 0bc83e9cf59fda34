"""How a server ends: draining on the first signal, at once on the second, through `reef stop`, and who owns a home."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import LIMIT_S, Server, frames, reef, serving, until

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}


class Reader(threading.Thread):
    """A client that reads one long stream."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.url, self.headers, self.body = server.url, {"Authorization": f"Bearer {server.token}"}, server.body("go", **LONG)
        self.begun = threading.Event()
        self.frames: list[dict] = []
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with (
                httpx.Client(base_url=self.url, headers=self.headers, timeout=LIMIT_S) as client,
                client.stream("POST", "/v1/chat/completions", json={**self.body, "stream": True}) as reply,
            ):
                for frame in frames(reply):
                    self.frames.append(frame)
                    self.begun.set()
        except httpx.HTTPError as error:
            self.failure = error
        self.begun.set()

    @property
    def finished(self) -> bool:
        """Whether the answer came to its own end, with a receipt."""
        reasons = [choice.get("finish_reason") for frame in self.frames for choice in frame.get("choices", ())]
        return "length" in reasons and any("reef" in frame for frame in self.frames)


@pytest.fixture
def own(tiny_model: Path, tmp_path: Path):
    with serving(tmp_path / "h", tiny_model) as server:
        yield server


def test_the_first_signal_lets_streams_finish_and_exits_0(own: Server) -> None:
    reader = Reader(own)
    assert reader.begun.wait(LIMIT_S)
    own.signal(signal.SIGINT)
    refused = (
        until(lambda: _refused(own), "a new request being refused while draining", every_s=0.005) if reader.is_alive() else 503
    )
    assert own.ended() == 0
    reader.join(LIMIT_S)
    assert reader.failure is None and reader.finished, reader.frames[-2:]
    assert refused in (503, "closed")
    assert not (own.home / "run" / "serve.json").exists()
    assert "Traceback" not in own.words()


def _refused(server: Server) -> int | str | None:
    try:
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}) as client:
            status = client.post("/v1/chat/completions", json=server.body("late", max_tokens=1)).status_code
            return status if status != 200 else None
    except (httpx.TransportError, AssertionError, FileNotFoundError):
        return "closed"


def test_a_second_signal_cuts_streams_off(own: Server) -> None:
    readers = [Reader(own) for _ in range(6)]
    assert all(reader.begun.wait(LIMIT_S) for reader in readers)
    own.signal(signal.SIGINT)
    until(lambda: "draining" in own.output.read_text(), "draining", every_s=0.005)
    own.signal(signal.SIGINT)
    begun = time.monotonic()
    own.ended()
    assert time.monotonic() - begun < 30
    for reader in readers:
        reader.join(LIMIT_S)
        assert reader.finished or reader.failure is not None or any("error" in frame for frame in reader.frames)


def test_reef_stop_waits_until_the_server_is_gone(own: Server) -> None:
    owner = reef("serve", "--reef.home", str(own.home), "--reef.port", "0", "--engine.model", own.model)
    assert owner.returncode == 4 and str(own.pid) in owner.stderr, owner.stderr
    stopped = reef("stop", "--json", "--home", str(own.home))
    assert stopped.returncode == 0 and json.loads(stopped.stdout)["pid"] == own.pid
    assert own.ended(5) == 0
    again = reef("stop", "--home", str(own.home))
    assert again.returncode == 6 and "no server runs" in again.stderr


def test_what_was_acknowledged_survives_kill_9_and_the_engine_follows_its_server(own: Server) -> None:
    receipts = [own.ask(f"keep {n}").headers["x-reef-agent-record-id"] for n in range(3)]
    report = own.client().post("/reef/report", json={"feedback": "good", "references": receipts[:1]}).json()["agent_record_id"]
    engine, head, token = own.engine_pid(), own.head(), own.token
    own.kill()
    until(lambda: not Path(f"/proc/{engine}").exists(), "the engine's own end", 30)
    own.start().ready()
    assert own.token == token and own.head() == head
    for one in (*receipts, report):
        assert own.get(f"/reef/scenarios/default/records/{one}")["id"] == one


def test_an_engine_that_dies_comes_back_by_itself(own: Server) -> None:
    before, engine = own.greedy(), own.engine_pid()
    os.kill(engine, signal.SIGKILL)
    until(lambda: own.client().get("/readyz").status_code == 503, "the fault being noticed", every_s=0.01)
    refused = own.client().post("/v1/chat/completions", json=own.body("now"))
    assert refused.status_code in (200, 502, 503), refused.text
    until(lambda: own.client().get("/readyz").status_code == 200, "the engine's return", every_s=0.2)
    assert own.greedy() == before and own.engine_pid() != engine
    assert own.status()["engine"]["restarts"] == 1
