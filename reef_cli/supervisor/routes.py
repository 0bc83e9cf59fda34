"""What serves besides the heads: the routing policy in force per scenario, with the releases it names loaded in the engine.

A policy is in force once everything it names is loaded; one that cannot be served any more (its bytes are gone, the engine is
another) leaves the head serving and says why. Does not write chains and does not know who sets policies.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from reef_cli.core.errors import ReefError, ReleaseNotServable
from reef_cli.core.types import Release, Surface
from reef_cli.releases.routing import EMPTY, HEAD, Policy, no_answers
from reef_cli.releases.service import ReleaseService


@dataclass(frozen=True, slots=True)
class Route:
    """A policy with the routing release that brought it and the loaded releases by the names it uses.

    `fault` says why the head serves instead.
    """

    release: Release | None = None
    policy: Policy = EMPTY
    arms: Mapping[str, Release] = field(default_factory=dict)
    fault: str | None = None


NO_ROUTE = Route()


class Routes:
    """The policies of one deployment. `load` makes a release servable; `alone` says why the engine has room for one only."""

    def __init__(self, releases: ReleaseService, load: Callable[[Release], Awaitable[None]], alone: str | None) -> None:
        self._releases = releases
        self._load = load
        self._alone = alone
        self._routes: dict[str, Route] = {}

    def of(self, scenario: str) -> Route:
        return self._routes.get(scenario, NO_ROUTE)

    def put(self, scenario: str, route: Route) -> None:
        self._routes[scenario] = route

    def drop(self, scenario: str) -> None:
        """Forget an archived scenario."""
        self._routes.pop(scenario, None)

    def uses(self, release: Release) -> bool:
        """Whether the policy in force needs this release loaded."""
        return any(arm.release_id == release.release_id for arm in self.of(release.scenario).arms.values())

    def judged(self) -> list[str]:
        """Scenarios with a canary that live reports decide."""
        return [scenario for scenario, route in self._routes.items() if route.policy.auto is not None and route.fault is None]

    def splits(self, scenario: str) -> bool:
        """Whether it matters which session a request belongs to."""
        policy = self.of(scenario).policy
        return len(policy.arms) > 1 or (policy.shadow is not None and policy.shadow_share < 1)

    def choose(self, served: Release, session: str | None) -> Release:
        """The release that answers a session, where nothing is pinned by the request."""
        route = self._routes.get(served.scenario)
        # A checkpoint at the head is all of the engine's weights: nothing stands beside it.
        if route is None or route.fault is not None or served.kind == "checkpoint":
            return served
        name = route.policy.choose(served.scenario, session or "")
        return served if name == HEAD else route.arms[name]

    def shadows(self, answered: Release, session: str) -> Release | None:
        """The release that answers once more, unseen; None when there is none or it gave the answer itself."""
        route = self.of(answered.scenario)
        name = route.policy.shadows(answered.scenario, session) if route.fault is None else None
        if name is None or route.arms[name].content_id == answered.content_id or answered.kind == "checkpoint":
            return None
        return route.arms[name]

    async def prepare(self, scenario: str, policy: Policy, served: Release) -> dict[str, Release]:
        """Load everything a policy names. `ReleaseNotFound`, `NotRestorable`, `ReleaseNotServable`."""
        if policy.named and served.kind == "checkpoint":
            raise ReleaseNotServable(
                f"nothing can be served beside {served.release_id}", why="a checkpoint is all of the engine's weights"
            )
        arms: dict[str, Release] = {}
        for name in sorted(policy.named):
            release = await asyncio.to_thread(self._releases.standing, scenario, name)
            self._check(release)
            arms[name] = release
        for release in arms.values():
            await self._load(release)
        return arms

    def _check(self, release: Release) -> None:
        if release.surface is Surface.HARNESS:
            raise no_answers(release)
        if self._alone is not None:
            raise ReleaseNotServable(
                f"{release.release_id} cannot be served beside the head",
                why=self._alone,
                hint="to serve another release to everybody: reef rollback, reef release promote",
            )
        if release.surface is not Surface.WEIGHTS or release.kind == "checkpoint":
            raise ReleaseNotServable(
                f"{release.release_id} cannot be served beside the head",
                why=f"it is of kind {release.kind}; LoRA adapters and the base model stand beside each other in an engine",
            )

    async def follow(self, scenario: str, served: Release) -> Route | None:
        """The policy the chain names now, ready to be put in force; None when it is in force already."""
        known = self.of(scenario)
        head = await asyncio.to_thread(self._releases.head, scenario, Surface.ROUTING)
        if (head.release_id if head else None) == (known.release.release_id if known.release else None) and not known.fault:
            return None
        policy = await asyncio.to_thread(self._releases.policy, head)
        try:
            route = Route(head, policy, await self.prepare(scenario, policy, served))
        except ReefError as error:
            route = Route(head, policy, fault=error.message)
        return None if route == known else route
