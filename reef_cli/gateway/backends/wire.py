"""HTTP/1.1 to one upstream, and nothing more than that takes: pooled connections, one request each at a time.

A general client takes more time over a request than the rest of the gateway together. This one writes the request in one
piece, reads status and headers, and hands over the body's bytes as they arrive. It never redirects, decompresses or keeps
cookies. An answer in doubt (malformed, cut short) is an error, and its connection is never used again. Knows no dialect.

A request is tried again only where the provider cannot have worked on it: when no connection could be made, with a growing
pause, and when a connection that was used before is found closed, once (RFC 9112, section 9.3.1).
"""

import asyncio
import random
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import cast

from aiohappyeyeballs import start_connection
from yarl import URL

from reef_cli.gateway.backends.framing import Body, Header, UntilClose, body_of, parse_head

_HEAD_LIMIT = 1 << 16
_READ_AHEAD = 1 << 18
"""Bytes of an answer kept while its reader is slow; beyond that the upstream waits."""
IDLE_S = 15.0
"""How long an unused connection is kept; providers close theirs after about as long."""


_PAUSES_S = (0.1, 0.4)
"""Before connecting again; each is drawn between its half and itself, so that requests do not come back together."""
_CLOSED_IDLE_S = 1.0
"""A used connection that ends this soon after a request was written, without a byte, was closed before the request came."""


class Unreachable(OSError):
    """No connection could be made."""


class BrokenOff(OSError):
    """The connection ended, or what came over it was no HTTP, before the answer was whole."""


class ClosedIdle(BrokenOff):
    """The upstream had closed a connection that waited for its next request."""


