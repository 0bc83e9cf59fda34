"""The gate: the port `Evaluating` over a suite and an `Answering`.

Promises: a candidate passes the full gate only when it was shown better. On the rolling cadence one that was shown neither
better nor worse than the margin is `inconclusive`: the run goes on and is judged again. Missing answers never count as scores;
an outage raises `EvaluationError` and decides nothing. Everything the verdict rests on is in its evidence. Does not know
publishing.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.clock import Clock, SystemClock
from reef_cli.core.ports import Answering
from reef_cli.core.types import Cadence, Outcome, Release, Verdict
from reef_cli.evaluation.asking import Asked, Asker, Bench
from reef_cli.evaluation.budget import Budget
from reef_cli.evaluation.decide import Conclusion, Tally, interval
from reef_cli.evaluation.graders import Contains
from reef_cli.evaluation.guards import disagreement, drift
from reef_cli.evaluation.pairing import Comparison, Course, Pair, shuffled
from reef_cli.evaluation.suite import Item, Suite
from reef_cli.evaluation.text import is_looping, printable

SAMPLES_KEPT = 6
OPEN = "no suite configured"
_UNREAD = Contains(any=("",))
# Asked of a rolling step when there is no suite: any model that still speaks answers them.
_PLAIN = tuple(
    Item(f"plain-{index}", ({"role": "user", "content": text},), Contains(all=(" ",)), max_new_tokens=32)
    for index, text in enumerate(("Say hello.", "Name a colour.", "What is water?", "Write one short sentence."))
)


class Gate:
    """Judges candidates. `suite` None leaves the gate open, and every verdict says so."""

    def __init__(
        self,
        answering: Answering,
        suite: Suite | None,
        settings: EvaluationSettings,
        *,
        cadence: Cadence = Cadence.GATED,
        clock: Clock | None = None,
        asker: Asker | None = None,
        bench: Bench | None = None,
    ) -> None:
        self._suite = suite.select(settings.split, settings.limit) if suite is not None else None
        self._settings = settings
        self._cadence = cadence
        self._clock = clock or SystemClock()
        salt = suite.digest if suite is not None else ""
        self._asker = asker or Asker(
            answering, settings.max_new_tokens, settings.temperature, salt, bench=bench or Bench(judge=answering)
        )

    async def smoke(self, scenario: str, candidate: Release, current: Release) -> Verdict:  # noqa: ARG002 - the port's
        """Quick checks of a rolling step: finite metrics, bounded KL, and a few answers that are neither empty nor loops."""
        metrics = candidate.evidence.get("metrics")
        fault = metrics_fault(metrics if isinstance(metrics, Mapping) else {}, self._settings.max_kl)
        if fault is not None:
            return Verdict(Outcome.REJECT, fault, {"check": "metrics", "max_kl": self._settings.max_kl})
        items = (self._suite.items if self._suite is not None else _PLAIN)[: self._settings.smoke_items]
        if not items:
            return Verdict(Outcome.SELECT, "metrics are finite", {"check": "smoke", "items": 0})
        # Whether an answer is broken shows without grading it; a judge or a sandbox would make a quick check slow.
        items = tuple(replace(item, anchor=False, grader=_UNREAD, audit=None) for item in items)
        comparison = Comparison(self._asker, candidate, current, concurrency=self._settings.concurrency)
        course = await comparison.run(items, Tally(alpha=1e-9), None)
        return _smoke_verdict(course)

    async def gate(
        self,
        scenario: str,  # noqa: ARG002 - the port's
        candidate: Release,
        current: Release,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Verdict:
        """The full paired evaluation. `EvaluationError` for an outage."""
        if self._suite is None:
            return Verdict(Outcome.SELECT, OPEN, {"gate": "open", "reason": OPEN})
        rolling = self._cadence is Cadence.ROLLING
        if candidate.content_id == current.content_id:
            outcome = Outcome.SELECT if rolling else Outcome.REJECT
            return Verdict(outcome, "the content is the current release's own", {"gate": "same_content"})
        started = self._clock.monotonic()
        tally = Tally(self._settings.alpha, self._settings.regression_margin if rolling else 0.0)
        items = shuffled(self._suite.items, f"{self._suite.digest}\0{candidate.content_id}\0{current.content_id}")
        budget = budget_of(self._settings)
        comparison = Comparison(self._asker.within(budget), candidate, current, concurrency=self._settings.concurrency)
        course = await comparison.run(items, tally, on_progress)
        conclusion = tally.conclude()
        outcome, reason = (settle_rolling if rolling else settle_gated)(course, conclusion, self._settings)
        # Each bound at alpha, as the tests: "shown better" and "the interval lies above 0" are the same statement.
        # Many distinct scores make this 100 ms of arithmetic; the event loop serves meanwhile.
        bounds = await asyncio.to_thread(interval, tally.values, 2 * tally.alpha)
        cost = {**budget.used.to_json(), "seconds": round(self._clock.monotonic() - started, 3)}
        if budget.judging.calls:
            cost["judge"] = budget.judging.to_json()
        evidence = {**self._evidence(course, conclusion, bounds), "cost": cost, "budget": budget.limits()}
        return Verdict(outcome, reason, {**evidence, "outcome": str(outcome), "reason": reason})

    def _evidence(self, course: Course, conclusion: Conclusion, bounds: tuple[float, float]) -> dict[str, Any]:
        assert self._suite is not None
        settings = self._settings
        low, high = bounds
        paired = [pair for pair in course.pairs if not pair.missing]
        return {
            "gate": "rolling" if self._cadence is Cadence.ROLLING else "gated",
            "suite": {
                "name": self._suite.name,
                "digest": self._suite.digest,
                "split": self._suite.split,
                "items": course.planned,
            },
            "test": {"method": "betting e-process, anytime-valid", "alpha": settings.alpha, "margin": course.tally.margin},
            "asked": len(course.pairs),
            "pairs": conclusion.pairs,
            "missing": len(course.missing),
            "missing_items": [{"id": pair.item.id, "why": printable(pair.missing or "", 200)} for pair in course.missing[:20]],
            "wins": conclusion.wins,
            "losses": conclusion.losses,
            "ties": conclusion.ties,
            "candidate_mean": _mean(pair.candidate for pair in paired),
            "current_mean": _mean(pair.current for pair in paired),
            "difference": round(conclusion.mean, 6),
            "interval": {"low": round(low, 6), "high": round(high, 6), "confidence": 1 - 2 * settings.alpha},
            "log_evidence": {"better": round(conclusion.log_better, 4), "worse": round(conclusion.log_worse, 4)},
            "needs_about": conclusion.needs,
            "stopped_early": len(course.pairs) < course.planned,
            "budget_spent": course.spent,
            "anchors": {"count": sum(pair.item.anchor for pair in course.pairs), "regressed": course.regressed},
            "guards": _guards(course, paired),
            "samples": samples(course.pairs),
            "sampling": {"temperature": settings.temperature, "max_new_tokens": settings.max_new_tokens},
        }


def settle_gated(course: Course, conclusion: Conclusion, settings: EvaluationSettings) -> tuple[Outcome, str]:
    """Publish only what was shown better."""
    if (blocked := _blocked(course)) is not None:
        return Outcome.REJECT, blocked
    score = f"{conclusion.wins} wins, {conclusion.losses} losses, {conclusion.ties} ties on {conclusion.pairs} items"
    if conclusion.result == "better" and (open_anchors := _open_anchors(course)):
        return Outcome.INCONCLUSIVE, f"shown better, but {open_anchors}"
    if conclusion.result == "better":
        return Outcome.SELECT, f"shown better at error rate {settings.alpha:g}: {score}"
    if conclusion.result == "worse":
        return Outcome.REJECT, f"shown worse at error rate {settings.alpha:g}: {score}"
    return Outcome.INCONCLUSIVE, f"{_unpaid(course)}not shown better: {score}; {_more(conclusion)}"


def settle_rolling(course: Course, conclusion: Conclusion, settings: EvaluationSettings) -> tuple[Outcome, str]:
    """Take back only what was shown worse; only what was shown better becomes the next reference, so drift cannot creep in."""
    if (blocked := _blocked(course)) is not None:
        return Outcome.REJECT, blocked
    score = f"{conclusion.wins} wins, {conclusion.losses} losses, {conclusion.ties} ties on {conclusion.pairs} items"
    if conclusion.result == "worse":
        return Outcome.REJECT, f"shown worse by more than {settings.regression_margin:g}: {score}"
    if conclusion.result == "better" and course.anchors_left == 0:
        return Outcome.SELECT, f"shown better: {score}"
    margin = f"{settings.regression_margin:g}"
    lead = f"{_unpaid(course)}not shown worse by more than {margin}, nor better"
    return Outcome.INCONCLUSIVE, f"{lead}: {score}; {_more(conclusion)}"


def _more(conclusion: Conclusion) -> str:
    return f"needs about {conclusion.needs} more episodes" if conclusion.needs else "no difference to build on"


def _unpaid(course: Course) -> str:
    return f"the budget ended after {len(course.pairs)} of {course.planned} items; " if course.spent else ""


def _open_anchors(course: Course) -> str | None:
    if course.unanswered_anchors:
        return f"{course.unanswered_anchors[0]}, which must not regress, got no answer"
    return f"the budget ended before {course.anchors_left} items that must not regress" if course.anchors_left else None


def _guards(course: Course, paired: Sequence[Pair]) -> dict[str, Any]:
    form = drift(course.answers("candidate"), course.answers("current"))
    graded = ([one.grade for one in side if one.grade is not None] for side in zip(*map(_sides, paired), strict=True))
    opinions = disagreement(*graded) if paired else {}
    flags = [*form.get("flags", ()), *opinions.pop("flags", ())]
    return {**form, **({"judge": opinions} if opinions else {}), "flags": flags} if form or opinions else {}


def _sides(pair: Pair) -> tuple[Asked, Asked]:
    return pair.candidate, pair.current


def budget_of(settings: EvaluationSettings) -> Budget:
    """A fresh budget with the limits of the settings."""
    return Budget(settings.max_calls, settings.max_tokens, settings.max_money)


def _blocked(course: Course) -> str | None:
    if course.regressed:
        return f"regressed on {', '.join(course.regressed[:3])}, which must not regress"
    if course.candidate_refused:
        return "the engine fails on the candidate's requests, not on the current release's"
    return None


def metrics_fault(metrics: Mapping[str, Any], max_kl: float) -> str | None:
    """What is wrong with a step's metrics: a number that is not finite, or too far from the last gated release."""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            if (fault := metrics_fault(value, math.inf)) is not None:
                return fault
        elif isinstance(value, float) and not math.isfinite(value):
            return f"metric {key} is not finite"
    kl = metrics.get("kl_to_gated")
    if isinstance(kl, int | float) and kl > max_kl:
        return f"KL to the last gated release is {kl:.3g} nats per token, {max_kl:g} allowed"
    return None


