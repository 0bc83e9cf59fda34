"""Effects: a change to the world together with its inverse.

A setup function returns a disposer, an iterable of them (usually a generator), an awaitable of one, or an async iterable.
Whatever was yielded is undone last-in first-out, each at most once. A setup that fails midway undoes what it already did and
raises again; an async setup whose owner has moved on stops at its next yield and unwinds.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Protocol

Disposer = Callable[[], Any]
"""Undoes one thing; may return an awaitable. An `Effect` is one too."""
Setup = Callable[[], Any]


class ComposeError(RuntimeError):
    """Misuse of the engine by a plugin; its text is part of the protocol."""


class Owner(Protocol):
    """What an effect needs of the fiber that owns it."""

    effects: list["Effect"]

    def assert_active(self) -> None: ...

    def generation(self) -> object: ...

    def complain(self, error: BaseException) -> None: ...


class Effect:
    """A registered change. Awaiting it waits for an async setup; calling it disposes."""

    def __init__(self, owner: Owner, label: str) -> None:
        self.owner = owner
        self.label = label
        self.children: list[Effect] = []
        self._undo: list[Disposer] = []
        self._generation = owner.generation()
        self._closing = False
        self._awaited = False
        self._setup: asyncio.Task[None] | None = None
        self._disposal: asyncio.Task[None] | None = None

    @classmethod
    def start(cls, owner: Owner, setup: Setup, label: str) -> "Effect":
        """Run `setup` and register the effect. A synchronous failure unwinds and raises; an async one is raised on await."""
        owner.assert_active()
        effect = cls(owner, label)
        owner.effects.append(effect)
        try:
            effect._collect(setup())
        except BaseException:
            effect._fail_now()
            raise
        return effect

    @property
    def disposed(self) -> bool:
        return self._closing and (self._disposal is None or self._disposal.done())

    def tree(self) -> dict[str, Any]:
        """`{label, children}`: what this effect consists of, for people and tests."""
        return {"label": self.label, "children": [child.tree() for child in self.children]}

    def __call__(self) -> Awaitable[None]:
        return self.dispose()

    def __await__(self) -> Any:
        return self.ready().__await__()

    async def ready(self) -> "Effect":
        """Wait until an async setup is complete; raises its error."""
        if self._setup is not None:
            self._awaited = True
            await asyncio.shield(self._setup)
        return self

    async def dispose(self) -> None:
        """Undo, once, whoever asks and however often; later callers wait for the first."""
        if self._disposal is None and not self._closing:
            self._closing = True
            self._disposal = asyncio.create_task(self._unwind())
        if self._disposal is not None and self._disposal is not asyncio.current_task():
            await asyncio.shield(self._disposal)

    def _collect(self, result: Any) -> None:
        if result is None:
            return
        if isinstance(result, Effect) or (callable(result) and not inspect.isawaitable(result)):
            self._push(result)
        elif hasattr(result, "__aiter__"):
            self._begin(self._drain(result))
        elif inspect.isawaitable(result):
            self._begin(self._one(result))
        elif isinstance(result, Iterable):
            for item in result:
                self._push(item)
        else:
            raise ComposeError(f"an effect must give disposers, not {type(result).__name__}")

    def _push(self, disposer: Any) -> None:
        if disposer is None:
            return
        if not callable(disposer):
            raise ComposeError(f"an effect must give disposers, not {type(disposer).__name__}")
        if isinstance(disposer, Effect):
            # An effect that is yielded belongs to its parent from now on, so it is undone in the parent's order.
            if disposer in disposer.owner.effects:
                disposer.owner.effects.remove(disposer)
            self.children.append(disposer)
        self._undo.append(disposer)

    def _begin(self, work: Awaitable[None]) -> None:
        self._setup = asyncio.create_task(self._run(work))
        self._setup.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._awaited:
            self.owner.complain(error)

    async def _one(self, awaitable: Awaitable[Any]) -> None:
        self._collect_late(await awaitable)

    def _collect_late(self, result: Any) -> None:
        if result is not None and not callable(result):
            raise ComposeError(f"an async effect must give a disposer, not {type(result).__name__}")
        self._push(result)

    async def _drain(self, source: AsyncIterator[Any]) -> None:
        iterator = source.__aiter__()
        try:
            async for item in iterator:
                self._push(item)
                if self._closing or self.owner.generation() != self._generation:
                    return
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()

    async def _run(self, work: Awaitable[None]) -> None:
        try:
            await work
        except BaseException:
            if not self._closing:
                self._closing = True
                self._forget()
                await self._undo_all()
            raise

    def _fail_now(self) -> None:
        self._closing = True
        if self._undo_sync():
            self._disposal = asyncio.create_task(self._unwind())
        else:
            self._forget()

    def _undo_sync(self) -> bool:
        """Undo synchronously as far as possible; True when an async remainder is left."""
        while self._undo:
            if isinstance(self._undo[-1], Effect):
                return True
            try:
                result = self._undo.pop()()
            except Exception as error:  # a disposer is foreign code: the rest must still be undone
                self.owner.complain(error)
                continue
            if inspect.isawaitable(result):
                self._undo.append(partial(_same, result))
                return True
        return False

    async def _unwind(self) -> None:
        if self._setup is not None:
            self._awaited = True
            # The setup itself sees `_closing` at its next yield; until then what it holds may be half made.
            try:
                await asyncio.shield(self._setup)
            except Exception as error:  # foreign code; it was or will be reported where the effect is awaited
                self.owner.complain(error)
        await self._undo_all()
        self._forget()

    async def _undo_all(self) -> None:
        while self._undo:
            try:
                result = self._undo.pop()()
                if inspect.isawaitable(result):
                    await result
            except Exception as error:  # a disposer is foreign code: the rest must still be undone
                self.owner.complain(error)
        self.children.clear()

    def _forget(self) -> None:
        if self in self.owner.effects:
            self.owner.effects.remove(self)


def _same(value: Any) -> Any:
    return value
