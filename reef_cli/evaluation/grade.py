"""What a grade is, and the three shapes of a grader: one that reads the answer, one that asks a judge, one made of others.

`grade` walks a grader made of others and keeps apart what a judge said and what a verifier said, so that a verdict can show
where they disagree.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from reef_cli.core.errors import EvaluationError
from reef_cli.evaluation.calling import Caller


@dataclass(frozen=True, slots=True)
class Grade:
    """A score in [0, 1] and the reason in a few words; `judged` and `verified` are the means of those parts, where there are.

    `biased`: a pairwise judge preferred a place, not an answer.
    """

    score: float
    reason: str
    judged: float | None = None
    verified: float | None = None
    biased: bool = False


class Ungraded(Exception):
    """There is no grade for this answer (a judge that could not be read): the item is missing, never zero."""


@dataclass(frozen=True, slots=True)
class Case:
    """An answer together with what was asked."""

    messages: Sequence[Mapping[str, Any]]
    answer: str


@runtime_checkable
class Grader(Protocol):
    """Reads the answer alone. `blocking` graders run in a thread."""

    def grade(self, answer: str) -> Grade: ...


@runtime_checkable
class Judging(Protocol):
    """Asks a judge."""

    async def judge(self, case: Case, caller: Any) -> Grade: ...


@runtime_checkable
class Working(Protocol):
    """Plays a whole episode instead of grading one answer; see `harbor`."""

    async def work(self, ask: Any) -> Any: ...


@runtime_checkable
class Combining(Protocol):
    """Made of other graders."""

    @property
    def parts(self) -> Sequence[Any]: ...

    def combine(self, grades: Sequence[Grade]) -> Grade: ...


async def grade(grader: object, case: Case, judge: Caller | None) -> Grade:
    """The grade of an answer. `Ungraded`, `EvaluationError` (a broken grader), `BudgetSpent`."""
    if isinstance(grader, Combining):
        grades = [await grade(part, case, judge) for part in grader.parts]
        made = grader.combine(grades)
        return replace(made, judged=_mean(g.judged for g in grades), verified=_mean(g.verified for g in grades))
    if isinstance(grader, Judging):
        if judge is None and not getattr(grader, "own", False):
            raise no_judge()
        made = await grader.judge(case, judge)
        return replace(made, judged=made.score)
    assert isinstance(grader, Grader)
    # A person's function or a sandboxed program may block; it must not stop the server.
    blocking = getattr(grader, "blocking", False)
    made = await asyncio.to_thread(grader.grade, case.answer) if blocking else grader.grade(case.answer)
    return replace(made, verified=made.score)


def no_judge() -> EvaluationError:
    return EvaluationError("this suite needs a judge", why="none is configured", hint="set evaluation.judge_url")


def grade_now(grader: object, answer: str) -> Grade:
    """The grade of an answer by what needs neither a judge nor a loop; `EvaluationError` for others."""
    if isinstance(grader, Combining):
        return grader.combine([grade_now(part, answer) for part in grader.parts])
    if not isinstance(grader, Grader):
        raise EvaluationError("this grader asks a judge", why="only an evaluation has one")
    return grader.grade(answer)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
