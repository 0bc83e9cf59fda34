"""Canaries on live reports: promoted when they were shown better than the head, taken back when they were shown worse.

A canary answers its share of the sessions; the first scored report of each session counts (`evaluation.live`). It is taken back
when it is worse than what the other sessions got at the same time, whatever release that was. It is promoted only over the very
head it was compared with: when the head moves, that comparison begins anew. Undecided, it stays. Both moves are releases with
the numbers as evidence. Nothing here is remembered on disk: after a restart the comparison is made again from the same reports.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reef_cli.core.errors import HeadMoved, ReefError
from reef_cli.core.types import Operation, Release
from reef_cli.evaluation.live import LiveTally
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.scores import Scored
from reef_cli.releases.routing import HEAD, Auto, Policy
from reef_cli.supervisor.publisher import Publisher
from reef_cli.supervisor.routes import Route

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
PAGE = 500
AUTHOR = "reef: canary"


@dataclass
class Trial:
    """One canary under its policy. `safe` compares it with all other sessions, `better` with those of the present head."""

    route: Route
    auto: Auto
    canary: Release
    head: Release
    safe: LiveTally
    better: LiveTally
    cursor: int = 0
    counted: set[str] = field(default_factory=set)
    clipped: int = 0
    stuck: str | None = None

    @property
    def policy(self) -> Policy:
        return self.route.policy

    def compare_with(self, head: Release) -> None:
        """The head is another one: what was seen of the old one says nothing about it."""
        self.head = head
        self.better = LiveTally(self.auto.alpha)

    def take(self, scored: Scored) -> None:
        """Count a session's first scored report, unless the request was pinned to another release than the policy's."""
        self.cursor = scored.sequence
        if scored.session in self.counted or scored.release_id is None:
            return
        assigned = self.policy.choose(self.head.scenario, scored.session) != HEAD
        candidate = scored.release_id == self.canary.release_id
        if assigned != candidate:
            return
        self.counted.add(scored.session)
        self.clipped += not self.auto.low <= scored.score <= self.auto.high
        reward = self.auto.scaled(scored.score)
        self.safe.add(candidate=candidate, reward=reward)
        if candidate or scored.release_id == self.head.release_id:
            self.better.add(candidate=candidate, reward=reward)

    def evidence(self, tally: LiveTally, reason: str) -> dict[str, Any]:
        facts = {"canary": self.canary.release_id, "against": self.head.release_id, "clipped": self.clipped}
        return {"reason": reason, **facts, "score_range": [self.auto.low, self.auto.high], **tally.evidence()}


class Canaries:
    """Watches the canaries of one deployment; `run` it as a task."""

    def __init__(self, log: ExperienceLog, publisher: Publisher) -> None:
        self._log = log
        self._publisher = publisher
        self._trials: dict[str, Trial] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for scenario in self._publisher.routes.judged():
                try:
                    await self.look(scenario)
                except ReefError as error:
                    logger.warning("the canary of %s: %s", scenario, error)

    def view(self, scenario: str) -> Mapping[str, Any] | None:
        """How the canary does now; None without one. Blocks for a moment: an interval is computed."""
        trial = self._trials.get(scenario)
        if trial is None or trial.route is not self._publisher.routes.of(scenario):
            return None
        return {**trial.evidence(trial.better, trial.stuck or "undecided"), "others": trial.safe.evidence()["log_evidence"]}

    async def look(self, scenario: str) -> None:
        """Count what was reported since the last look, and act on what is shown."""
        trial = self._trial(scenario)
        if trial is None or trial.stuck is not None:
            return
        if trial.canary.content_id == trial.head.content_id or trial.canary.release_id != trial.policy.canary:
            await self._settle(trial, Operation.PROMOTE, {"reason": "the canary was promoted"})
            return
        while page := await asyncio.to_thread(self._page, trial):
            for scored in page:
                trial.take(scored)
                if await self._decided(trial):
                    return

    def _trial(self, scenario: str) -> Trial | None:
        route, served = self._publisher.routes.of(scenario), self._publisher.served(scenario)
        auto, name = route.policy.auto, route.policy.canary
        if auto is None or name is None or route.release is None or route.fault is not None:
            self._trials.pop(scenario, None)
            return None
        trial = self._trials.get(scenario)
        if trial is None or trial.route is not route:
            tallies = LiveTally(auto.alpha, auto.margin), LiveTally(auto.alpha)
            trial = self._trials[scenario] = Trial(route, auto, route.arms[name], served, *tallies)
        if trial.head.release_id != served.release_id:
            trial.compare_with(served)
        return trial

    def _page(self, trial: Trial) -> list[Scored]:
        assert trial.route.release is not None
        return self._log.scores_after(trial.head.scenario, trial.cursor, trial.route.release.recorded_at, PAGE)

    async def _decided(self, trial: Trial) -> bool:
        if trial.safe.worse:
            score = f"by {trial.safe.candidate.sessions} sessions against {trial.safe.others.sessions}"
            reason = f"shown worse on live reports at error rate {trial.auto.alpha:g}, {score}"
            await self._settle(trial, Operation.ROLLBACK, trial.evidence(trial.safe, reason))
            return True
        if trial.better.better:
            await self._promote(trial)
            return True
        return False

    async def _promote(self, trial: Trial) -> None:
        """Its content becomes the head, over the head it was compared with; then nothing is left to share out."""
        score = f"by {trial.better.candidate.sessions} sessions against {trial.better.others.sessions}"
        reason = f"shown better on live reports at error rate {trial.auto.alpha:g}, {score}"
        evidence = trial.evidence(trial.better, reason)
        canary, head = trial.canary, trial.head
        move = self._publisher.promote if canary.pending else self._publisher.rollback
        try:
            await move(canary.scenario, canary.release_id, head.release_id, AUTHOR, {"canary": evidence})
        except HeadMoved:
            return  # the next look compares with the new head
        except ReefError as error:
            trial.stuck = f"shown better, but it could not be made the head: {error.message}"
            logger.error("the canary %s: %s", canary.release_id, trial.stuck)
            return
        await self._settle(trial, Operation.PROMOTE, evidence)

    async def _settle(self, trial: Trial, operation: Operation, evidence: Mapping[str, Any]) -> None:
        """End the trial by a policy without the canary; whoever set another one meanwhile has ended it already."""
        policy, release = trial.policy, trial.route.release
        assert release is not None
        after = replace(policy, shares={}, auto=None, shadow=None if policy.shadow == policy.canary else policy.shadow)
        self._trials.pop(release.scenario, None)
        try:
            await self._publisher.route(release.scenario, after, release.release_id, AUTHOR, operation, evidence)
        except HeadMoved as error:
            logger.info("the canary's policy was replaced meanwhile: %s", error.message)
