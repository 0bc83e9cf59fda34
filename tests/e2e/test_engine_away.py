"""An engine that somebody else runs goes away and comes back: learning waits for it, and a step it left says why it ended."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import SAO, Server, serving, until
from tests.engines.live import Live

pytestmark = pytest.mark.slow
LIMIT_S = 120.0


class Elsewhere:
    """An engine at a fixed address, which can be killed and started again."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self.live = Live(model, folder / "engine.log", "--skip-invariance-check", "--incremental-streaming-output").wait()

    def kill(self) -> None:
        os.killpg(self.live.process.pid, signal.SIGKILL)
        self.live.process.wait(20)

    def again(self) -> None:
        port = self.live.port
        flags = ("--skip-invariance-check", "--incremental-streaming-output", "--port", str(port))
        self.live = Live(self._model, self._folder / "again.log", *flags)
        self.live.port, self.live.url = port, f"http://127.0.0.1:{port}"
        self.live.wait()


@pytest.fixture
def elsewhere(tiny_model: Path, tmp_path: Path) -> Iterator[Elsewhere]:
    made = Elsewhere(tiny_model, tmp_path)
    yield made
    made.live.stop()


def answered(server: Server, count: int) -> list[str]:
    """Receipts that are reported later."""
    return [server.ask(f"question {number}").headers["x-reef-agent-record-id"] for number in range(count)]


def report(server: Server, receipts: list[str]) -> None:
    for number, receipt in enumerate(receipts):
        reply = server.client().post("/reef/report", json={"score": float(number % 2), "references": [receipt]})
        assert reply.status_code == 200, reply.text


def jobs(server: Server) -> list[tuple[str, str | None]]:
    return [(job["state"], job["reason"]) for job in server.ledger.jobs()]


def consumed(server: Server) -> int:
    return list(server.ledger.samples().values()).count("consumed")


def learning(server: Server) -> dict[str, Any]:
    return next(row for row in server.get("/reef/status")["scenarios"] if row["name"] == "default")


@pytest.mark.parametrize("push", ["adapter", "merged"])
def test_learning_waits_for_the_engine(elsewhere: Elsewhere, tiny_model: Path, tmp_path: Path, push: str) -> None:
    flags = {**SAO, "engine.kind": "sglang", "engine.url": elsewhere.live.url, "trainer.push": push}
    with serving(tmp_path / "h", tiny_model, **flags, **{"trainer.transport": "group"}) as server:
        first, second, third = (answered(server, 2) for _ in range(3))
        elsewhere.kill()
        until(lambda: "away" in str(server.get("/reef/status")["engine"]["state"]), "the engine's absence", LIMIT_S)
        report(server, first)
        until(lambda: learning(server)["state"] == "waiting", "the scenario that waits", LIMIT_S)
        assert jobs(server) == []
        elsewhere.again()
        until(lambda: [job for job in jobs(server) if job[0] == "settled"], "the step it waited with", LIMIT_S)
        until(lambda: consumed(server) == 2, "its samples", LIMIT_S)
        assert all(state != "failed" for state, _ in jobs(server))

        (trainer,) = server.trainer_pids()
        os.kill(trainer, signal.SIGSTOP)
        report(server, second)
        until(lambda: jobs(server)[-1][0] == "training", "the second step", LIMIT_S)
        number = len(jobs(server)) - 1  # the quiet stream may have been judged before it
        elsewhere.kill()
        os.kill(trainer, signal.SIGCONT)
        until(lambda: jobs(server)[number][0] in ("failed", "settled"), "its end", LIMIT_S)
        state, reason = jobs(server)[number]
        assert state == "failed" and str(reason).startswith("engine_unavailable"), reason
        report(server, third)
        elsewhere.again()
        until(lambda: consumed(server) == 6, "all samples", LIMIT_S)
        assert all(not str(reason).startswith("head_moved") for _, reason in jobs(server)), jobs(server)
        assert server.ask("who").status_code == 200
