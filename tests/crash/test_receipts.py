"""`kill -9` under load: no receipt that a client has seen is lost, by the clients' own lists, unstreamed and streamed."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reef_cli.core.types import Inference
from reef_cli.experience.log import ExperienceLog
from tests.doubles.background import background_upstream
from tests.doubles.upstream import Upstream
from tests.e2e.server import Server, serving

CLIENTS = 8
ROUNDS = 2
LOAD_S = 1.0


@pytest.fixture(scope="module")
def provider() -> Iterator[Upstream]:
    with background_upstream() as double:
        yield double


class Client(threading.Thread):
    """Asks without a pause until its server is gone; `seen` are the receipts it was given, with what it had asked."""

    def __init__(self, server: Server, number: int) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.streams = number % 2 == 1
        self.seen: dict[str, str] = {}
        self._host, _, self._port = server.url.removeprefix("http://").partition(":")
        self._headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._host, int(self._port), timeout=30)
        turn = 0
        try:
            while True:
                text = f"client {self.number} turn {turn}"
                body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": self.streams}
                connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
                self._note(connection.getresponse(), text)
                turn += 1
        except (OSError, http.client.HTTPException):
            return

    def _note(self, reply: http.client.HTTPResponse, text: str) -> None:
        """A stream's receipt counts when its own frame has come: the one in the head is a promise only."""
        if not self.streams:
            receipt = reply.headers["x-reef-agent-record-id"]
            reply.read()
            self.seen[receipt] = text
            return
        while line := reply.readline():
            if line.startswith(b"data: {") and b'"reef":' in line:
                self.seen[json.loads(line[6:])["reef"]["agent_record_id"]] = text


def test_no_receipt_a_client_has_seen_is_lost(provider: Upstream, tmp_path: Path) -> None:
    home = tmp_path / "h"
    seen: dict[str, str] = {}
    with serving(home, Path("stub-model"), **{"engine.kind": "upstream", "engine.url": provider.url}) as server:
        for _ in range(ROUNDS):
            clients = [Client(server, number) for number in range(CLIENTS)]
            time.sleep(LOAD_S)
            server.kill()
            for client in clients:
                client.join(30)
                assert client.seen, "every client was answered before the kill"
                seen |= client.seen
            server.start().ready()
        last = list(seen)[-1]
        assert server.get(f"/reef/scenarios/default/records/{last}")["id"] == last
    log = ExperienceLog.open(home / "experience.db")
    try:
        records = {receipt: log.get("default", receipt) for receipt in seen}
    finally:
        log.close()
    lost = [receipt for receipt, record in records.items() if record is None]
    assert not lost
    for receipt, record in records.items():
        assert isinstance(record, Inference)
        assert record.complete
        assert record.messages[-1]["content"] == seen[receipt]
