"""Asking one release one item: the answer, graded, or the reason why there is none.

What has no answer, or an answer that could not be graded, is missing: never a score. What no longer fits the budget is marked
apart, since it says nothing about the release.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from reef_cli.core.ports import Answer, Answering, Sampling
from reef_cli.core.types import Release
from reef_cli.evaluation.budget import Budget, BudgetSpent, Price
from reef_cli.evaluation.calling import PAUSES_S, Called, Caller, Sleep
from reef_cli.evaluation.grade import Case, Grade, Ungraded, Working, grade, no_judge
from reef_cli.evaluation.judging import Pairwise
from reef_cli.evaluation.suite import Item

SPENT = "the budget is spent"


@dataclass(frozen=True, slots=True)
class Asked:
    """An item's outcome for one release. Without `grade` it is missing and `missing` says why.

    `engine_refused` marks that the engine broke on this very request while it was up: evidence against the release. `unpaid`
    marks what the budget no longer covered.
    """

    answer: Answer | None
    grade: Grade | None
    missing: str | None = None
    engine_refused: bool = False
    attempts: int = 1
    unpaid: bool = False


@dataclass(frozen=True, slots=True)
class Bench:
    """The judge an evaluation may ask, and the prices of both models. Without a judge, suites that need one are refused."""

    judge: Answering | None = None
    judge_price: Price = field(default_factory=Price)
    price: Price = field(default_factory=Price)


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks with fixed sampling; the seed belongs to the item, so that every release gets the same one."""

    answering: Answering
    max_new_tokens: int = 128
    temperature: float = 0.0
    salt: str = ""
    pauses_s: tuple[float, ...] = PAUSES_S
    sleep: Sleep = asyncio.sleep
    bench: Bench = field(default_factory=Bench)
    budget: Budget = field(default_factory=Budget)

    def within(self, budget: Budget) -> "Asker":
        """The same asker, paying from `budget`."""
        return replace(self, budget=budget)

    def sampling(self, item: Item) -> Sampling:
        seed = int.from_bytes(hashlib.sha256(f"{self.salt}\0{item.id}".encode()).digest()[:4], "big") & 0x7FFFFFFF
        return Sampling(max_new_tokens=item.max_new_tokens or self.max_new_tokens, temperature=self.temperature, seed=seed)

    async def ask(self, item: Item, release: Release | None) -> Asked:
        """Never raises for an engine's failure; a grader's own failure (`EvaluationError`) passes.

        The answer to a pairwise item comes without a grade: `compare` grades two of them.
        """
        if isinstance(item.grader, Working):
            return await self._work(item.grader, item, release)
        try:
            called = await self._caller().call(item.messages, self.sampling(item), release)
            if called.answer is None or isinstance(item.grader, Pairwise):
                return Asked(called.answer, None, called.missing, called.engine_refused, called.attempts)
            return await self._graded(item, called, called.answer)
        except BudgetSpent:
            return Asked(None, None, SPENT, attempts=0, unpaid=True)

    async def _work(self, task: Working, item: Item, release: Release | None) -> Asked:
        """An episode: as many calls as it takes, each with a seed of its own."""
        sampling = self.sampling(item)

        async def ask(messages: Sequence[Mapping[str, Any]], turn: int) -> Called:
            seeded = replace(sampling, seed=((sampling.seed or 0) + turn) & 0x7FFFFFFF)
            return await self._caller().call(messages, seeded, release)

        try:
            called, given = await task.work(ask)
        except Ungraded as error:
            return Asked(None, None, str(error)[:200])
        except BudgetSpent:
            return Asked(None, None, SPENT, attempts=0, unpaid=True)
        if given is not None:
            given = replace(given, verified=given.score)
        return Asked(called.answer, given, called.missing, called.engine_refused, called.attempts)

    async def _graded(self, item: Item, called: Called, answer: Answer) -> Asked:
        case = Case(item.messages, answer.text)
        try:
            given = await grade(item.grader, case, self._judge())
            if item.audit is not None:
                given = replace(given, judged=(await grade(item.audit, case, self._judge())).score)
        except Ungraded as error:
            return Asked(answer, None, str(error)[:200], attempts=called.attempts)
        return Asked(answer, given, attempts=called.attempts)

    async def compare(self, item: Item, first: Asked, second: Asked) -> tuple[Asked, Asked]:
        """Both answers to a pairwise item with the grades a comparison gives them: 0.5 each for a tie."""
        assert isinstance(item.grader, Pairwise)
        if first.answer is None or second.answer is None:
            return first, second
        if (judge := self._judge()) is None:
            raise no_judge()
        try:
            found = await item.grader.compare(item.messages, first.answer.text, second.answer.text, judge)
        except Ungraded as error:
            return replace(first, missing=str(error)[:200]), replace(second, missing=str(error)[:200])
        except BudgetSpent:
            return replace(first, missing=SPENT, unpaid=True), replace(second, missing=SPENT, unpaid=True)
        reason = f"{found.reason}; the two orders disagree" if found.orders_disagree else found.reason
        ours, theirs = (Grade(0.5 + sign * found.difference / 2, reason, biased=found.orders_disagree) for sign in (1, -1))
        return replace(first, grade=ours), replace(second, grade=theirs)

    def _caller(self) -> Caller:
        return Caller(self.answering, self.budget, self.bench.price, self.pauses_s, self.sleep)

    def _judge(self) -> Caller | None:
        if self.bench.judge is None:
            return None
        return Caller(self.bench.judge, self.budget, self.bench.judge_price, self.pauses_s, self.sleep, judge=True)


Order = Literal["candidate_first", "current_first"]


def order_of(index: int) -> Order:
    """Who answers first alternates, so that a drifting engine slows and disturbs both sides alike."""
    return "candidate_first" if index % 2 == 0 else "current_first"
