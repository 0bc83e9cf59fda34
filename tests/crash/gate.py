"""A door in front of an engine: passes everything on, but holds one chosen control call, so that processes are killed there, or
lets calls of one kind take their time."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

HOP = ("transfer-encoding", "connection", "content-length", "keep-alive")


@dataclass
class Passage:
    """One call through the door; `ended` is None while it is under way."""

    path: str
    begun: float
    ended: float | None = None
    body: bytes = b""


class Gate:
    """Listens at `url`, passes on to `target`."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.url = ""
        self.caught = threading.Event()
        self._opened = threading.Event()
        self._hold: tuple[str, int, bool] | None = None
        self._seen = 0
        self._refused: list[str] = []
        self._slow: dict[str, float] = {}
        self.calls: list[Passage] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(20)

    def hold(self, path: str, nth: int, before: bool) -> None:
        """Catch the `nth` call of `path` from now on, `before` it reaches the engine or before its answer comes back."""
        self.caught.clear()
        self._opened.clear()
        self._seen, self._hold = 0, (path, nth, before)

    def refuse(self, path: str, times: int) -> None:
        """Answer the next calls of `path` with a refusal; the engine never sees them."""
        self._refused = [path] * times

    def slow(self, path: str, seconds: float) -> None:
        """From now on each call of `path` takes so much longer, inside the engine for all that others can tell."""
        self._slow[path] = seconds

    def open(self) -> None:
        """Let through what is held, and everything after it."""
        self._hold = None
        self._slow.clear()
        self._opened.set()

    def stop(self) -> None:
        self.open()
        asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        self._ready.set()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        passage = Passage(request.path, time.monotonic())
        self.calls.append(passage)
        try:
            return await self._answer(request, passage)
        finally:
            passage.ended = time.monotonic()

    async def _answer(self, request: web.Request, passage: "Passage") -> web.StreamResponse:
        if request.path in self._refused:
            self._refused.pop()
            return web.json_response({"success": False, "message": "refused at the door"}, status=400)
        held = self._hold
        if held is not None and request.path == held[0]:
            self._seen += 1
            held = held if self._seen == held[1] else None
        else:
            held = None
        if held is not None and held[2]:
            await self._wait()
        body = passage.body = await request.read()
        await asyncio.sleep(self._slow.get(request.path, 0.0))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in (*HOP, "host")}
        try:
            async with self._session.request(
                request.method, self.target + str(request.rel_url), data=body, headers=headers, timeout=None
            ) as reply:
                answer = web.StreamResponse(
                    status=reply.status, headers={k: v for k, v in reply.headers.items() if k.lower() not in HOP}
                )
                if held is not None and not held[2]:
                    await self._wait()
                await answer.prepare(request)
                async for piece in reply.content.iter_any():
                    await answer.write(piece)
                return answer
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": f"the engine is away: {error}"}}, status=503)

    async def _wait(self) -> None:
        self.caught.set()
        await asyncio.to_thread(self._opened.wait, 300)


@contextmanager
def gate(target: str) -> Iterator[Gate]:
    made = Gate(target)
    try:
        yield made
    finally:
        made.stop()
