"""What the gateway is given: every collaborator it uses, in one frozen object made by the supervisor.

Handlers find it with `deps_of(request)`. Optional collaborators are None (no learning in a record-only deployment); routes
that need one then answer with a clear code instead of failing. Knows nothing of how anything here is made.

Inference routes are a table `ROUTES: Sequence[tuple[method, path, handler]]` of `gateway.inference`; every path starts with
`/v1/`, and `/s/<scenario>/v1/...` and doubled slashes reach the same handlers (`gateway.app` rewrites before matching).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from reef_cli.config.schema import ReefSettings
from reef_cli.core.clock import Clock, SystemClock
from reef_cli.core.ports import ChatTemplate, LearningPort, Publishing
from reef_cli.core.types import Release
from reef_cli.gateway.http import Handler, Request
from reef_cli.releases.routing import Auto, Policy
from reef_cli.telemetry.traces import NoTracer, Tracer

if TYPE_CHECKING:
    from reef_cli.experience.log import ExperienceLog
    from reef_cli.gateway.auth import Principal, TokenBook
    from reef_cli.gateway.backends import Backend
    from reef_cli.releases.service import ReleaseService
    from reef_cli.telemetry.metrics import Metrics


class DrainFlag:
    """Set once when the server stops: new requests get 503, `idle` resolves when the running ones are done.

    Event streams never end by themselves, so they are not counted; they watch `begun` and end at once.
    """

    def __init__(self) -> None:
        self.running = 0
        self.begun = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> bool:
        return self.begun.is_set()

    def start(self) -> None:
        self.begun.set()

    def enter(self) -> None:
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._idle.set()

    async def idle(self, timeout: float | None = None) -> bool:
        """Wait until no request runs; False when `timeout` seconds passed first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Knobs of the HTTP edge that have no key in serve.yaml; the defaults are right for production."""

    small_limit_bytes: int = 1024 * 1024
    """Largest body of the `/reef/*` routes that import no records."""

    keep_alive_s: float = 15.0
    """Longest silence of an event stream."""


Route = tuple[str, str, Handler]
"""`(method, path, handler)`, see `gateway.router` for the path."""

Evaluate = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""`(scenario, {release_id?, candidate?, suite?}) -> result`; raises the core errors."""


class Routing(Protocol):
    """Which releases answer which share of a scenario's traffic, as the routes ask it."""

    auto: Auto
    """How a canary is judged where its policy only says that it is."""

    def splits(self, scenario: str) -> bool:
        """Whether it matters which session a request belongs to."""
        ...

    def policy(self, scenario: str) -> Mapping[str, Any]:
        """The policy in force; empty when the head serves everything."""
        ...

    async def view(self, scenario: str) -> Mapping[str, Any]:
        """The policy in force, its release, who serves which share, and how a canary does."""
        ...

    async def set(self, scenario: str, policy: Policy, expected_head: str | None, author: str) -> Release:
        """Release a policy. `HeadMoved`, `ReleaseNotFound`, `NotRestorable`, `ReleaseNotServable`."""
        ...

    def shadows(self, scenario: str, limit: int) -> Mapping[str, Any]:
        """What shadows answered lately, beside what clients got."""
        ...


@dataclass(frozen=True, kw_only=True)
class Deps:
    """Everything the routes use. Optional callables are None where the deployment has no such ability."""

    settings: ReefSettings
    engine_kind: str
    model: str
    log: ExperienceLog
    releases: ReleaseService
    publishing: Publishing
    backend: Backend
    tokens: TokenBook
    metrics: Metrics
    learning: LearningPort | None = None
    chat: ChatTemplate | None = None
    status: Callable[[], Mapping[str, Any]] = dict
    ready: Callable[[], str | None] = lambda: None
    """None when requests can be served, else one sentence why not."""
    clock: Clock = field(default_factory=SystemClock)
    draining: DrainFlag = field(default_factory=DrainFlag)
    metrics_on: bool = True
    options: GatewayOptions = field(default_factory=GatewayOptions)
    recipe_name: str | None = None
    home: Path | None = None
    create_scenario: Callable[[str], Awaitable[None]] | None = None
    """Makes a scenario everywhere (registry, creation release). None: registry only."""
    delete_scenario: Callable[[str], Awaitable[None]] | None = None
    """Archives a scenario everywhere. None: registry only."""
    evaluate: Evaluate | None = None
    cancel_job: Callable[[str, str], Awaitable[None]] | None = None
    """`(scenario, job_id)`: stop a running job; its samples return to the queue. Raises `JobNotFound`."""
    request_step: Callable[[str], None] | None = None
    """Take a learning step with what is queued, batch full or not."""
    request_gate: Callable[[str], Awaitable[str]] | None = None
    """Judge the head with the full evaluation now; the id of the job that does. Raises `JobOut`."""
    routing: Routing | None = None
    """None: the head serves everything."""
    contract: Callable[[str], Mapping[str, Any]] | None = None
    """What reports this scenario's recipe takes, for `GET /reef/scenarios/{s}/contract`."""
    extra_routes: Sequence[Route] = ()
    """Routes of rooms beside this one (the harness), mounted like the gateway's own: same errors, same authentication."""
    admits: Callable[[Request], Principal | None] | None = None
    """A second way in, for links that carry a key of their own (pages); asked only when no token was presented."""
    tracer: Tracer = field(default_factory=NoTracer)


def deps_of(request: Request) -> Deps:
    """The collaborators of the application that serves this request."""
    deps: Deps = request.deps
    return deps