def _smoke_verdict(course: Course) -> Verdict:
    """Reject when most answers are broken and the current release's to the same items are not."""
    broken = [pair.item.id for pair in course.pairs if _broken(pair.candidate) and not _broken(pair.current)]
    evidence = {"check": "smoke", "items": len(course.pairs), "broken": broken, "samples": samples(course.pairs)}
    if course.candidate_refused:
        return Verdict(Outcome.REJECT, "the engine fails on the candidate's requests", evidence)
    if 2 * len(broken) > len(course.pairs):
        return Verdict(Outcome.REJECT, f"{len(broken)} of {len(course.pairs)} answers are empty or repeat themselves", evidence)
    return Verdict(Outcome.SELECT, f"{len(course.pairs)} answers look sound", evidence)


def _broken(asked: Asked) -> bool:
    return asked.answer is not None and (not asked.answer.text.strip() or is_looping(asked.answer.text))


def samples(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """A few answers side by side for a person to read; those that differ in score come first."""
    answered = [pair for pair in pairs if pair.candidate.answer is not None and pair.current.answer is not None]
    ranked = sorted(answered, key=lambda pair: -abs(pair.difference or 0.0))
    return [_sample(pair) for pair in ranked[:SAMPLES_KEPT]]


def _sample(pair: Pair) -> dict[str, Any]:
    question = next((m.get("content") for m in reversed(pair.item.messages) if m.get("role") == "user"), "")
    sides: dict[str, Any] = {
        side: {"text": printable(asked.answer.text), "score": asked.grade.score, "reason": printable(asked.grade.reason, 200)}
        for side, asked in pair.sides
        if asked.answer is not None and asked.grade is not None
    }
    return {"id": pair.item.id, "question": printable(str(question)), **sides}


def _mean(asked: Any) -> float | None:
    scores = [one.grade.score for one in asked if one.grade is not None]
    return round(math.fsum(scores) / len(scores), 6) if scores else None
