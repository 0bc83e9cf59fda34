"""Answers on their way out: one JSON answer, or a stream of events that is never silent for long.

A stream sends its headers once, whole frames after that, and a keep-alive whenever nothing was sent for the interval.
A client that has gone surfaces as `ClientLeft` here, or as cancellation of the handler.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson
from aiohttp import web

_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeft(Exception):
    """The client closed its connection; nobody will read what comes now."""


def json_answer(payload: Any, headers: Mapping[str, str]) -> web.Response:
    """A whole answer written by Reef."""
    return web.Response(body=orjson.dumps(payload), headers={**headers, "Content-Type": "application/json"})


class EventStream:
    """A streamed answer. `keepalive` makes the frame for a silence of `interval` seconds."""

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], interval: float, keepalive: Callable[[], bytes]
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**headers, **_EVENT_STREAM})
        self._interval = interval
        self._keepalive = keepalive
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._chunked = False
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None

    def add_headers(self, headers: Iterable[tuple[str, str]]) -> None:
        """More headers, before `open`; those the stream has already win."""
        for name, value in headers:
            if name not in self._response.headers:
                self._response.headers.add(name, value)

    @property
    def opened(self) -> bool:
        return self._timer is not None

    async def open(self) -> None:
        """Send the headers now."""
        try:
            await self._response.prepare(self._request)
        except ConnectionError as error:
            raise ClientLeft from error
        self._last = self._loop.time()
        self._timer = self._loop.call_later(self._interval, self._look)

    async def send(self, data: bytes) -> None:
        """Write whole frames; waits while the client reads slowly."""
        if not data:
            return
        self._last = self._loop.time()
        try:
            await self._response.write(data)
        except ConnectionError as error:
            raise ClientLeft from error
        self._chunked = self._response.headers.get("Transfer-Encoding") == "chunked"

    def send_now(self, data: bytes) -> bool:
        """Write whole frames without waiting; False, and nothing was written, unless the client has taken all that was sent.

        The answer's own way to its socket costs three times as much. It is taken once before, since it carries the headers.
        """
        transport = self._request.transport
        if not self._chunked or transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        if data:
            self._last = self._loop.time()
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def end(self) -> web.StreamResponse:
        """Close the stream; safe when the client has gone."""
        self.quiet()
        # Clients may close right after the last frame.
        with contextlib.suppress(ConnectionError):
            await self._response.write_eof()
        return self._response

    def quiet(self) -> None:
        """No keep-alives any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()

    def _look(self) -> None:
        due = self._last + self._interval
        now = self._loop.time()
        if now >= due:
            self._beat = self._loop.create_task(self._send_beat())
            due = now + self._interval
        self._timer = self._loop.call_at(due, self._look)

    async def _send_beat(self) -> None:
        # A write that fails here fails for the answer's own next frame too, which reports it.
        try:
            await self.send(self._keepalive())
        except ClientLeft:
            self.quiet()
