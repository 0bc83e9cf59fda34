"""The sockets that listen, and all connections made through them."""

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate

from reef_cli.gateway.http.connection import Connection
from reef_cli.gateway.http.messages import Handler, Request, Response, StreamResponse

_LOOK_EVERY_S = 5.0
Decorate = Callable[[Request, StreamResponse], None]
"""Adds headers to an answer as it goes out."""


class Listener:
    """Hands each request to `handle`, which answers its own failures. `malformed` answers what is no request."""

    def __init__(self, handle: Handler, malformed: Callable[[str], Response], decorate: Decorate | None = None) -> None:
        self.handle = handle
        self.malformed = malformed
        self.decorate = decorate
        self.connections: set[Connection] = set()
        self.closing = False
        self._server: asyncio.Server | None = None
        self._looker: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self._second = 0
        self._date = ""

    async def start(self, host: str, port: int, backlog: int = 1024) -> int:
        """Listen; the port, which the system chooses when 0 is given. `OSError` when that is not possible."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=backlog)
        self._looker = loop.call_later(_LOOK_EVERY_S, self._look)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, timeout_s: float) -> None:
        """Listen no more, let running requests finish for `timeout_s` seconds, then cancel them."""
        self.closing = True
        if self._looker is not None:
            self._looker.cancel()
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.end()
        tasks = self._running()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        tasks = self._running()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for connection in tuple(self.connections):
            connection.transport.abort()
        while self.connections:
            self._gone.clear()
            await self._gone.wait()
        if self._server is not None:
            await self._server.wait_closed()

    def forget(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        self._gone.set()

    def date(self) -> str:
        """The `Date` header of this second."""
        now = int(time.time())
        if now != self._second:
            self._second, self._date = now, f"Date: {formatdate(now, usegmt=True)}\r\n"
        return self._date

    def _running(self) -> list[asyncio.Task[None]]:
        return [connection.task for connection in self.connections if connection.task is not None]

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in tuple(self.connections):
            connection.look(now)
        self._looker = loop.call_later(_LOOK_EVERY_S, self._look)
