"""What an evaluation may use: calls, tokens, money. Enforced before each call, so that a limit is a limit.

A call reserves the most it can use (its prompt's bytes, which no tokenizer exceeds, and its longest answer) and settles for
what it used. One that does not fit waits for calls under way to settle; when none is under way, the budget is spent.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from reef_cli.core.ports import Answer, Sampling


class BudgetSpent(Exception):
    """No further call fits. Internal: the evaluation ends without what it would have asked."""


@dataclass(frozen=True, slots=True)
class Price:
    """Money per million tokens, where the provider does not say what it charged."""

    prompt: float = 0.0
    output: float = 0.0

    def of(self, prompt_tokens: int, output_tokens: int) -> float:
        return (prompt_tokens * self.prompt + output_tokens * self.output) / 1e6


@dataclass(frozen=True, slots=True)
class Use:
    """Calls, tokens and money, used or reserved."""

    calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    money: float = 0.0

    def __add__(self, other: "Use") -> "Use":
        return Use(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
            self.money + other.money,
        )

    def __neg__(self) -> "Use":
        return Use(-self.calls, -self.prompt_tokens, -self.output_tokens, -self.money)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "money": round(self.money, 6),
        }


@dataclass(slots=True)
class Budget:
    """One evaluation's limits (None: none) and what it has used. `judging` is the judge's part of `used`."""

    calls: int | None = None
    tokens: int | None = None
    money: float | None = None
    used: Use = field(default_factory=Use)
    judging: Use = field(default_factory=Use)
    _reserved: Use = field(default_factory=Use)
    _settled: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def call(self, most: Use, *, judge: bool = False) -> AsyncIterator["Receipt"]:
        """Room for one call of at most `most`; what the receipt is told is used. `BudgetSpent` when there is no room left."""
        async with self._settled:
            await self._settled.wait_for(lambda: self._fits(most) or self._reserved.calls == 0)
            if not self._fits(most):
                raise BudgetSpent
            self._reserved += most
        receipt = Receipt()
        try:
            yield receipt
        finally:
            # Shielded from the canceller: a reservation that stays would starve every later call.
            self._reserved += -most
            self.used += receipt.use
            if judge:
                self.judging += receipt.use
            await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self._settled:
            self._settled.notify_all()

    def _fits(self, more: Use) -> bool:
        total = self.used + self._reserved + more
        pairs = ((self.calls, total.calls), (self.tokens, total.tokens), (self.money, total.money))
        return all(limit is None or value <= limit for limit, value in pairs)

    def limits(self) -> dict[str, float]:
        named = {"calls": self.calls, "tokens": self.tokens, "money": self.money}
        return {name: limit for name, limit in named.items() if limit is not None}


@dataclass(slots=True)
class Receipt:
    """What a call turned out to use; a call that failed still is one."""

    use: Use = Use(1)

    def settle(self, answer: Answer, price: Price) -> None:
        cost = answer.cost if answer.cost is not None else price.of(answer.prompt_tokens, answer.output_tokens)
        self.use = Use(1, answer.prompt_tokens, answer.output_tokens, cost)


def most_of(messages: Sequence[Mapping[str, Any]], sampling: Sampling, price: Price) -> Use:
    """The most a call can use."""
    prompt = sum(len(json.dumps(message, ensure_ascii=False).encode()) for message in messages)
    output = sampling.max_new_tokens or 0
    return Use(1, prompt, output, price.of(prompt, output))
