"""Routing as the gateway asks it: the policy in force with its live numbers, setting one, and what shadows answered.

Implements the gateway's `Routing` over the publisher, which releases policies and serves by them, and owns what watches them.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.types import Inference, Release
from reef_cli.experience import shadows
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.shadows import ShadowAnswer
from reef_cli.gateway.answers import release_view
from reef_cli.releases.routing import HEAD, Auto, Policy
from reef_cli.supervisor.canary import Canaries
from reef_cli.supervisor.publisher import Publisher
from reef_cli.supervisor.shadowing import ShadowAnswers

if TYPE_CHECKING:
    from reef_cli.supervisor.stack import Stack


def open_routing(stack: "Stack") -> "Routing":
    """The routing of a deployment that is being put together. Shadows take at most half of the engine's seats clients leave."""
    settings, publisher = stack.settings, stack.publisher
    answers = None
    if stack.engine is not None:
        seats = max(1, settings.engine.max_running_requests // 2)
        answers = ShadowAnswers(
            stack.log,
            publisher.routes,
            stack.engine.serving,
            stack.metrics,
            stack.clock,
            room=lambda: stack.draining.running < seats,
            keep_text=settings.reef.redact is None,
        )
    return Routing(publisher, Canaries(stack.log, publisher), stack.log, judging(settings.evaluation), answers)


def judging(settings: EvaluationSettings) -> Auto:
    """How a canary is judged, unless its policy says otherwise."""
    return Auto(settings.canary_alpha, settings.canary_margin, settings.score_low, settings.score_high)


class Routing:
    """Routing policies of one deployment."""

    def __init__(
        self,
        publisher: Publisher,
        canaries: Canaries,
        log: ExperienceLog,
        auto: Auto,
        shadow_answers: ShadowAnswers | None = None,
    ) -> None:
        self.auto = auto
        self.shadow_answers = shadow_answers
        self._log = log
        self._publisher = publisher
        self._canaries = canaries

    def watches(self) -> Sequence[tuple[str, Coroutine[Any, Any, None]]]:
        """What runs for as long as the server does, by name."""
        found = [("canaries", self._canaries.run())]
        return [*found, ("shadows", self.shadow_answers.run())] if self.shadow_answers else found

    def splits(self, scenario: str) -> bool:
        return self._publisher.routes.splits(scenario)

    def policy(self, scenario: str) -> Mapping[str, Any]:
        route = self._publisher.routes.of(scenario)
        return {} if route.fault else route.policy.wire()

    async def set(self, scenario: str, policy: Policy, expected_head: str | None, author: str) -> Release:
        await self._publisher.open(scenario)
        return await self._publisher.route(scenario, policy, expected_head, author)

    async def view(self, scenario: str) -> Mapping[str, Any]:
        served = self._publisher.served(scenario)
        route = self._publisher.routes.of(scenario)
        shares: dict[str, float] = {}
        for name in (HEAD,) if route.fault else route.policy.arms:
            release_id = served.release_id if name == HEAD else name
            share = 1.0 if route.fault else route.policy.shares.get(name, 1.0)
            shares[release_id] = shares.get(release_id, 0.0) + share
        return {
            "policy": route.policy.wire(),
            "release": release_view(route.release, (route.release,)) if route.release else None,
            "shares": shares,
            "shadow": route.policy.shadow,
            "fault": route.fault,
            "canary": await asyncio.to_thread(self._canaries.view, scenario),
        }

    def shadows(self, scenario: str, limit: int) -> Mapping[str, Any]:
        with self._log.read() as connection:
            answers, summary = shadows.latest(connection, scenario, limit), shadows.summary(connection, scenario)
        return {"summary": summary, "shadows": [self._beside(answer) for answer in answers]}

    def _beside(self, answer: ShadowAnswer) -> dict[str, Any]:
        """A shadow's answer with what the client got in its place."""
        record = self._log.get(answer.scenario, answer.record_id)
        response = record.response if isinstance(record, Inference) else None
        facts = asdict(answer)
        facts["shadow_text"] = facts.pop("text")
        return {**facts, "text": (response or {}).get("content"), "same": answer.agreement == 1}
