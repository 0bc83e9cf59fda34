"""Fibers: one plugin's life on one context, driven by the services it needs.

A fiber's *epoch* names the providers it was (or should be) loaded with. One transition runs at a time; whatever changes
meanwhile is recorded in the epoch and looked at when the transition ends, so replacing a provider restarts each consumer once.
"""

import asyncio
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from reef_cli.harness.compose.effect import ComposeError, Effect

if TYPE_CHECKING:
    from reef_cli.harness.compose.context import Context

log = logging.getLogger("reef.compose")
_in_transition: ContextVar[frozenset["Fiber"]] = ContextVar("reef_compose_transition", default=frozenset())


Target = tuple[str, int] | None
"""What a fiber is (to be) loaded with: the providers' uids and how often it was told to restart. None is INACTIVE."""


class State(StrEnum):
    PENDING = "pending"
    LOADING = "loading"
    ACTIVE = "active"
    FAILED = "failed"
    UNLOADING = "unloading"
    DISPOSED = "disposed"


@dataclass(frozen=True, slots=True)
class Plugin:
    """What can be mounted. `apply(ctx, config)` is a setup function (see `effect.py`); `schema` returns the checked config
    or raises; `inject` names the services it needs, with the config layered in front of each (or None)."""

    name: str
    apply: Callable[["Context", Any], Any]
    inject: Mapping[str, Any] = field(default_factory=dict)
    schema: Callable[[Any], Any] | None = None


