"""`GET /reef/events`: what happens, as server-sent events; `last-event-id` resumes exactly after the last one seen.

The stream holds no buffer of its own: it reads a page from the log, writes it, and reads on from its cursor. A slow reader
therefore costs no memory and loses nothing; it only stays behind. The log's writer thread wakes it through one flag.
"""

import asyncio
import contextlib
from collections.abc import Callable

import orjson

from reef_cli.experience.model import Event
from reef_cli.gateway.bodies import int_query
from reef_cli.gateway.context import check_scenario, facts_of
from reef_cli.gateway.deps import Deps, Route, deps_of
from reef_cli.gateway.http import Request, Response, StreamResponse

_PAGE = 200
_WRITE_TIMEOUT_S = 120.0


async def events(request: Request) -> StreamResponse:
    """Events after `last-event-id` (header, or `?after=`), from now on when there is none; `after=0.0.0` is the beginning.

    `?scenario=` keeps one scenario's; `?limit=N` ends the stream after N events, which is what scripts want.
    """
    deps = deps_of(request)
    cursor = request.headers.get("Last-Event-ID") or request.query.get("after")
    scenario = request.query.get("scenario")
    if scenario is not None:
        check_scenario(scenario)
    limit = int_query(request, "limit", 0, least=0, most=1_000_000)
    # Asked for before the headers go out: a cursor that cannot be read is a 400, not a broken stream.
    if cursor is None:
        page: list[Event] = []
        position = await asyncio.to_thread(deps.log.tip)
    else:
        page, position = await asyncio.to_thread(deps.log.events, cursor, _PAGE, scenario)
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
    if request.method == "HEAD":
        return Response(headers=headers)  # A stream without a body would never end.
    response = StreamResponse(headers=headers)
    response.headers["x-request-id"] = facts_of(request).request_id
    await response.prepare(request)
    deps.metrics.event_streams.add(1)
    try:
        await _Stream(deps, response, scenario, limit).run(page, position)
    except (ConnectionError, TimeoutError):
        pass  # The reader left, or took nothing for two minutes; it resumes from its last event.
    finally:
        deps.metrics.event_streams.add(-1)
    return response


class _Stream:
    """One reader's stream."""

    def __init__(self, deps: Deps, response: StreamResponse, scenario: str | None, limit: int) -> None:
        self._deps = deps
        self._response = response
        self._scenario = scenario
        self._left = limit or None

    async def run(self, page: list[Event], cursor: str) -> None:
        """Write pages until the reader leaves, the limit is reached or the server drains."""
        news = asyncio.Event()
        unsubscribe = self._deps.log.subscribe(_waker(news))
        try:
            # The cursor at once, so that a reader that sees no event can still resume exactly here.
            await self._write(f"id: {cursor}\n: connected\n\n".encode())
            while not self._deps.draining.active:
                if not await self._send(page):
                    return
                if not page and not await self._wait(news):
                    await self._write(b": keep-alive\n\n")
                news.clear()
                page, cursor = await asyncio.to_thread(self._deps.log.events, cursor, _PAGE, self._scenario)
        finally:
            unsubscribe()

    async def _send(self, page: list[Event]) -> bool:
        """Write a page; False when the limit is reached."""
        if self._left is not None:
            page = page[: self._left]
            self._left -= len(page)
        if page:
            await self._write(b"".join(map(frame, page)))
        return self._left is None or self._left > 0

    async def _wait(self, news: asyncio.Event) -> bool:
        """Wait for a commit, the drain, or the keep-alive; False for the keep-alive."""
        waits = [asyncio.create_task(news.wait()), asyncio.create_task(self._deps.draining.begun.wait())]
        try:
            done, _ = await asyncio.wait(waits, timeout=self._deps.options.keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
            return bool(done)
        finally:
            for wait in waits:
                wait.cancel()

    async def _write(self, data: bytes) -> None:
        await asyncio.wait_for(self._response.write(data), _WRITE_TIMEOUT_S)


def _waker(news: asyncio.Event) -> Callable[[], None]:
    """Sets the flag from the writer thread; a loop that is already closed has nobody left to wake."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(news.set)

    return wake


def frame(event: Event) -> bytes:
    """One event on the wire: `event:` is `record`, `job` or `release`; a record's data is its row in pages of records."""
    data = {"scenario": event.scenario, "at": event.at, **event.data}
    return b"".join(
        (
            b"id: ",
            event.cursor.encode(),
            b"\nevent: ",
            event.kind.encode(),
            b"\ndata: ",
            orjson.dumps(data, default=str),
            b"\n\n",
        )
    )


ROUTES: tuple[Route, ...] = (("GET", "/reef/events", events),)
