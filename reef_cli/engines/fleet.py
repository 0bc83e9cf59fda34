"""Several engines with the same weights behind one client: who answers a request, and control calls that all obey or none.

Requests go through SGLang's router where there is one. Without, a conversation stays with the engine that has its prefix in the
cache, unless that one is much busier than another; new ones go round. An engine that is away gets no requests. Knows neither
releases nor processes.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, Unpack

from reef_cli.core.errors import EngineError, EngineUnavailable
from reef_cli.core.ports import Completion, Delta, Sampling
from reef_cli.engines.client import EngineClient, Mode
from reef_cli.engines.generation import Wish
from reef_cli.engines.router import RouterProcess

_REMEMBERED = 10_000
"""Openings whose engine is known."""
_UNEVEN = 4
"""How many requests more an engine may have than the idlest before a conversation moves."""
_OPENINGS = (32, 64, 128, 256, 512)
"""A conversation is known by its first tokens, so that its next turn, which begins with the same ones, finds its engine."""
_TAKE_BACK_S = 10.0
"""How long an engine may take to let go of an adapter that no request has used."""
Member = EngineClient
T = TypeVar("T")
Ready = Callable[[Member], bool]


class Fleet(EngineClient):
    """Implements the client over `members`. `ready` tells which of them may get requests."""

    def __init__(self, members: Sequence[Member], ready: Ready = lambda _member: True) -> None:
        super().__init__(members[0].base_url)
        self.members = list(members)
        self._ready = ready
        self.router: RouterProcess | None = None
        """SGLang's own, through which requests go while it and all engines are there."""
        self._busy: Counter[int] = Counter()
        self._homes: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._next = 0

    @property
    def urls(self) -> list[str]:
        return [member.base_url for member in self.members]

    def _through(self) -> EngineClient | None:
        """The router's client, where requests may go that way."""
        usable = self.router is not None and self.router.ready and all(map(self._ready, self.members))
        return self.router.client if self.router is not None and usable else None

    async def abort(self, rid: str) -> None:
        await self._all(lambda member: member.abort(rid))

    async def close(self) -> None:
        for member in self.members:
            await member.close()

    # Generation

    async def generate(self, input_ids: Sequence[int], sampling: Sampling, **wish: Unpack[Wish]) -> Completion:
        with self._chosen(input_ids) as member:
            return await member.generate(input_ids, sampling, **wish)

    async def stream(self, input_ids: Sequence[int], sampling: Sampling, **wish: Unpack[Wish]) -> AsyncIterator[Delta]:
        with self._chosen(input_ids) as member:
            deltas = member.stream(input_ids, sampling, **wish)
            try:
                async for delta in deltas:
                    yield delta
            finally:
                await deltas.aclose()  # type: ignore[attr-defined]

    @contextmanager
    def _chosen(self, input_ids: Sequence[int]) -> Iterator[Member]:
        if (router := self._through()) is not None:
            yield router
            return
        number = self._choose(input_ids)
        self._busy[number] += 1
        try:
            yield self.members[number]
        finally:
            self._busy[number] -= 1

    def _choose(self, input_ids: Sequence[int]) -> int:
        openings = [tuple(input_ids[:length]) for length in _OPENINGS if length <= len(input_ids)] or [tuple(input_ids)]
        able = [number for number, member in enumerate(self.members) if self._ready(member)]
        if not able:
            raise EngineUnavailable("No engine is ready; the service is temporarily unavailable")
        idlest = min(self._busy[number] for number in able)
        home = next((self._homes[opening] for opening in reversed(openings) if opening in self._homes), None)
        if home not in able or self._busy[home] > idlest + _UNEVEN:
            free = [number for number in able if self._busy[number] == idlest]
            home = next((number for number in free if number >= self._next), free[0])
            self._next = (home + 1) % len(self.members)
        for opening in openings:
            self._homes[opening] = home
            self._homes.move_to_end(opening)
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return home

    # Information

    async def model_info(self) -> Mapping[str, Any]:
        """The first engine's, with the weight version that all have; differing ones are named together."""
        infos = await self._all(lambda member: member.model_info())
        versions = list(dict.fromkeys(str(info["weight_version"]) for info in infos))
        return {**infos[0], "weight_version": versions[0] if len(versions) == 1 else " | ".join(versions)}

    async def server_info(self) -> Mapping[str, Any]:
        return await self.members[0].server_info()

    async def adapters(self) -> list[str]:
        """Those that every engine has."""
        found = await self._all(lambda member: member.adapters())
        return [name for name in found[0] if all(name in names for names in found)]

    # Control

    async def pause(self, mode: Mode) -> None:
        await self._all(lambda member: member.pause(mode))

    async def resume(self) -> None:
        await self._all(lambda member: member.resume())

    async def flush(self, timeout_s: float = 30.0) -> None:
        await self._all(lambda member: member.flush(timeout_s))

    async def load_lora(self, name: str, directory: Path) -> None:
        """Into every engine that lacks it; one that refuses takes it away from the others again."""
        lacking = [member for member in self.members if name not in await member.adapters()]
        try:
            await self._all(lambda member: member.load_lora(name, directory), lacking)
        except (EngineError, EngineUnavailable):
            await asyncio.gather(*(self._take_back(member, name) for member in lacking))
            raise

    @staticmethod
    async def _take_back(member: Member, name: str) -> None:
        """Nobody uses the adapter yet, so an engine that is well is quick; one that is not is not waited for."""
        with suppress(EngineError, EngineUnavailable, TimeoutError):  # it never had it, or is gone
            async with asyncio.timeout(_TAKE_BACK_S):
                await member.unload_lora(name)

    async def unload_lora(self, name: str) -> None:
        await self._all(lambda member: member.unload_lora(name))

    async def end_update(self) -> None:
        await self._all(lambda member: member.end_update())

    async def update_from_disk(self, directory: Path, version: str, timeout_s: float = 600.0) -> None:
        """One after the other, each all or nothing; a failure after the first success leaves a mixture, and says so."""
        for number, member in enumerate(self.members):
            try:
                await member.update_from_disk(directory, version, timeout_s)
            except (EngineError, EngineUnavailable) as error:
                error.details["dirty"] = number > 0
                error.details["engine"] = member.base_url
                raise

    async def release_memory(self) -> None:
        await self._all(lambda member: member.release_memory())

    async def resume_memory(self) -> None:
        await self._all(lambda member: member.resume_memory())

    async def set_version(self, version: str) -> None:
        await self._all(lambda member: member.set_version(version))

    async def checksum(self) -> str:
        """That of all engines; raises `EngineError` where they differ."""
        found = set(await self._all(lambda member: member.checksum()))
        if len(found) != 1:
            raise EngineError("The engines run different weights")
        return found.pop()

    async def _all(self, call: Callable[[Member], Awaitable[T]], members: Sequence[Member] | None = None) -> list[T]:
        """Every engine's answer, or after all have answered the first failure with the engine it came from."""
        asked = self.members if members is None else members
        replies = await asyncio.gather(*(call(member) for member in asked), return_exceptions=True)
        for member, reply in zip(asked, replies, strict=True):
            if isinstance(reply, EngineError | EngineUnavailable):
                reply.details["engine"] = member.base_url
            if isinstance(reply, BaseException):
                raise reply
        return [reply for reply in replies if not isinstance(reply, BaseException)]
