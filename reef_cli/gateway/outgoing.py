"""Answers on their way out: one JSON answer, or a stream of events that is never silent for long.

A stream sends its headers once, whole frames after that, and a keep-alive whenever nothing was sent for the interval.
A client that has gone surfaces as `ClientLeft` here, or as cancellation of the handler.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from reef_cli.gateway.http import Request, Response, StreamResponse

_EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeft(Exception):
    """The client closed its connection; nobody will read what comes now."""


def json_answer(payload: Any, headers: Mapping[str, str]) -> Response:
    """A whole answer written by Reef."""
    return Response(body=orjson.dumps(payload), headers={**headers, "Content-Type": "application/json"})


class EventStream:
    """A streamed answer. `keepalive` makes the frame for a silence of `interval` seconds."""

    def __init__(self, request: Request, headers: Mapping[str, str], interval: float, keepalive: Callable[[], bytes]) -> None:
        self._request = request
        self._response = StreamResponse(headers={**headers, **_EVENT_STREAM})
        self._interval = interval
        self._keepalive = keepalive
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
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

    def send_now(self, data: bytes) -> bool:
        """Write whole frames without waiting; False, and nothing was written, unless the client has taken all that was sent."""
        self._last = self._loop.time()
        return self._response.write_now(data)

    async def end(self) -> StreamResponse:
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
