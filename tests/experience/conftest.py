"""Factories of records and a fresh log per test."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Inference, Report, TokenSpan, TokenTrace
from reef_cli.experience.log import ExperienceLog

Make = Callable[..., Inference]
Messages = Sequence[Mapping[str, Any]]


class Ticking:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def trace(prompt: int = 4, output: int = 3) -> TokenTrace:
    return TokenTrace(
        prompt_ids=tuple(range(prompt)),
        output_ids=tuple(range(100, 100 + output)),
        logprobs=(-0.5,) * output,
        loss_mask=(1,) * output,
        spans=(TokenSpan("base", 0, output),),
    )


def make_inference(
    messages: Messages | str = "hello",
    answer: str | None = "hi there",
    *,
    scenario: str = "s1",
    body: Mapping[str, Any] | bytes | None = None,
    at: float = 1_000_000.0,
    **fields: Any,
) -> Inference:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(body, bytes):
        body = orjson.dumps({"model": "m", "messages": list(messages), **(body or {})})
    defaults: dict[str, Any] = {"id": RecordId(new_id()), "dialect": "chat", "model": "m", "tokens": trace()}
    response = None if answer is None else {"role": "assistant", "content": answer}
    return Inference(
        scenario=scenario, created_at=at, request=body, messages=list(messages), **{"response": response, **defaults, **fields}
    )


def make_report(*records: Inference, scenario: str = "s1", at: float = 1_000_000.0, **fields: Any) -> Report:
    defaults: dict[str, Any] = {"id": RecordId(new_id()), "score": 1.0}
    return Report(scenario=scenario, created_at=at, references=tuple(record.id for record in records), **{**defaults, **fields})


class Conversation:
    """A client that resends its whole transcript."""

    def __init__(self, log: ExperienceLog, system: str = "You help.", **fields: Any) -> None:
        self.log = log
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self.fields = fields
        self.number = itertools.count()

    async def say(self, text: str, answer: str | None = None, **fields: Any) -> Inference:
        self.messages.append({"role": "user", "content": text})
        record = make_inference(list(self.messages), answer or f"answer to {text}", **{**self.fields, **fields})
        await self.log.append(record)
        self.messages.append(dict(record.response or {}))
        return record


@pytest.fixture
def clock() -> Ticking:
    return Ticking()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "experience.db"


@pytest.fixture
async def log(path: Path, clock: Ticking) -> AsyncIterator[ExperienceLog]:
    opened = ExperienceLog.open(path, clock=clock)
    await opened.scenarios.ensure("s1")
    yield opened
    opened.close()


@pytest.fixture
def make() -> Make:
    return make_inference


@pytest.fixture
def report() -> Callable[..., Report]:
    return make_report


@pytest.fixture
def converse(log: ExperienceLog) -> Callable[..., Conversation]:
    return lambda *args, **fields: Conversation(log, *args, **fields)


@pytest.fixture
def settle(log: ExperienceLog) -> Iterator[Callable[..., Any]]:
    """Write what the learning ledger would: the state of a report's sample."""

    async def write(item: Report, state: str, reason: str = "", recipe: str = "r") -> None:
        def work(connection: Any) -> None:
            sequence = connection.execute("SELECT seq FROM records WHERE id = ?", (item.id,)).fetchone()[0]
            connection.execute(
                "INSERT OR REPLACE INTO sample_state (recipe, report_id, scenario, sequence, state, reason, at)"
                " VALUES (?, ?, ?, ?, ?, ?, 0)",
                (recipe, item.id, item.scenario, sequence, state, reason),
            )
            connection.executemany(
                "INSERT OR REPLACE INTO sample_records (recipe, record_id, report_id, scenario) VALUES (?, ?, ?, ?)",
                [(recipe, reference, item.id, item.scenario) for reference in item.references],
            )

        await log.write(work)

    yield write
