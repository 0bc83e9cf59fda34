"""Events between plugins. Listeners are effects; the five ways of calling them differ in order, waiting and early ends."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reef_cli.harness.compose.effect import ComposeError

if TYPE_CHECKING:
    from reef_cli.harness.compose.context import Context

Scope = Callable[["Context"], bool]


@dataclass(eq=False, slots=True)
class Listener:
    """A registered listener and the context it belongs to."""

    event: str
    call: Callable[..., Any]
    ctx: "Context"
    once: bool = False


class Events:
    """The listeners of one root, in calling order."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    def add(self, listener: Listener, prepend: bool) -> Callable[[], None]:
        self.listeners.insert(0 if prepend else len(self.listeners), listener)

        def remove() -> None:
            if listener in self.listeners:
                self.listeners.remove(listener)

        return remove

    def _take(self, event: str, scope: Scope | None) -> list[Listener]:
        chosen = [held for held in self.listeners if held.event == event and (scope is None or scope(held.ctx))]
        for held in chosen:
            if held.once:
                self.listeners.remove(held)
        return chosen

    def emit(self, event: str, *args: Any, scope: Scope | None = None) -> None:
        """Call every listener now; a failing one is complained about and does not stop the rest."""
        for held in self._take(event, scope):
            try:
                held.call(*args)
            except Exception as error:  # a listener is foreign code
                held.ctx.fiber.complain(error)

    async def parallel(self, event: str, *args: Any, scope: Scope | None = None) -> None:
        """Start all, wait for all; failures are raised together."""
        results = await asyncio.gather(*(_called(held, args) for held in self._take(event, scope)), return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            raise ExceptionGroup(f"listeners of {event} failed", errors)

    async def serial(self, event: str, *args: Any, scope: Scope | None = None) -> Any:
        """One after the other; the first value that is neither None nor False ends it."""
        for held in self._take(event, scope):
            value = await _called(held, args)
            if value is not None and value is not False:
                return value
        return None

    def bail(self, event: str, *args: Any, scope: Scope | None = None) -> Any:
        """`serial` without waiting."""
        for held in self._take(event, scope):
            value = held.call(*args)
            if value is not None and value is not False:
                return value
        return None

    def waterfall(self, event: str, *args: Any, fallback: Callable[..., Any], scope: Scope | None = None) -> Any:
        """Each listener gets the arguments and `next`, to be called at most once; the last `next` is the fallback."""
        chain = self._take(event, scope)

        def step(index: int) -> Any:
            if index == len(chain):
                return fallback()
            used = False

            def onward() -> Any:
                nonlocal used
                if used:
                    raise ComposeError("next() was called twice")
                used = True
                return step(index + 1)

            return chain[index].call(*args, onward)

        return step(0)


async def _called(listener: Listener, args: tuple[Any, ...]) -> Any:
    value = listener.call(*args)
    return await value if inspect.isawaitable(value) else value
