"""Shadows behind a real gateway and log; the engine's double says something else, slowly, when the shadow is asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef_cli.config.schema import ReefSettings
from reef_cli.core.clock import SystemClock
from reef_cli.core.errors import EngineUnavailable
from reef_cli.core.ids import ReleaseId
from reef_cli.core.ports import Delta, GenerateRequest
from reef_cli.core.types import Operation, Release, Surface
from reef_cli.experience import shadows
from reef_cli.experience.shadows import ShadowAnswer
from reef_cli.gateway.backends.local import LocalBackend
from reef_cli.gateway.deps import GatewayOptions
from reef_cli.releases.routing import Policy
from reef_cli.supervisor import shadowing
from reef_cli.supervisor.routes import Route, Routes
from reef_cli.supervisor.shadowing import ShadowAnswers, agreement
from reef_cli.telemetry.metrics import Metrics
from tests.doubles.engine import ScriptedServing, WordChat
from tests.gateway.fakes import House, house
from tests.gateway.inference_kit import ask, post

WORDS = "Words of the shadow"
NAME = ReleaseId("r7-00000000")
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def release(step: int, content: str) -> Release:
    id_ = ReleaseId(f"r{step}-00000000")
    return Release(id_, "s1", None, content, "lora", Surface.WEIGHTS, Operation.TRAINING, step, 0.0, "t")  # type: ignore[arg-type]


class Two(ScriptedServing):
    """Answers for clients, and others for the shadow once `gate` is open."""

    def __init__(self, chat: WordChat) -> None:
        super().__init__(chat)
        self.gate = asyncio.Event()
        self.shadowed: list[GenerateRequest] = []
        self.refuses = False

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        if request.release is None or request.release.release_id != NAME:
            async for delta in super().stream(request):
                yield delta
            return
        self.shadowed.append(request)
        await self.gate.wait()
        if self.refuses:
            raise EngineUnavailable("the engine is gone")
        ids = tuple(self.chat.encode(WORDS))
        yield Delta(WORDS)
        yield Delta("", self._completion(request, ids, "stop"))


class Setting:
    def __init__(self, made: House, serving: Two, answers: ShadowAnswers, routes: Routes, state: dict[str, bool]) -> None:
        self.house, self.serving, self.answers, self.routes, self.state = made, serving, answers, routes, state

    async def kept(self, count: int = 1) -> list[ShadowAnswer]:
        for _ in range(500):
            with self.house.log.read() as connection:
                rows = shadows.latest(connection, "s1", 100)
            if len(rows) >= count:
                return rows
            await asyncio.sleep(0.01)
        raise AssertionError(f"{count} answers of the shadow never came")

    def count(self, result: str) -> float:
        return self.house.metrics.shadows.value(scenario="s1", result=result)


@asynccontextmanager
async def setting(home: Path, *, keep_text: bool = True, policy: Policy | None = None) -> AsyncIterator[Setting]:
    chat, metrics, state = WordChat(), Metrics(), {"busy": False}
    serving = Two(chat)
    routes = Routes(None, None, None)  # type: ignore[arg-type]
    routes.put("s1", Route(None, policy or Policy(shadow=NAME), {NAME: release(7, "other")}))
    backend = LocalBackend(serving, chat, model="tiny")
    async with house(home, ReefSettings(), GatewayOptions(), backend=backend, metrics=metrics) as made:
        made.metrics = metrics
        answers = ShadowAnswers(
            made.log, routes, serving, metrics, SystemClock(), room=lambda: not state["busy"], keep_text=keep_text
        )
        backend._shadows = answers
        task = asyncio.create_task(answers.run())
        yield Setting(made, serving, answers, routes, state)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("dialect", list(PATHS))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_never_sees_nor_awaits_the_shadow(tmp_path: Path, dialect: str, stream: bool) -> None:
    async with setting(tmp_path) as made:
        body = ask(dialect, stream=stream, temperature=0.5)
        status, headers, raw = await asyncio.wait_for(post(made.house, PATHS[dialect], body), 5)  # the shadow still waits
        assert status == 200 and b"shadow" not in raw.lower() and headers["x-reef-release-id"] != NAME
        made.serving.gate.set()
        (answer,) = await made.kept()
        assert (answer.text, answer.finish, answer.release_id, answer.error) == (WORDS, "stop", NAME, None)
        assert (answer.record_id, answer.answered_by) == (headers["x-reef-agent-record-id"], headers["x-reef-release-id"])
        assert answer.agreement == 0.0 and answer.output_tokens == 7
        (asked,) = made.serving.shadowed
        assert asked.sampling == made.serving.asked[0].sampling and asked.input_ids == made.serving.asked[0].input_ids
        rows = made.house.log.page("s1")
        assert [row.id for row in rows] == [answer.record_id], "no record: nothing to cite, nothing to train on"
        assert WORDS.encode() not in made.house.log.get("s1", answer.record_id).request  # type: ignore[union-attr,operator]
        assert made.count("answered") == 1


async def test_shadows_wait_while_clients_need_the_engine(tmp_path: Path) -> None:
    async with setting(tmp_path) as made:
        made.state["busy"] = True
        made.serving.gate.set()
        for _ in range(3):
            assert (await post(made.house, PATHS["chat"], ask("chat")))[0] == 200
        await asyncio.sleep(0.2)
        assert made.serving.shadowed == []
        made.state["busy"] = False
        assert len(await made.kept(3)) == 3


async def test_beyond_the_queue_offers_are_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowing, "QUEUE", 2)
    async with setting(tmp_path) as made:
        for _ in range(6):
            assert (await post(made.house, PATHS["chat"], ask("chat")))[0] == 200
        assert made.count("skipped") == 3, "one is under way, two wait"
        made.serving.gate.set()
        assert len(await made.kept(3)) == 3


async def test_a_shadow_that_fails_is_noted_and_the_next_one_answers(tmp_path: Path) -> None:
    async with setting(tmp_path) as made:
        made.serving.gate.set()
        made.serving.refuses = True
        assert (await post(made.house, PATHS["chat"], ask("chat")))[0] == 200
        (failed,) = await made.kept()
        assert failed.error == "engine_unavailable: the engine is gone" and failed.text is None and made.count("failed") == 1
        made.serving.refuses = False
        assert (await post(made.house, PATHS["chat"], ask("chat")))[0] == 200
        assert (await made.kept(2))[0].text == WORDS
        with made.house.log.read() as connection:
            (row,) = shadows.summary(connection, "s1")
        assert (row["answers"], row["failed"], row["same"]) == (2, 1, 0)


async def test_what_is_not_captured_or_redacted_leaves_no_words(tmp_path: Path) -> None:
    async with setting(tmp_path, keep_text=False) as made:
        made.serving.gate.set()
        assert (await post(made.house, PATHS["chat"], ask("chat"), **{"x-reef-capture": "off"}))[0] == 200
        assert (await post(made.house, PATHS["chat"], ask("chat")))[0] == 200
        (answer,) = await made.kept()
        assert answer.text is None and answer.output_tokens == 7 and len(made.serving.shadowed) == 1


async def test_a_release_does_not_shadow_itself(tmp_path: Path) -> None:
    async with setting(tmp_path) as made:
        head = made.house.publishing.open("s1")
        made.routes.put("s1", Route(None, Policy(shadow=NAME), {NAME: replace(release(7, "x"), content_id=head.content_id)}))
        assert (await post(made.house, PATHS["chat"], ask("chat")))[0] == 200
        assert made.answers._queue.empty() and made.serving.shadowed == []


def test_agreement_is_the_part_both_begin_with() -> None:
    cases: list[tuple[Any, Any, float]] = [
        ([], [], 1.0), ([1], [], 0.0), ([1, 2, 3, 4], [1, 2, 9], 0.5), ([1, 2], [1, 2], 1.0), ([1, 2], [1, 2, 3, 4], 0.5),
    ]  # fmt: skip
    assert [agreement(a, b) for a, b, _ in cases] == [expected for *_, expected in cases]


def test_old_answers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    monkeypatch.setattr(shadows, "KEPT", 3)
    connection = sqlite3.connect(":memory:")
    shadows.create(connection)
    for number in range(5):
        shadows.store(connection, ShadowAnswer("s1", f"record {number}", "r0-00000000", NAME, float(number)))
    shadows.store(connection, ShadowAnswer("other", "record", "r0-00000000", NAME, 0.0))
    assert [row.record_id for row in shadows.latest(connection, "s1", 10)] == ["record 4", "record 3", "record 2"]
    assert len(shadows.latest(connection, "other", 10)) == 1
