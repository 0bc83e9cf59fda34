"""One call of a model on behalf of an evaluation: paid from the budget, asked again after transient failures.

Knows neither items nor grades. Time and pauses are passed in.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reef_cli.core.errors import ContextOverflow, EngineError, ReefError, UnavailableError, UpstreamError
from reef_cli.core.ports import Answer, Answering, Sampling
from reef_cli.core.types import Release
from reef_cli.evaluation.budget import Budget, Price, most_of

Sleep = Callable[[float], Awaitable[None]]
# 0.2 + 0.8 + 3.2 s: longer than a LoRA load or a short weight push, shorter than a person's patience with an outage.
PAUSES_S = (0.2, 0.8, 3.2)


@dataclass(frozen=True, slots=True)
class Called:
    """An answer, or why there is none. `engine_refused`: the engine broke on this very request while it was up."""

    answer: Answer | None
    missing: str | None = None
    engine_refused: bool = False
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Caller:
    """A model behind `answering`. `judge` marks calls that are booked as the judge's."""

    answering: Answering
    budget: Budget = field(default_factory=Budget)
    price: Price = field(default_factory=Price)
    pauses_s: tuple[float, ...] = PAUSES_S
    sleep: Sleep = asyncio.sleep
    judge: bool = False

    async def call(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, release: Release | None) -> Called:
        """Never raises for an engine's failure. `BudgetSpent` when no call fits any more."""
        most = most_of(messages, sampling, self.price)
        for attempt in range(len(self.pauses_s) + 1):
            try:
                async with self.budget.call(most, judge=self.judge) as receipt:
                    answer = await self.answering.answer(messages, sampling, release)
                    receipt.settle(answer, self.price)
            except UnavailableError as error:
                if attempt == len(self.pauses_s):
                    return _missing(error, attempt + 1)
                await self.sleep(self.pauses_s[attempt])
            except (EngineError, UpstreamError, ContextOverflow) as error:
                return _missing(error, attempt + 1, engine_refused=isinstance(error, EngineError))
            else:
                return Called(answer, attempts=attempt + 1)
        raise AssertionError("unreachable: the last attempt returns")


def _missing(error: ReefError, attempts: int, *, engine_refused: bool = False) -> Called:
    return Called(None, f"{error.code}: {error.message}"[:200], engine_refused, attempts)
