"""The road by which a release reaches users: chain (compare-and-swap), engine (loaded and verified), routing.

`served` follows the head of the weights only after the engine has loaded it, so a failed load leaves everybody on the old
weights; the chain then gets a rollback release that says so, and head and served agree again. A harness lies around the model,
not in it: its head is in force at once, where agents install it. One publication at a time per scenario
in this process; the chain's compare-and-swap guards against every other process.
"""

import asyncio
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from reef_cli.core import surfaces
from reef_cli.core.clock import Clock
from reef_cli.core.errors import EngineError, EngineUnavailable, NotRestorable, ReefError, ReleaseNotServable
from reef_cli.core.ids import ContentId, ReleaseId
from reef_cli.core.ports import Serving
from reef_cli.core.types import Artifact, Draft, Operation, Release, Surface
from reef_cli.experience.log import ExperienceLog
from reef_cli.releases.routing import Policy
from reef_cli.releases.service import ReleaseService
from reef_cli.supervisor.routes import Route, Routes

logger = logging.getLogger(__name__)

KEEP_LOADED = 4
"""LoRA adapters of a scenario kept in the engine besides the served one: pins and rollbacks then cost nothing."""


Bring = Callable[[Release, Path | None], Awaitable[None]]
"""Puts a release's weights into an engine."""


class Staging(Protocol):
    """Where candidates are tried when they cannot stand beside what is served."""

    async def stage(self, candidate: Release, directory: Path | None) -> None: ...

    async def unstage(self, candidate: Release) -> None: ...


