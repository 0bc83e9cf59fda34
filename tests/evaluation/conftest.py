"""A fake that answers per release, and suites made from a few words."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from reef_cli.core.ids import ContentId, ReleaseId
from reef_cli.core.ports import Answer, Sampling
from reef_cli.core.types import Operation, Release, Surface
from reef_cli.evaluation import Suite

Reply = Callable[[str, str, Sampling], str]


class Scripted:
    """`reply(release_id, question, sampling)` gives the text or raises; every call is written down in order."""

    def __init__(self, reply: Reply, delay_s: float = 0.0) -> None:
        self.reply = reply
        self.delay_s = delay_s
        self.calls: list[tuple[str, str]] = []
        self.samplings: dict[tuple[str, str], Sampling] = {}
        self.running = self.most = 0

    async def answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, release: Release | None) -> Answer:
        name = release.release_id if release else "base"
        question = str(messages[-1]["content"])
        self.calls.append((name, question))
        self.samplings[name, question] = sampling
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            text = self.reply(name, question, sampling)
        finally:
            self.running -= 1
        return Answer(text, len(text.split()), "stop")


def make_release(name: str, **evidence: Any) -> Release:
    return Release(
        ReleaseId(name), "s", None, ContentId(f"sha256:{name}"), "lora", Surface.WEIGHTS, Operation.TRAINING, 1, 0.0, "job",
        evidence,
    )  # fmt: skip


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def release() -> Callable[..., Release]:
    return make_release


@pytest.fixture
def suite() -> Callable[..., Suite]:
    """`suite(n, **facts of every item)`: n items q0..., passed by an answer that contains "yes"."""

    def make(count: int, anchors: int = 0, **facts: Any) -> Suite:
        rows = [
            {
                "id": f"q{index}",
                "messages": [{"role": "user", "content": f"q{index}"}],
                "grader": {"kind": "contains", "all": ["yes"]},
                "must_not_regress": index < anchors,
                **facts,
            }
            for index in range(count)
        ]
        return Suite.parse("\n".join(json.dumps(row) for row in rows), "made.jsonl")

    return make
