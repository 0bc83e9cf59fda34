"""Running a candidate and the current release over the same items: interleaved, bounded, stopped as soon as the test is.

Several items are under way at once, but pairs enter the test in the suite's shuffled order, never in the order of completion:
quick answers must not decide first. An item that one side could not answer is missing. Too many of them are an outage.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from reef_cli.core.errors import EvaluationError
from reef_cli.core.ports import Answer
from reef_cli.core.types import Release
from reef_cli.evaluation.asking import Asked, Asker, order_of
from reef_cli.evaluation.decide import Tally
from reef_cli.evaluation.judging import Pairwise
from reef_cli.evaluation.suite import Item

# More than this share of the asked items without an answer is an outage, judged from the first five on.
MISSING_LIMIT = 0.2
_MISSING_FROM = 5

Side = Literal["candidate", "current"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides' outcomes of one item."""

    item: Item
    candidate: Asked
    current: Asked

    @property
    def difference(self) -> float | None:
        """Candidate minus current in [-1, 1]; None when a side is missing."""
        if self.candidate.grade is None or self.current.grade is None:
            return None
        return self.candidate.grade.score - self.current.grade.score

    @property
    def unpaid(self) -> bool:
        """Whether the budget ended before both sides were asked and graded."""
        return self.candidate.unpaid or self.current.unpaid

    @property
    def missing(self) -> str | None:
        reasons = [f"{side}: {asked.missing}" for side, asked in self.sides if asked.missing]
        return "; ".join(reasons) or None

    @property
    def sides(self) -> tuple[tuple[Side, Asked], tuple[Side, Asked]]:
        return ("candidate", self.candidate), ("current", self.current)


@dataclass(slots=True)
class Course:
    """A comparison under way: pairs in test order, the tally of those that count, anchors that got worse.

    `spent`: the budget ended it. What was not paid for is in no list: it says nothing about either side.
    """

    tally: Tally
    heaviest: float
    pairs: list[Pair] = field(default_factory=list)
    regressed: list[str] = field(default_factory=list)
    planned: int = 0
    anchors: int = 0
    spent: bool = False

    def take(self, pair: Pair) -> None:
        self.pairs.append(pair)
        if (difference := pair.difference) is not None:
            self.tally.add(difference * pair.item.weight / self.heaviest)

    @property
    def unanswered_anchors(self) -> list[str]:
        return [pair.item.id for pair in self.pairs if pair.item.anchor and pair.missing]

    @property
    def anchors_left(self) -> int:
        """Anchors that were not asked, since the budget ended before."""
        return self.anchors - sum(pair.item.anchor for pair in self.pairs)

    @property
    def missing(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.missing]

    @property
    def candidate_refused(self) -> bool:
        """The engine broke on the candidate's requests again and again, and never on the current release's."""
        broken = sum(pair.candidate.engine_refused for pair in self.pairs)
        enough = len(self.pairs) >= min(_MISSING_FROM, self.planned)
        return enough and broken > MISSING_LIMIT * len(self.pairs) and not any(pair.current.missing for pair in self.pairs)

    def check_outage(self, *, final: bool = False) -> None:
        """`EvaluationError` when too much is missing to decide anything."""
        count, missing = len(self.pairs), self.missing
        due = count >= _MISSING_FROM or final
        if due and len(missing) > MISSING_LIMIT * count and not self.candidate_refused:
            raise EvaluationError(
                f"{len(missing)} of {count} items got no answer",
                why=missing[-1].missing or "",
                hint="the evaluation stopped without a verdict; check the engine and start it again",
                missing=len(missing),
                asked=count,
            )

    def answers(self, side: Side) -> list[Answer]:
        """Answers of one side to the items both sides answered."""
        asked = (pair.candidate if side == "candidate" else pair.current for pair in self.pairs if not pair.missing)
        return [one.answer for one in asked if one.answer is not None]


def shuffled(items: Sequence[Item], seed: str) -> list[Item]:
    """Anchors first, then the rest, each in an order drawn from `seed`: a sorted suite must not bias an early stop."""
    drawn = sorted(items, key=lambda item: item.id)
    random.Random(seed).shuffle(drawn)
    return sorted(drawn, key=lambda item: not item.anchor)


class Comparison:
    """One comparison of two releases."""

    def __init__(self, asker: Asker, candidate: Release, current: Release, *, concurrency: int) -> None:
        self._asker = asker
        self._candidate = candidate
        self._current = current
        self._gate = asyncio.Semaphore(max(1, concurrency))

    async def run(self, items: Sequence[Item], tally: Tally, progress: Callable[[int, int], None] | None) -> Course:
        """Ask until the tally concludes, an anchor regressed, or the items are used up."""
        anchors = sum(item.anchor for item in items)
        course = Course(tally, max(item.weight for item in items), planned=len(items), anchors=anchors)
        tasks = [asyncio.create_task(self._pair(index, item)) for index, item in enumerate(items)]
        try:
            for index, task in enumerate(tasks):
                pair = await task
                again = await self._again(pair) if pair.item.anchor and (pair.difference or 0.0) < 0 else None
                if pair.unpaid or (again is not None and again.unpaid):
                    course.spent = True
                    break
                course.take(pair)
                # Without a second answer the first one stands: it was measured.
                if again is not None and (again.difference is None or again.difference < 0):
                    course.regressed.append(pair.item.id)
                if progress is not None:
                    progress(index + 1, len(items))
                course.check_outage()
                anchors_done = index + 1 >= anchors
                if anchors_done and (course.regressed or course.candidate_refused or tally.conclude().result != "open"):
                    break
            course.check_outage(final=True)
            return course
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pair(self, index: int, item: Item) -> Pair:
        async with self._gate:
            if order_of(index) == "candidate_first":
                candidate = await self._asker.ask(item, self._candidate)
                current = await self._asker.ask(item, self._current)
            else:
                current = await self._asker.ask(item, self._current)
                candidate = await self._asker.ask(item, self._candidate)
            if isinstance(item.grader, Pairwise):
                candidate, current = await self._asker.compare(item, candidate, current)
            return Pair(item, candidate, current)

    async def _again(self, pair: Pair) -> Pair:
        """An anchor counts as regressed when it is worse twice: batching alone can flip a single greedy answer."""
        return await self._pair(0, pair.item)
