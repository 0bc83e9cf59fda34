"""The LoRA adapters in an engine, by the weight versions that answers of theirs carry.

Versions of the same content share one adapter: the first gives it its name in the engine, a later one needs no load and no
probe, so a return to what is still there costs nothing. An adapter goes once no version of it is left and its last request has
ended. Content is told by its folder, which the store names by what it holds. Knows neither releases nor whole weights.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reef_cli.core.errors import EngineError, EngineUnavailable
from reef_cli.engines.client import EngineClient

Check = Callable[[Path], None]
"""Raises for a LoRA adapter's folder that the engine would not survive."""
Probe = Callable[[str], Awaitable[None]]
"""One real token through an adapter. Raises `EngineError`, `EngineUnavailable`."""


@dataclass(frozen=True, slots=True)
class Resident:
    """An adapter in the engine: its name there, and the folder it came from."""

    name: str
    directory: Path


Known = Mapping[str, Resident]


class Residents:
    """Who is there, and who uses it. `load` and `refill` want the lock `changing` held, `unload` takes it itself."""

    def __init__(self, client: EngineClient, changing: asyncio.Lock, probe: Probe, check: Check | None) -> None:
        self._client = client
        self._changing = changing
        self._probe = probe
        self._check = check
        self._known: dict[str, Resident] = {}
        self._there: set[str] = set()
        self._users: Counter[str] = Counter()
        self._released = asyncio.Event()

    def __contains__(self, label: str) -> bool:
        return label in self._known

    @property
    def labels(self) -> list[str]:
        return sorted(self._known)

    @contextmanager
    def used(self, label: str) -> Iterator[str]:
        """The adapter's name in the engine, where it stays until this is left."""
        name = self._known[label].name
        self._users[name] += 1
        try:
            yield name
        finally:
            self._users[name] -= 1
            self._released.set()

    async def load(self, label: str, directory: Path | None) -> None:
        """Make a version servable. Raises `EngineError` when the engine refuses; nothing has changed then."""
        if label in self._known:
            return
        if directory is None:
            raise EngineError(f"Adapter {label!r} has no files to load")
        twin = next((one for one in self._known.values() if one.directory == directory), None)
        if twin is None:
            await self._put(label, directory)
        self._known[label] = twin or Resident(label, directory)

    async def _put(self, name: str, directory: Path) -> None:
        if self._check is not None:
            await asyncio.to_thread(self._check, directory)
        try:
            await self._client.load_lora(name, directory)
        except EngineError:
            # One that is on its way out, or that a server before this one left, may stay.
            if name not in await self._client.adapters():
                raise
        try:
            await self._probe(name)
        except (EngineError, EngineUnavailable):
            self._there.discard(name)
            await self._client.unload_lora(name)
            raise
        self._there.add(name)

    async def unload(self, label: str) -> None:
        """Let go of a version. Requests that were admitted before keep the adapter, also those still on their way to it."""
        gone = self._known.pop(label, None)
        if gone is None:
            return
        while self._users[gone.name] and not self._needed(gone.name):
            self._released.clear()
            await self._released.wait()
        async with self._changing:
            # It may have been loaded again meanwhile, or another version's unloading was here first.
            if gone.name in self._there and not self._needed(gone.name) and not self._users[gone.name]:
                self._there.discard(gone.name)
                del self._users[gone.name]
                await self._client.unload_lora(gone.name)

    def _needed(self, name: str) -> bool:
        return any(one.name == name for one in self._known.values())

    def all(self) -> Known:
        return dict(self._known)

    def forget(self) -> None:
        """The engine lost them all."""
        self._known, self._there = {}, set()

    async def refill(self, known: Known, meanwhile: bool) -> list[EngineError | EngineUnavailable]:
        """Load them again into an engine that has just restarted; the failures, after trying all.

        `meanwhile`: other engines of the same client have them and go on serving.
        """
        failures = list[EngineError | EngineUnavailable]()
        for label, one in known.items():
            try:
                await (self._client.load_lora(one.name, one.directory) if meanwhile else self.load(label, one.directory))
            except (EngineError, EngineUnavailable) as error:
                failures.append(error)
        return failures
