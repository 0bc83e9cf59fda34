"""Drift: the served release is compared again with the one before it, on a cadence or when live scores fall.

The fall of live scores is only a reason to look: sessions of the served release against those its predecessor had, which came
before and may have been easier. What decides is the paired evaluation on the suite, by the rules of the rolling cadence: only a
release shown worse than its predecessor is drift. It is always said; with `evaluation.drift: rollback` the predecessor's
content is released again with the numbers as evidence, unless the head moved meanwhile. Times of checks are read from the
log's events.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.clock import Clock
from reef_cli.core.errors import HeadMoved, ReefError
from reef_cli.core.ports import Answering, Evaluating
from reef_cli.core.surfaces import previous_content
from reef_cli.core.types import Cadence, Operation, Outcome, Release, Surface, Verdict
from reef_cli.evaluation.decide import Tally
from reef_cli.evaluation.gate import Gate
from reef_cli.evaluation.suite import Suite
from reef_cli.experience.log import ExperienceLog
from reef_cli.releases.routing import Auto
from reef_cli.releases.service import ReleaseService
from reef_cli.supervisor.publisher import Publisher
from reef_cli.supervisor.routing import judging

if TYPE_CHECKING:
    from reef_cli.supervisor.stack import Stack

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
RETRY_S = 600.0
"""After an outage of the evaluation."""

SESSIONS = 300
"""At most this many sessions of each release are compared."""

AUTHOR = "reef: drift"


@dataclass
class Falling:
    """Live scores since the served release came, beside those its predecessor had last."""

    head: Release
    before: Release
    cursor: int = 0
    sessions: set[str] = field(default_factory=set)
    of_head: list[float] = field(default_factory=list)
    of_before: list[float] = field(default_factory=list)

    def worse(self, alpha: float, margin: float) -> bool:
        """Whether the served release's sessions were shown worse: in order, against the predecessor's from the last back."""
        tally = Tally(alpha, margin)
        for ours, theirs in zip(self.of_head[:SESSIONS], reversed(self.of_before[-SESSIONS:]), strict=False):
            tally.add(ours - theirs)
            if tally.worse.log >= -math.log(alpha):
                return True
        return False


Watch = tuple[str, Coroutine[Any, Any, None]]


def open_drift(stack: "Stack", answering: Answering, suite: Suite | None) -> Sequence[Watch]:
    """The watch of a deployment, to be run; empty where it is off or there is no local engine to compare releases on."""
    settings = stack.settings.evaluation
    if settings.drift == "off" or stack.engine is None:
        return ()
    gate = None
    if suite is not None:
        gate = Gate(answering, suite, settings, cadence=Cadence.ROLLING, clock=stack.clock, bench=stack.bench)
    return (("drift", Drift(stack.log, stack.releases, stack.publisher, gate, settings, stack.clock).run()),)


class Drift:
    """Watches the heads of one deployment; `run` it as a task. `gate` None: there is no suite, falls are only said."""

    def __init__(
        self,
        log: ExperienceLog,
        releases: ReleaseService,
        publisher: Publisher,
        gate: Evaluating | None,
        settings: EvaluationSettings,
        clock: Clock,
    ) -> None:
        self._log = log
        self._releases = releases
        self._publisher = publisher
        self._gate = gate
        self._settings = settings
        self._scores: Auto = judging(settings)
        self._clock = clock
        self._falling: dict[str, Falling] = {}
        self._not_before: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._settings.drift_every_s or LOOK_EVERY_S))
            for row in self._log.scenarios.list():
                try:
                    await self.look(row.name)
                except ReefError as error:
                    self._not_before[row.name] = self._clock.monotonic() + RETRY_S
                    logger.warning("the drift check of %s: %s", row.name, error)

    async def look(self, scenario: str) -> None:
        """Check the head when it is time, or when its live scores fell."""
        if self._clock.monotonic() < self._not_before.get(scenario, 0.0):
            return
        head = self._publisher.served(scenario)
        before = await asyncio.to_thread(self._predecessor, scenario, head)
        if before is None:
            return
        why = await asyncio.to_thread(self._due, head, before)
        if why is not None:
            await self._check(head, before, why)

    def _predecessor(self, scenario: str, head: Release) -> Release | None:
        """What was served before; for a rollback, what came before the release it went back to."""
        chain = [release for release in self._releases.list(scenario) if not release.pending]
        ids = [release.release_id for release in chain]
        if head.surface is not Surface.WEIGHTS or head.release_id not in ids:
            return None
        at = ids.index(head.release_id)
        if head.operation is Operation.ROLLBACK and head.source_release_id in ids:
            at = ids.index(head.source_release_id)
        found = previous_content(chain[at:])
        return found if found is not None and found.restorable and found.content_id != head.content_id else None

    def _due(self, head: Release, before: Release) -> str | None:
        """Why the head is to be checked now; None when it is not."""
        checked = self._last_check(head)
        every = self._settings.drift_every_s
        if self._gate is not None and every is not None and self._clock.now() - (checked or head.recorded_at) >= every:
            return f"{every:g} s have passed"
        falling = self._scores_of(head, before, checked or 0.0)
        return "live scores fell" if falling.worse(self._settings.alpha, self._settings.regression_margin) else None

    def _last_check(self, head: Release) -> float | None:
        with self._log.read() as connection:
            row = connection.execute(
                "SELECT max(at) FROM release_events WHERE scenario = ? AND release_id = ? AND event LIKE 'drift%'",
                (head.scenario, head.release_id),
            ).fetchone()
        return None if row[0] is None else float(row[0])

    def _scores_of(self, head: Release, before: Release, since: float) -> Falling:
        """Each session's first score, of the head since its last check and of its predecessor."""
        falling = self._falling.get(head.scenario)
        if falling is None or falling.head.release_id != head.release_id:
            falling = self._falling[head.scenario] = Falling(head, before)
        while page := self._log.scores_after(head.scenario, falling.cursor, before.recorded_at):
            for scored in page:
                falling.cursor = scored.sequence
                if scored.session in falling.sessions or scored.release_id not in (head.release_id, before.release_id):
                    continue
                falling.sessions.add(scored.session)
                if scored.release_id == before.release_id:
                    falling.of_before.append(self._scores.scaled(scored.score))
                elif scored.asked_at >= since:
                    falling.of_head.append(self._scores.scaled(scored.score))
        return falling

    async def _check(self, head: Release, before: Release, why: str) -> None:
        """The paired evaluation, what it said, and the way back where that is wanted."""
        self._falling.pop(head.scenario, None)
        if self._gate is None:
            await self._say(head, before, "drift_suspected", f"{why}; without a suite nothing can be compared", {})
            return
        await self._publisher.stage(before)
        try:
            verdict = await self._gate.gate(head.scenario, head, before)
        finally:
            await self._publisher.unstage(before)
        drifted = verdict.outcome is Outcome.REJECT
        event = "drift_found" if drifted else "drift_checked"
        await self._say(head, before, event, f"{why}: {verdict.reason}", _numbers(verdict))
        if drifted and self._settings.drift == "rollback":
            facts = {"head": head.release_id, "verdict": verdict.evidence}
            evidence = {"reason": f"drift, {why}: {verdict.reason}", "drift": facts}
            try:
                await self._publisher.rollback(head.scenario, before.release_id, head.release_id, AUTHOR, evidence)
            except HeadMoved:
                logger.info("the head of %s moved while it was checked for drift", head.scenario)

    async def _say(self, head: Release, before: Release, event: str, reason: str, numbers: Mapping[str, Any]) -> None:
        level = logging.INFO if event == "drift_checked" else logging.WARNING
        logger.log(level, "%s of %s against %s: %s", event, head.release_id, before.release_id, reason)
        await self._publisher.note(head, event, {"against": before.release_id, "reason": reason, **numbers})


def _numbers(verdict: Verdict) -> dict[str, Any]:
    """The part of a verdict's evidence that fits an event."""
    names = ("pairs", "candidate_mean", "current_mean", "difference", "interval")
    return {"outcome": str(verdict.outcome), **{name: verdict.evidence[name] for name in names if name in verdict.evidence}}