class Runtime:
    """All fibers of one plugin; exists while there is one."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self.fibers: list[Fiber] = []


class Fiber:
    """See the module. `uid` is unique and increasing; None once disposed."""

    _uids = itertools.count(1)

    def __init__(
        self, parent: "Context", runtime: Runtime | None = None, plugin: Plugin | None = None, config: Any = None
    ) -> None:
        self.runtime = runtime
        self.plugin = plugin
        self.uid: int | None = next(self._uids) if runtime else 0
        self.state = State.PENDING if runtime else State.ACTIVE
        self.config = config
        self.inject = dict(plugin.inject) if plugin else {}
        self.error: BaseException | None = None
        self.inertia: asyncio.Task[None] | None = None
        self.effects: list[Effect] = []
        self.provided: dict[str, Any] = {}
        self.on_self_update: Callable[[Any], None] | None = None
        self.on_self_dispose: Callable[[], None] | None = None
        self.loads = 0
        self._failed_with: object = None
        self._revision = 0
        self._wanted: Target = None if runtime else ("", 0)
        self._loaded: Target = None if runtime else ("", 0)
        self._holder: Effect | None = None
        self.parent = parent
        self.ctx = parent
        if runtime:
            self.ctx = parent.extend(fiber=self)
            for name, layer in self.inject.items():
                if layer is not None:
                    self.ctx = self.ctx.intercept(name, layer)

    @property
    def name(self) -> str:
        return self.plugin.name if self.plugin else "root"

    @property
    def epoch(self) -> str | None:
        """`:uid:uid` of the providers wanted now; None is INACTIVE."""
        return self._wanted[0] if self._wanted else None

    def mount(self) -> None:
        """Become part of the parent's effects and start as soon as every needed service is there."""
        assert self.runtime is not None
        self.runtime.fibers.append(self)
        self._holder = Effect.start(self.parent.fiber, lambda: self._dispose_here, f"plugin {self.name}")
        self.refresh()

    # what effects ask of their owner

    def assert_active(self) -> None:
        if self.uid is None or self.state in (State.UNLOADING, State.DISPOSED, State.FAILED):
            raise ComposeError("cannot create effect on inactive context")

    def generation(self) -> object:
        return self._wanted

    def complain(self, error: BaseException) -> None:
        """Errors nobody waits for: logged once, and kept for the root's owner."""
        log.error("%s: %s: %s", self.name, type(error).__name__, error)
        self.ctx.root.complaints.append((self.name, error))

    # dependencies

    def refresh(self) -> None:
        """Look at the providers again and set the epoch."""
        if self.runtime is None or self.uid is None:
            return
        uids = [self.ctx.provider_uid(name) for name in self.inject]
        epoch = None if self.error is not None or None in uids else ":" + ":".join(map(str, uids))
        self._want(None if epoch is None else (epoch, self._revision))
        if self.inertia is None:
            self._enter(self._resting())

    def _want(self, target: Target) -> None:
        self._wanted = target
        if self.inertia is None and target != self._loaded:
            # The state changes now, not when the task first runs: effects must not be made on a fiber about to unload.
            self._enter(State.UNLOADING if self._loaded is not None else State.LOADING)
            self.inertia = asyncio.create_task(self._transition())

    async def _transition(self) -> None:
        _in_transition.set(_in_transition.get() | {self})
        try:
            while self._wanted != self._loaded:
                if self._loaded is not None:
                    await self._unload()
                elif self._wanted is not None:
                    await self._load(self._wanted)
        finally:
            self.inertia = None
            self._enter(self._resting())

    def _resting(self) -> State:
        if self.uid is None:
            return State.DISPOSED
        if self.error is not None:
            return State.FAILED
        return State.PENDING if self._loaded is None else State.ACTIVE

    async def _load(self, target: Target) -> None:
        self._enter(State.LOADING)
        self.loads += 1
        assert self.plugin is not None
        plugin = self.plugin
        try:
            config = plugin.schema(self.config) if plugin.schema else self.config
            self._loaded = target
            effect = Effect.start(self, lambda: plugin.apply(self.ctx, config), f"apply {self.name}")
            await effect.ready()
        except Exception as error:  # a plugin is foreign code: its failure is its fiber's state, never the engine's
            await self._failed(error)
            return
        if self._wanted == target:
            self._enter(State.ACTIVE)

    async def _failed(self, error: Exception) -> None:
        self.error = error
        self._failed_with = self._providers()
        self._wanted = None
        self.complain(error)
        self._enter(State.UNLOADING)
        await self._teardown()
        self._loaded = None

    async def _unload(self) -> None:
        self._enter(State.UNLOADING)
        await self._teardown()
        self._loaded = None

    async def _teardown(self) -> None:
        while self.effects:
            await self.effects[-1].dispose()
        self.provided.clear()

    def _enter(self, state: State) -> None:
        was, self.state = self.state, state
        if (was is State.ACTIVE) != (state is State.ACTIVE) and self.provided:
            self.ctx.notify(tuple(self.provided))

    def _providers(self) -> object:
        return [self.ctx.provider_mark(name) for name in self.inject]

    def retry(self) -> bool:
        """Give a failed fiber another chance if what it stands on is no longer what it failed with."""
        if self.error is None or self._providers() == self._failed_with:
            return False
        self.error = None
        self.refresh()
        return True

    def reset(self, config: Any) -> None:
        """Take a config that `update` refused: the next load fails with the reason, or waits for services as any other."""
        self.config, self.error = config, None
        self._revision += 1
        self.refresh()

    # life

    async def settle(self) -> "Fiber":
        """Wait until no transition runs; returns at once inside the fiber's own transition."""
        while self.inertia is not None and self not in _in_transition.get():
            await asyncio.shield(self.inertia)
        return self

    async def restart(self) -> None:
        """Unload and load again with the current config."""
        self.assert_mounted()
        self._revision += 1
        self.refresh()
        await self.settle()

    async def update(self, config: Any, *, from_loader: bool = False) -> None:
        """Take a new config: validated first (an invalid one changes nothing), offered in place, else a restart."""
        self.assert_mounted()
        if self.plugin is not None and self.plugin.schema:
            self.plugin.schema(config)

        async def replace() -> None:
            self.config = config
            self.error = None
            await self.restart()

        result = self.ctx.waterfall("internal/update", self, config, fallback=replace)
        if inspect.isawaitable(result):
            await result
        self.config = config
        if self.on_self_update is not None and not from_loader:
            self.on_self_update(config)

    async def dispose(self, *, from_loader: bool = False) -> None:
        """End this fiber for good."""
        if self.on_self_dispose is not None and not from_loader and self.uid is not None:
            self.on_self_dispose()
        if self._holder is not None:
            await self._holder.dispose()

    async def _dispose_here(self) -> None:
        self.uid = None
        self._want(None)
        await self.settle()
        assert self.runtime is not None
        if self in self.runtime.fibers:
            self.runtime.fibers.remove(self)
        self.ctx.root.drop_runtime(self.runtime)
        if self.inertia is None:
            self.state = State.DISPOSED

    def assert_mounted(self) -> None:
        if self.uid is None or self.runtime is None:
            raise ComposeError("cannot change an inactive fiber")

    def ancestors(self) -> set["Fiber"]:
        """This fiber and every fiber it lives in."""
        found: set[Fiber] = set()
        fiber = self
        while fiber not in found:
            found.add(fiber)
            fiber = fiber.parent.fiber
        return found
