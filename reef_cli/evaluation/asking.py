"""Asking one release one item: the answer, graded, or the reason why there is none.

A transient failure of the engine is asked again a bounded number of times with growing pauses. What still has no answer is
missing: never a score. Time and pauses are passed in.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from reef_cli.core.errors import ContextOverflow, EngineError, ReefError, UnavailableError, UpstreamError
from reef_cli.core.ports import Answer, Answering, Sampling
from reef_cli.core.types import Release
from reef_cli.evaluation.graders import Grade, Python
from reef_cli.evaluation.suite import Item

Sleep = Callable[[float], Awaitable[None]]
# 0.2 + 0.8 + 3.2 s: longer than a LoRA load or a short weight push, shorter than a person's patience with an outage.
PAUSES_S = (0.2, 0.8, 3.2)


@dataclass(frozen=True, slots=True)
class Asked:
    """An item's outcome for one release. Without `grade` it is missing and `missing` says why.

    `engine_refused` marks that the engine broke on this very request while it was up: evidence against the release.
    """

    answer: Answer | None
    grade: Grade | None
    missing: str | None = None
    engine_refused: bool = False
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks with fixed sampling; the seed belongs to the item, so that every release gets the same one."""

    answering: Answering
    max_new_tokens: int = 128
    temperature: float = 0.0
    salt: str = ""
    pauses_s: tuple[float, ...] = PAUSES_S
    sleep: Sleep = asyncio.sleep

    def sampling(self, item: Item) -> Sampling:
        seed = int.from_bytes(hashlib.sha256(f"{self.salt}\0{item.id}".encode()).digest()[:4], "big") & 0x7FFFFFFF
        return Sampling(max_new_tokens=item.max_new_tokens or self.max_new_tokens, temperature=self.temperature, seed=seed)

    async def ask(self, item: Item, release: Release | None) -> Asked:
        """Never raises for an engine's failure; a grader's own failure (`EvaluationError`) passes."""
        for attempt in range(len(self.pauses_s) + 1):
            try:
                answer = await self.answering.answer(item.messages, self.sampling(item), release)
            except UnavailableError as error:
                if attempt == len(self.pauses_s):
                    return _missing(error, attempt + 1)
                await self.sleep(self.pauses_s[attempt])
            except (EngineError, UpstreamError, ContextOverflow) as error:
                return _missing(error, attempt + 1, engine_refused=isinstance(error, EngineError))
            else:
                return Asked(answer, await _graded(item, answer), attempts=attempt + 1)
        raise AssertionError("unreachable: the last attempt returns")


async def _graded(item: Item, answer: Answer) -> Grade:
    if isinstance(item.grader, Python):
        # A person's function may block; it must not stop the server.
        return await asyncio.to_thread(item.grader.grade, answer.text)
    return item.grader.grade(answer.text)


def _missing(error: ReefError, attempts: int, *, engine_refused: bool = False) -> Asked:
    return Asked(None, None, f"{error.code}: {error.message}"[:200], engine_refused, attempts)


Order = Literal["candidate_first", "current_first"]


def order_of(index: int) -> Order:
    """Who answers first alternates, so that a drifting engine slows and disturbs both sides alike."""
    return "candidate_first" if index % 2 == 0 else "current_first"