class Answer:
    """Status and headers of an answer, and its body as it comes. Close it unless it was read to its end."""

    def __init__(self, connection: "_Connection", status: int, reason: str, headers: Sequence[Header]) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.done = False
        self._connection = connection
        self._parts: list[bytes] = []
        self._held = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._forward: Callable[[bytes], bool] | None = None

    def header(self, name: str) -> str | None:
        """The first header of that (lower-case) name."""
        return next((header.value for header in self.headers if header.key == name), None)

    @property
    def content_type(self) -> str:
        """The media type alone, in lower case; empty when none is named."""
        return (self.header("content-type") or "").partition(";")[0].strip().lower()

    @property
    def spent(self) -> bool:
        """Whether the whole body came and was handed over."""
        return self.done and self._error is None and not self._parts

    async def chunk(self) -> bytes:
        """What has arrived since the last call, at least one byte; empty at the end. `BrokenOff`, `TimeoutError`."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.done:
                return b""
            self._waiter = self._connection.loop.create_future()
            await self._waiter
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._held >= _READ_AHEAD and not self.done:
            self._connection.resume()
        self._held = 0
        return data

    async def forward(self, take: Callable[[bytes], bool]) -> None:
        """Hand each piece to `take` the moment it arrives; returns when `take` says False, or at the end. Raises as `chunk`.

        `take` is called where the socket is read and must be quick. Waking a task for each piece costs as much as all the rest.
        """
        while self._parts:
            if not take(await self.chunk()):
                return
        if not self.done:
            self._forward, self._waiter = take, self._connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._forward = None
        if self._error is not None and not self._parts:
            raise self._error

    async def read(self) -> bytes:
        """The whole body. Whoever is cancelled here gives the answer up."""
        parts = []
        try:
            while part := await self.chunk():
                parts.append(part)
        except BaseException:
            self.close()
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Give the answer up: a connection that still brings bytes is closed, which is what cancels the call upstream."""
        if not self.done:
            self._connection.abort()

    def feed(self, data: bytes) -> None:
        """The connection's: more of the body."""
        if self._forward is not None:
            if not self._forward(data):
                self._forward = None
                self._wake()
            return
        self._parts.append(data)
        self._held += len(data)
        if self._held >= _READ_AHEAD:
            self._connection.pause()
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """The connection's: the body is whole, or never will be."""
        self.done, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection: nothing is under way (`_head` and `_answer` None), or a head is awaited, or a body."""

    def __init__(self, wire: "Wire") -> None:
        self.loop = asyncio.get_running_loop()
        self.since = 0.0
        self._wire = wire
        self._transport: asyncio.Transport | None = None
        self._head: asyncio.Future[Answer] | None = None
        self._answer: Answer | None = None
        self._body: Body = UntilClose()
        self._kept = False
        self._rest = b""
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._silence_s = 0.0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, silence_s: float) -> Answer:
        """Send a request; the answer's head is there when this returns."""
        assert self._transport is not None
        self._rest, self._head = b"", self.loop.create_future()
        self._silence_s, self._heard = silence_s, self.loop.time()
        if self._timer is None:
            self._timer = self.loop.call_at(self._heard + silence_s, self._look)
        head = self._head
        try:
            self._transport.write(request)
            return await head
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def pause(self) -> None:
        if self._transport is not None and self.open:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self.open:
            self._heard = self.loop.time()
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._wire.forget(self)
        if self._timer is not None:
            self._timer.cancel()
        if error is None and self._answer is not None and isinstance(self._body, UntilClose):
            self._finish(False)
        idle = self.since > 0 and not self._rest and self.loop.time() - self._heard < _CLOSED_IDLE_S
        kind = ClosedIdle if idle and self._head is not None else BrokenOff
        self._fail(kind("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        try:
            if self._answer is not None:
                self._take(data)
            elif self._head is not None:
                self._read_head(data)
            else:
                raise ValueError("bytes without a request")
        except ValueError as error:
            self._fail(BrokenOff(str(error)))
            self.abort()

    def _read_head(self, data: bytes) -> None:
        buffer = self._rest + data if self._rest else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(buffer) > _HEAD_LIMIT:
                raise ValueError("the head of the answer is too long")
            self._rest = buffer
            return
        self._rest = b""
        head, rest = parse_head(buffer[:end]), buffer[end + 4 :]
        if head.status < 200:
            if head.status == 101:
                raise ValueError("the upstream switched protocols")
            self._read_head(rest)
            return
        self._body, self._kept = body_of(head)
        assert self._head is not None
        self._answer = Answer(self, head.status, head.reason, head.headers)
        if not self._head.done():
            self._head.set_result(self._answer)
        self._head = None
        self._take(rest)

    def _take(self, data: bytes) -> None:
        assert self._answer is not None
        part, surplus = self._body.feed(data)
        if part:
            self._answer.feed(part)
        if surplus is not None:
            self._finish(surplus)

    def _finish(self, surplus: bool) -> None:
        """The answer is whole. Bytes nobody asked for spoil the connection."""
        answer, self._answer = self._answer, None
        assert answer is not None
        answer.end()
        if self._kept and not surplus and self.open:
            self._wire.release(self)
        else:
            self.close()

    def _fail(self, error: Exception) -> None:
        head, self._head = self._head, None
        if head is not None and not head.done():
            head.set_exception(error)
        if self._answer is not None:
            answer, self._answer = self._answer, None
            answer.end(error)

    def _look(self) -> None:
        """Silence beyond the limit ends the answer. While its reader is slow the upstream is not silent, it waits.

        The timer outlives the request: to set and cancel one each time would cost more than the look.
        """
        assert self._transport is not None
        self._timer = None
        if self._head is None and self._answer is None:
            return
        now = self.loop.time()
        due = self._heard + self._silence_s if self._transport.is_reading() else now + self._silence_s
        if now >= due:
            self._fail(TimeoutError("the upstream is silent"))
            self.abort()
        else:
            self._timer = self.loop.call_at(due, self._look)


class Wire:
    """The connections to one upstream. `silence_s` bounds its silence, `connect_s` the making of a connection."""

    def __init__(self, base: URL, *, silence_s: float, connect_s: float) -> None:
        self._host = base.raw_host or ""
        self._port = base.port or 80
        self._tls = ssl.create_default_context() if base.scheme == "https" else None
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._authority = host if base.is_default_port() else f"{host}:{self._port}"
        self._silence_s = silence_s
        self._connect_s = connect_s
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def ask(self, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes | None) -> Answer:
        """An answer, its head read. Raises `Unreachable`, `BrokenOff`, `TimeoutError`; `ValueError` for a broken header."""
        lines = [f"{method} {target} HTTP/1.1\r\n", f"Host: {self._authority}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in headers]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}\r\n")
        head = "".join(lines)
        if head.count("\r") != len(lines) or head.count("\n") != len(lines):
            raise ValueError("a header holds a line end")
        request = b"%b\r\n%b" % (head.encode("utf-8", "surrogateescape"), body or b"")
        connection = self._pooled()
        if connection is not None:
            self._busy.add(connection)
            try:
                return await connection.ask(request, self._silence_s)
            except ClosedIdle:
                pass
        connection = await self._connect()
        self._busy.add(connection)
        return await connection.ask(request, self._silence_s)

    def close(self) -> None:
        """Close every connection, those under way too."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    def release(self, connection: _Connection) -> None:
        """A connection is free again."""
        self._busy.discard(connection)
        connection.since = connection.loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(IDLE_S, self._sweep)

    def forget(self, connection: _Connection) -> None:
        """A connection is gone."""
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _pooled(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open and connection.loop.time() - connection.since < IDLE_S:
                return connection
            connection.close()
        return None

    def _sweep(self) -> None:
        self._sweeper = None
        loop = asyncio.get_running_loop()
        for connection in [one for one in self._idle if loop.time() - one.since >= IDLE_S]:
            self._idle.remove(connection)
            connection.close()
        if self._idle:
            self._sweeper = loop.call_later(IDLE_S, self._sweep)

    async def _connect(self) -> _Connection:
        if not self._host:
            raise Unreachable("the upstream's address names no host")
        async with asyncio.timeout(self._connect_s):
            for pause in _PAUSES_S:
                with suppress(Unreachable):
                    return await self._connect_once()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            return await self._connect_once()

    async def _connect_once(self) -> _Connection:
        try:
            loop = asyncio.get_running_loop()
            addresses = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            # Both protocol versions are tried (RFC 8305), which not every event loop does by itself.
            found = await start_connection(addresses, happy_eyeballs_delay=0.25)
            name = self._host if self._tls else None
            _, connection = await loop.create_connection(
                lambda: _Connection(self), sock=found, ssl=self._tls, server_hostname=name
            )
        except TimeoutError:
            raise
        except OSError as error:
            raise Unreachable(str(error)) from error
        return connection
