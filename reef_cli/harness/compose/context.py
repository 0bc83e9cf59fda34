"""Contexts: the handle a plugin works through. Services, isolation, layered config, plugins and events.

Contexts form a chain. Each may give a service name another realm for its subtree (`isolate`) or put config in front of it
(`intercept`). One provider per name and realm; it is visible while its fiber is active and its check passes.
"""

import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from reef_cli.harness.compose.effect import ComposeError, Effect, Setup
from reef_cli.harness.compose.events import Events, Listener
from reef_cli.harness.compose.fiber import Fiber, Plugin, Runtime, State

_fresh = itertools.count(1)


@dataclass(slots=True)
class Impl:
    """One provided service."""

    name: str
    ctx: "Context"
    value: Any
    check: Callable[[], bool] | None

    def visible(self) -> bool:
        if self.ctx.fiber.state is not State.ACTIVE:
            return False
        try:
            return self.check is None or self.check()
        except Exception as error:  # a check is foreign code; one that raises says no
            self.ctx.fiber.complain(error)
            return False


class Context:
    """See the module. `Context()` makes a root; everything else is derived from one."""

    def __init__(self, parent: Optional["Context"] = None, fiber: Fiber | None = None) -> None:
        self.parent = parent
        self.realms: dict[str, str] = {}
        self.layers: dict[str, Any] = {}
        if parent is None:
            self.root = self
            self.services: dict[str, Impl] = {}
            self.runtimes: dict[int, Runtime] = {}
            self.events = Events()
            self.complaints: list[tuple[str, BaseException]] = []
        else:
            self.root = parent.root
        self.fiber: Fiber = fiber or (parent.fiber if parent else Fiber(self))

    def extend(self, fiber: Fiber | None = None) -> "Context":
        return Context(self, fiber)

    def isolate(self, name: str, label: str | None = None) -> "Context":
        """A context in which `name` lives in another realm: a shared one by label, else a private one."""
        ctx = self.extend()
        ctx.realms[name] = f"@{label}" if label is not None else f"#{next(_fresh)}"
        return ctx

    def intercept(self, name: str, config: Any) -> "Context":
        """A context in which the service `name` sees `config` layered over what outer contexts gave."""
        ctx = self.extend()
        ctx.layers[name] = config
        return ctx

    def chain(self) -> Iterable["Context"]:
        ctx: Context | None = self
        while ctx is not None:
            yield ctx
            ctx = ctx.parent

    def layered(self, name: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The config a service sees from here: base first, then from the outermost context inwards."""
        merged = dict(base or {})
        for ctx in reversed(list(self.chain())):
            merged.update(ctx.layers.get(name) or {})
        return merged

    # effects and plugins

    def effect(self, setup: Setup, label: str = "effect") -> Effect:
        """Change the world reversibly, as part of this context's fiber."""
        return Effect.start(self.fiber, setup, label)

    def plugin(self, plugin: Plugin | Callable[..., Any] | Any, config: Any = None) -> Fiber:
        """Mount a plugin (a `Plugin`, a function, a class or an object with `apply`); returns its fiber at once."""
        self.fiber.assert_active()
        spec = as_plugin(plugin)
        key = id(spec.apply) if not hasattr(spec.apply, "__self__") else id(spec.apply.__self__)
        runtime = self.root.runtimes.setdefault(key, Runtime(spec))
        fiber = Fiber(self, runtime, spec, config)
        fiber.mount()
        return fiber

    def inject(self, names: Iterable[str], apply: Callable[["Context"], Any]) -> Fiber:
        """Run `apply` while all the named services are there."""
        return self.plugin(Plugin("inject", lambda ctx, _: apply(ctx), dict.fromkeys(names)))

    def drop_runtime(self, runtime: Runtime) -> None:
        if not runtime.fibers:
            for key in [key for key, held in self.root.runtimes.items() if held is runtime]:
                del self.root.runtimes[key]

    async def remove_plugin(self, plugin: Any) -> None:
        """Dispose every fiber of a plugin."""
        spec = as_plugin(plugin)
        for runtime in [held for held in self.root.runtimes.values() if held.plugin.apply == spec.apply]:
            for fiber in list(runtime.fibers):
                await fiber.dispose()

    async def dispose(self) -> None:
        """End everything under the root: no effect, listener or service is left."""
        fiber = self.root.fiber
        while fiber.effects:
            await fiber.effects[-1].dispose()

    async def settle(self) -> None:
        """Wait until no fiber anywhere is in transition."""
        while moving := [fiber for fiber in self.fibers() if fiber.inertia is not None]:
            for fiber in moving:
                await fiber.settle()

    def fibers(self) -> list[Fiber]:
        return [fiber for runtime in list(self.root.runtimes.values()) for fiber in list(runtime.fibers)]

    # services

    def realm(self, name: str) -> str:
        """The key under which this context sees the service `name`."""
        return next((f"{name}{ctx.realms[name]}" for ctx in self.chain() if name in ctx.realms), name)

    def provide(self, name: str, value: Any = None, check: Callable[[], bool] | None = None) -> Effect:
        """Offer a service as an effect. Its inverse waits for everyone who depends on it before it lets go."""

        def setup() -> Callable[[], Awaitable[None]]:
            key = self.realm(name)
            taken = self.root.services.get(key)
            if taken is not None:
                raise ComposeError(f'service "{name}" has been registered at {taken.ctx.fiber.name}')
            impl = Impl(name, self, value, check)
            self.root.services[key] = impl
            self.fiber.provided[name] = impl
            if self.fiber.state is State.ACTIVE:
                self.notify((name,))

            async def withdraw() -> None:
                for held in [held for held, other in self.root.services.items() if other is impl]:
                    del self.root.services[held]
                own = self.fiber.ancestors()
                for fiber in [fiber for fiber in self.notify((name,)) if fiber not in own]:
                    await fiber.settle()
                if self.fiber.provided.get(name) is impl:
                    del self.fiber.provided[name]

            return withdraw

        return self.effect(setup, f'ctx.provide("{name}")')

    def get(self, name: str) -> Any:
        """The visible service, or None."""
        impl = self.root.services.get(self.realm(name))
        if impl is None or not (impl.visible() or impl.ctx.fiber is self.fiber):
            return None
        return impl.value

    def need(self, name: str) -> Any:
        """The service this plugin declared; `ComposeError` when it was not declared or is not there."""
        impl = self.root.services.get(self.realm(name))
        if impl is not None and impl.ctx.fiber in self.fiber.ancestors():
            return impl.value
        if not any(name in fiber.inject for fiber in self.fiber.ancestors()):
            raise ComposeError(f'cannot get property "{name}" without inject')
        if impl is None or not impl.visible():
            raise ComposeError(f'cannot get required service "{name}" in inactive context')
        return impl.value

    def set(self, name: str, value: Any) -> None:
        """Replace the value of a service this fiber provides; consumers are not restarted."""
        impl = self.root.services.get(self.realm(name))
        if impl is None:
            raise ComposeError(f'cannot set property "{name}" without provide')
        if impl.ctx.fiber is not self.fiber:
            raise ComposeError(f'cannot set property "{name}" in multiple fibers')
        impl.value = value

    def provider_uid(self, name: str) -> int | None:
        impl = self.root.services.get(self.realm(name))
        return impl.ctx.fiber.uid if impl is not None and impl.visible() else None

    def provider_mark(self, name: str) -> tuple[int | None, int] | None:
        """Which provider, in which of its lives: tells whether a service was replaced or restarted since."""
        impl = self.root.services.get(self.realm(name))
        return (impl.ctx.fiber.uid, impl.ctx.fiber.loads) if impl is not None and impl.visible() else None

    def notify(self, names: Iterable[str]) -> list[Fiber]:
        """Let every fiber that needs one of the names look again; returns those fibers."""
        wanted = set(names)
        affected = [fiber for fiber in self.fibers() if wanted & set(fiber.inject)]
        for fiber in affected:
            fiber.refresh()
        return affected

    def rekey(self) -> None:
        """After realms changed: move provided services to the realm their context has now, and let everyone look again."""
        moved = [(key, impl) for key, impl in self.root.services.items() if impl.ctx.realm(impl.name) != key]
        for key, _ in moved:
            del self.root.services[key]
        for _, impl in moved:
            taken = self.root.services.setdefault(impl.ctx.realm(impl.name), impl)
            if taken is not impl:
                raise ComposeError(f'service "{impl.name}" has been registered at {taken.ctx.fiber.name}')
        for fiber in self.fibers():
            fiber.refresh()

    # events

    def on(self, event: str, listener: Callable[..., Any], *, prepend: bool = False, once: bool = False) -> Effect:
        """Listen, as an effect of this context's fiber."""

        def setup() -> Callable[[], None]:
            held = Listener(event, listener, self, once)
            return self.root.events.add(held, prepend)

        return self.effect(setup, f'ctx.on("{event}")')

    def emit(self, event: str, *args: Any) -> None:
        self.root.events.emit(event, *args)

    def waterfall(self, event: str, *args: Any, fallback: Callable[..., Any]) -> Any:
        return self.root.events.waterfall(event, *args, fallback=fallback)


def as_plugin(plugin: Any) -> Plugin:
    """A `Plugin` from any of the accepted shapes."""
    if isinstance(plugin, Plugin):
        return plugin
    source = plugin
    apply = getattr(plugin, "apply", None) if not isinstance(plugin, type) else None
    call = apply if callable(apply) else plugin
    if not callable(call):
        raise ComposeError(f"a plugin is a function, a class or has apply, not {type(plugin).__name__}")
    inject = getattr(source, "inject", None) or {}
    name = str(getattr(source, "name", None) or getattr(source, "__name__", type(source).__name__))
    return Plugin(
        name, call, dict(inject) if isinstance(inject, Mapping) else dict.fromkeys(inject), getattr(source, "schema", None)
    )
