"""The engine as the event loop sees it: requests in, progress out; adapters with their users; the gate of the torch thread.

Leaving a request's iterator early aborts it in the torch thread. An adapter that is being unloaded takes no new request and
goes once its last one has ended.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

from reef_cli.core.errors import ConflictError, InvalidRequest
from reef_cli.engines.chat_format import ModelChat
from reef_cli.engines.embedded.adapters import Adapter
from reef_cli.engines.embedded.core import Core
from reef_cli.engines.embedded.model import Model
from reef_cli.engines.embedded.request import Progress, Request, Text, Wish
from reef_cli.weights.handles import deserialize
from reef_cli.weights.lora import made_lora

T = TypeVar("T")


class Engine:
    """One model with its torch thread, its tokenizer and its adapters."""

    def __init__(self, core: Core, model: Model, chat: ModelChat) -> None:
        self.core = core
        self.model = model
        self.chat = chat
        self.started = monotonic()
        self._users: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self._free = asyncio.Condition()
        self._names = asyncio.Lock()

    async def call(self, run: Callable[[], T], alone: bool = False) -> T:
        """Run in the torch thread between steps; see `Core.call`."""
        return await asyncio.wrap_future(self.core.call(run, alone))

    async def generate(self, wish: Wish, stream: bool) -> AsyncIterator[tuple[Request, Progress]]:
        """Progress of a request as it comes (every token when `stream`), the last with its finish."""
        loop = asyncio.get_running_loop()
        ticket = _Ticket()

        def notify(progress: Progress) -> None:
            if (stream or progress.finish is not None) and not loop.is_closed():
                loop.call_soon_threadsafe(ticket.put, progress)

        request = Request(wish, Text(self.chat.decode, wish.params.skip_special_tokens), notify)
        if wish.adapter is not None:
            self._users[wish.adapter.name] += 1
        self.core.submit(request)
        finished = False
        try:
            while not finished:
                progress = await ticket.get()
                finished = progress.finish is not None
                yield request, progress
        finally:
            if not finished:
                self.core.call(lambda: self.core.abort(lambda each: each is request, "Client disconnected"))
            if wish.adapter is not None:
                await asyncio.shield(self._leave(wish.adapter.name))

    async def finish(self, wish: Wish) -> tuple[Request, Progress]:
        """The request and its last progress."""
        steps = [each async for each in self.generate(wish, stream=False)]
        return steps[-1]

    async def _leave(self, name: str) -> None:
        async with self._free:
            self._users[name] -= 1
            self._free.notify_all()

    async def abort(self, rid: str, everything: bool) -> None:
        """End all requests, or those whose id begins with `rid` when `rid` is the id of one, as the contract has it."""

        def run() -> None:
            if everything or any(each.wish.rid == rid for each in self.core.requests()):
                self.core.abort(lambda each: everything or each.wish.rid.startswith(rid), "Abort by request")

        await self.call(run)

    def adapter(self, name: str | None) -> Adapter | None:
        """The loaded adapter of that name; raises `InvalidRequest` when there is none (any more)."""
        if not name:
            return None
        found = self.model.adapters.loaded.get(name)
        if found is None or name in self._leaving:
            raise InvalidRequest(f"LoRA adapter {name!r} is not loaded")
        return found

    async def load_adapter(self, name: str, path: str) -> None:
        """Read the folder beside the running requests, then serve it; raises `ConflictError` for a name in use."""
        await self._take_adapter(name, lambda: self.model.adapters.read(name, path))

    async def take_adapter(self, name: str, config: Mapping[str, Any], payloads: Sequence[str]) -> None:
        """The same for one that comes as its configuration and its tensors."""

        def read() -> Adapter:
            (payload,) = payloads
            return self.model.adapters.check(name, "__tensor__", made_lora(config, dict(deserialize(payload))))

        await self._take_adapter(name, read)

    async def _take_adapter(self, name: str, read: Callable[[], Adapter]) -> None:
        async with self._names:
            if name in self.model.adapters.loaded:
                raise ConflictError(f"LoRA with name {name} already exists. Loaded LoRAs: {sorted(self.model.adapters.loaded)}")
            adapter = await asyncio.to_thread(read)
            if self.model.adapters.hooked(adapter):
                self.model.adapters.add(adapter)  # a step under way has its adapters already, so it is not waited for
            else:
                await self.call(lambda: self.model.adapters.add(adapter))

    async def unload_adapter(self, name: str) -> None:
        """Take no new request for it, wait for those under way, drop it; raises `InvalidRequest` for an unknown name."""
        self.adapter(name)
        self._leaving.add(name)
        try:
            async with self._free:
                await self._free.wait_for(lambda: self._users[name] == 0)
            await self.call(lambda: self.model.adapters.loaded.pop(name, None))
            del self._users[name]
        finally:
            self._leaving.discard(name)


class _Ticket:
    """The latest progress of one request; what the reader missed is contained in what comes after it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._latest: Progress | None = None

    def put(self, progress: Progress) -> None:
        self._latest = progress
        self._event.set()

    async def get(self) -> Progress:
        await self._event.wait()
        self._event.clear()
        assert self._latest is not None
        return self._latest