class Publisher:
    """Implements the port `Publishing`."""

    def __init__(
        self,
        *,
        log: ExperienceLog,
        releases: ReleaseService,
        base: Artifact,
        clock: Clock,
        serving: Serving | None,
        apart: Staging | None = None,
    ) -> None:
        self._log = log
        self._releases = releases
        self._base = base
        self._clock = clock
        self._serving = serving
        self._bring: Bring | None = serving.load if serving else None
        self._apart = apart
        self._served: dict[str, dict[Surface, Release]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._loaded: dict[str, list[Release]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.routes = Routes(releases, self._load, _alone(serving, apart))

    # -- scenarios -----------------------------------------------------------------------------------------------------

    async def open(self, scenario: str) -> Release:
        """Make the scenario servable: its creation release exists, the head of its weights is loaded. Idempotent."""
        async with self._lock(scenario):
            if scenario in self._served:
                return self.served(scenario)
            await asyncio.to_thread(self._releases.create, scenario, self._base)
            heads = await asyncio.to_thread(self._heads, scenario)
            await self._load(heads[Surface.WEIGHTS])
            self._served[scenario] = heads
            await self._follow_routing(scenario)
            return self.served(scenario)

    async def close(self, scenario: str) -> None:
        """Forget an archived scenario."""
        async with self._lock(scenario):
            self._served.pop(scenario, None)
            self.routes.drop(scenario)
            for release in self._loaded.pop(scenario, []):
                self._unload_later(release)

    def _heads(self, scenario: str) -> dict[Surface, Release]:
        """What stands at each surface's head in the chain now; empty without a chain."""
        found = {surface: self._releases.head(scenario, surface) for surface in surfaces.EVOLVING}
        return {surface: release for surface, release in found.items() if release is not None}

    def served(self, scenario: str, surface: Surface = Surface.WEIGHTS) -> Release:
        try:
            return self._served[scenario][surface]
        except KeyError:
            raise EngineUnavailable(f"Scenario {scenario} is not loaded yet; try again, the service is unavailable.") from None

    async def resolve(self, scenario: str, pin: ReleaseId | None, session: str | None) -> Release:
        if pin is None:
            served = self.served(scenario) if scenario in self._served else await self.open(scenario)
            return self.routes.choose(served, session)
        release = await asyncio.to_thread(self._releases.get, scenario, pin)
        if release.surface is Surface.ROUTING:
            raise ReleaseNotServable(f"{pin} is a routing policy, which answers nothing itself.")
        if release.surface is Surface.HARNESS:
            raise ReleaseNotServable(
                f"{pin} is a harness, which answers nothing itself.",
                why="a pin names the weights that answer",
                hint="an agent works with it once it has installed it: reef harness install --release",
            )
        if self._serving is None or self._serving.servable(release):
            return release
        if not release.restorable:
            raise ReleaseNotServable(f"The bytes of {pin} are gone.", hint="`reef release list` shows what is restorable.")
        if self._apart is not None:
            raise ReleaseNotServable(
                f"This engine cannot serve {pin} beside its head.", why="each release replaces all of its weights"
            )
        async with self._lock(scenario):
            try:
                await self._load(release)
            except EngineError as error:
                raise ReleaseNotServable(f"This engine cannot serve {pin} beside its head.", why=error.message) from error
            self._retire(scenario)
        return release

    # -- publications --------------------------------------------------------------------------------------------------

    async def stage(self, candidate: Release) -> None:
        if candidate.surface is Surface.HARNESS or self._is_served(candidate):
            return  # a harness is tried by episodes that bring it themselves
        if self._apart is not None:
            await self._apart.stage(candidate, await self._directory(candidate))
        elif candidate.pending and self._serving is not None:
            await self._serving.load(candidate, await self._directory(candidate))
        elif not candidate.pending:
            async with self._lock(candidate.scenario):
                await self._load(candidate)

    async def unstage(self, candidate: Release) -> None:
        if candidate.surface is Surface.HARNESS:
            return
        if self._apart is not None:
            await self._apart.unstage(candidate)
        elif candidate.pending and self._serving is not None and not self._is_served(candidate):
            await self._serving.unload(candidate)

    async def reachable(self) -> None:
        if self._serving is not None:
            await self._serving.reachable()

    async def publish(self, scenario: str, draft: Draft, expected_head: ReleaseId) -> Release:
        async with self._lock(scenario):
            if draft.surface is Surface.WEIGHTS:
                await self.reachable()  # before the chain has a release that nobody could get
            release = await asyncio.to_thread(self._releases.publish, scenario, draft, expected_head)
            return await self._serve(release)

    async def hold(self, scenario: str, draft: Draft, expected_head: ReleaseId) -> Release:
        async with self._lock(scenario):
            release = await asyncio.to_thread(self._releases.hold, scenario, draft, expected_head)
        await self.note(release, "held", {})
        return release

    async def promote(
        self,
        scenario: str,
        release_id: ReleaseId,
        expected_head: ReleaseId | None,
        author: str,
        evidence: Mapping[str, Any] | None = None,
    ) -> Release:
        move = self._releases.promote
        async with self._lock(scenario):
            release = await asyncio.to_thread(move, scenario, release_id, expected_head, author, evidence)
            return await self._serve(release)

    async def rollback(
        self,
        scenario: str,
        release_id: ReleaseId | None,
        expected_head: ReleaseId | None,
        author: str,
        evidence: Mapping[str, Any] | None = None,
        surface: Surface | None = None,
    ) -> Release:
        move = self._releases.rollback
        async with self._lock(scenario):
            release = await asyncio.to_thread(move, scenario, release_id, expected_head, author, evidence, surface)
            return await self._serve(release)

    async def route(
        self,
        scenario: str,
        policy: Policy,
        expected_head: str | None,
        author: str,
        operation: Operation = Operation.ROUTE,
        evidence: Mapping[str, Any] | None = None,
    ) -> Release:
        """Release a policy and serve by it. What it names is loaded first, so one that cannot be served changes nothing."""
        async with self._lock(scenario):
            arms = await self.routes.prepare(scenario, policy, self.served(scenario))
            move = self._releases.route
            release = await asyncio.to_thread(move, scenario, policy, expected_head, author, operation, evidence)
            self._take_up(scenario, Route(release, policy, arms))
        event = {Operation.PROMOTE: "canary_promoted", Operation.ROLLBACK: "canary_returned"}.get(operation, "routed")
        reason = (evidence or {}).get("reason")
        await self.note(release, event, {"policy": policy.wire(), "author": author, "reason": reason})
        return release

    async def follow(self, scenario: str) -> Release:
        """Serve the chain's heads and its routing policy if another process (an offline command) moved them."""
        async with self._lock(scenario):
            if scenario in self._served:
                await self._follow_routing(scenario)
            served = self._served.get(scenario, {})
            for surface, head in (await asyncio.to_thread(self._heads, scenario)).items():
                if surface not in served or served[surface].release_id != head.release_id:
                    await self._serve(head, surface)
            return self.served(scenario)

    # -- inside the lock -----------------------------------------------------------------------------------------------

    def _take_up(self, scenario: str, route: Route) -> None:
        """Serve by another policy. What only the old one needed goes last: requests on their way still mean it."""
        left = {arm.release_id for arm in self.routes.of(scenario).arms.values()}
        self.routes.put(scenario, route)
        self._loaded.setdefault(scenario, []).sort(key=lambda release: release.release_id in left)
        self._retire(scenario)

    async def _follow_routing(self, scenario: str) -> None:
        route = await self.routes.follow(scenario, self.served(scenario))
        if route is None or route.release is None:
            return
        self._take_up(scenario, route)
        if route.fault is not None:
            logger.warning("the routing policy %s is not served: %s", route.release.release_id, route.fault)
        event = "routed" if route.fault is None else "routing_failed"
        await self.note(route.release, event, {"policy": route.policy.wire(), "because": route.fault})

    async def _serve(self, release: Release, surface: Surface | None = None) -> Release:
        """Put a published release in force; undo in the chain weights that the engine cannot load."""
        surface = surface or release.surface
        started = self._clock.monotonic()
        try:
            if surface is Surface.WEIGHTS:
                await self._load(release)
        except ReefError as error:
            if self._is_way_back(release):
                raise  # a further one would fail as well; the head names what is served, and is followed when the engine can
            await self.note(release, "load_failed", {"reason": error.message})
            await self._compensate(release, error)
            kind = EngineUnavailable if isinstance(error, EngineUnavailable) else EngineError
            raise kind(
                f"{release.release_id} could not be loaded and was rolled back.",
                why=error.message,
                hint="The old weights serve.",
            ) from error
        served = self._served.setdefault(release.scenario, {})
        previous, served[surface] = served.get(surface), release
        seconds = self._clock.monotonic() - started
        await self.note(release, "served", {"swap_s": round(seconds, 4), "previous": previous.release_id if previous else None})
        self._retire(release.scenario)
        return release

    def _is_way_back(self, release: Release) -> bool:
        """Whether a release only says again what is served already."""
        served = self._served.get(release.scenario, {}).get(Surface.WEIGHTS)
        return served is not None and served.content_id == release.content_id

    async def _compensate(self, release: Release, error: ReefError) -> None:
        """Append a rollback to what is really being served, so that the chain's head never names unloaded weights."""
        served = self._served.get(release.scenario, {}).get(Surface.WEIGHTS)
        if served is None or release.operation is Operation.CREATION:
            return
        back = await asyncio.to_thread(
            self._releases.rollback,
            release.scenario,
            served.release_id,
            release.release_id,
            f"reef: load failed ({error.code})",
            None,
            Surface.WEIGHTS,
        )
        await self._load(back)
        self._served[release.scenario][Surface.WEIGHTS] = back
        await self.note(back, "served", {"because": error.message})

    async def _load(self, release: Release) -> None:
        if self._bring is None:
            return
        await self._bring(release, await self._directory(release))
        loaded = self._loaded.setdefault(release.scenario, [])
        loaded[:] = [other for other in loaded if other.release_id != release.release_id] + [release]

    async def _directory(self, release: Release) -> Path | None:
        """The release's files, or None for the base model. Raises `NotRestorable`."""
        content_id = ContentId(release.content_id)
        if release.kind == "base":
            return None
        directory = await asyncio.to_thread(self._releases.directory, content_id)
        if directory is None:
            raise NotRestorable(f"The bytes of {release.release_id} are no longer in the store.")
        return directory

    def _retire(self, scenario: str) -> None:
        """Unload the scenario's oldest LoRA adapters in the background; unloading waits for requests that use them.

        The newest release behind a full gate stays: the next steps are compared with it.
        """
        loaded = self._loaded.get(scenario, [])
        keep = {self.served(scenario).release_id, *[release.release_id for release in loaded if release.gated][-1:]}
        spare = [release for release in loaded if release.release_id not in keep and not self.routes.uses(release)]
        for release in spare[: max(0, len(spare) - KEEP_LOADED)]:
            loaded.remove(release)
            self._unload_later(release)

    def _unload_later(self, release: Release) -> None:
        if self._serving is None:
            return

        async def unload(serving: Serving) -> None:
            try:
                await serving.unload(release)
            except ReefError as error:
                logger.warning("could not unload %s: %s", release.release_id, error)

        task = asyncio.create_task(unload(self._serving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_served(self, release: Release) -> bool:
        """Whether clients may get this release, as the head or by the routing policy."""
        served = self._served.get(release.scenario, {}).get(Surface.WEIGHTS)
        return (served is not None and served.release_id == release.release_id) or self.routes.uses(release)

    def _lock(self, scenario: str) -> asyncio.Lock:
        return self._locks.setdefault(scenario, asyncio.Lock())

    async def note(self, release: Release, event: str, detail: Mapping[str, Any]) -> None:
        """One row of the release's history in the experience log, where watchers find it."""
        row = (release.scenario, release.release_id, self._clock.now(), event, json.dumps(dict(detail)))

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO release_events (scenario, release_id, at, event, detail) VALUES (?, ?, ?, ?, ?)", row
            )

        await self._log.write(write)


def _alone(serving: Serving | None, apart: Staging | None) -> str | None:
    """Why this deployment's engine can serve one release only; None when releases stand beside each other."""
    if serving is None:
        return "the provider serves its own model, whatever release is named; there is nothing to choose between"
    return "each release replaces all of the engine's weights (trainer.push: merged or full)" if apart is not None else None
