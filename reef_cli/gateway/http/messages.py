"""One request as it came in, its body as it arrives, and the two kinds of answers: whole, or written piece by piece.

Header names compare without case. Texts of headers are UTF-8; bytes that are none come as lone surrogates and leave as they
came.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from multidict import CIMultiDict, MultiDictProxy
from yarl import URL

READ_AHEAD = 1 << 18
"""Bytes of a body kept while its reader is slow; beyond that the sender waits."""
_BODYLESS = frozenset({204, 304})
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}

HeadersIn = Mapping[str, str] | Iterable[tuple[str, str]]


class Link(Protocol):
    """What messages ask of the connection they travel on."""

    transport: asyncio.Transport

    def continues(self) -> None:
        """The body is wanted: tell a client that waits to be asked for it."""
        ...

    def flow(self) -> None:
        """A body's buffer grew or was emptied."""
        ...

    async def drained(self) -> None:
        """Wait until the client has taken most of what was written. `ConnectionResetError` when it is gone."""
        ...

    def head(self, request: "Request", response: "StreamResponse", framing: str) -> bytes:
        """The answer's status line and headers; `framing` says how its body ends."""
        ...


class Body:
    """A request's body as it arrives; `done` once it is whole."""

    __slots__ = ("_error", "_link", "_parts", "_waiter", "done", "held", "length", "unasked")

    def __init__(self, link: Link, length: int | None, unasked: bool) -> None:
        self.length = length
        """What the client says it will be; None for a body in chunks."""
        self.unasked = unasked
        """Whether the client waits for `100 Continue`."""
        self.done = False
        self.held = 0
        self._link = link
        self._parts: list[bytes] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def chunk(self) -> bytes:
        """What has arrived since the last call, at least one byte; empty at the end. Raises `ConnectionResetError`."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.done:
                return b""
            self._link.continues()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.arrived()

    def arrived(self) -> bytes:
        """What has arrived since the last call, without waiting for anything."""
        parts, self._parts = self._parts, []
        held, self.held = self.held, 0
        if held > READ_AHEAD:
            self._link.flow()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def feed(self, data: bytes) -> None:
        """The connection's: more of it."""
        self._parts.append(data)
        self.held += len(data)
        if self.held > READ_AHEAD:
            self._link.flow()
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """The connection's: it is whole, or never will be."""
        self._error = error
        self.done = error is None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Request:
    """One request. `target` is as it came, `path` its part before the query, neither unquoted.

    The application leaves `facts` and `deps` here, its router `route` (the pattern that matched) and `match_info`.
    """

    __slots__ = (
        "body",
        "deps",
        "facts",
        "headers",
        "http_1_0",
        "keep",
        "link",
        "match_info",
        "method",
        "path",
        "route",
        "target",
    )

    def __init__(
        self, link: Link, method: str, target: str, headers: CIMultiDict[str], body: Body, keep: bool, http_1_0: bool
    ) -> None:
        self.link = link
        self.method = method
        self.target = target
        self.path = target if target.startswith("/") and "?" not in target and "#" not in target else _path(target)
        self.headers = headers
        self.body = body
        self.keep = keep
        """Whether the client means to use the connection again."""
        self.http_1_0 = http_1_0
        self.deps: Any = None
        self.facts: Any = None
        self.route: str | None = None
        self.match_info: Mapping[str, str] = {}

    @property
    def query_string(self) -> str:
        """What follows the question mark, as it came."""
        return self.target.partition("#")[0].partition("?")[2]

    @property
    def query(self) -> MultiDictProxy[str]:
        return URL(f"?{self.query_string}", encoded=True).query

    @property
    def host(self) -> str:
        """The address the client named, else the one it reached."""
        named = self.headers.get("Host")
        if named:
            return named
        name = self.link.transport.get_extra_info("sockname")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "localhost"

    @property
    def has_body(self) -> bool:
        """Whether a body came or may still come."""
        return self.body.held > 0 if self.body.done else self.body.length != 0

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path}>"


def _path(target: str) -> str:
    if not target.startswith("/"):
        if "://" not in target:
            return target
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target.partition("#")[0].partition("?")[0]


class StreamResponse:
    """An answer written piece by piece: `prepare`, `write` as often as there is something, `write_eof`."""

    __slots__ = ("_chunked", "_link", "_quick", "_silent", "ended", "headers", "status")

    def __init__(self, *, status: int = 200, headers: HeadersIn = ()) -> None:
        self.status = status
        self.headers: CIMultiDict[str] = CIMultiDict(headers)
        self.ended = False
        self._link: Link | None = None
        self._quick: asyncio.Transport | None = None
        self._chunked = False
        self._silent = False

    @property
    def prepared(self) -> bool:
        """Whether the headers are out."""
        return self._link is not None

    async def prepare(self, request: Request) -> None:
        """Send the headers. `ConnectionResetError` when the client is gone, as from the other writes."""
        link = request.link
        if link.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._silent = request.method == "HEAD" or self.status in _BODYLESS
        self._chunked = not (self._silent or request.http_1_0)
        if request.http_1_0 and not self._silent:
            request.keep = False  # its end is the connection's
        head = link.head(request, self, "Transfer-Encoding: chunked\r\n" if self._chunked else "")
        self._link = link
        self._quick = link.transport if self._chunked else None
        link.transport.write(head)

    async def write(self, data: bytes) -> None:
        """Send a piece; waits while the client reads slowly."""
        link = self._sure()
        if data and not self._silent:
            link.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        await link.drained()

    def write_now(self, data: bytes) -> bool:
        """Send a piece without waiting; False, and nothing was sent, unless the client has taken all that was sent before."""
        transport = self._quick
        if transport is None or transport.get_write_buffer_size() or transport.is_closing():
            return False
        if data:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def write_eof(self) -> None:
        """The answer is whole."""
        link = self._sure()
        if not self.ended:
            self.ended = True
            if self._chunked:
                link.transport.write(b"0\r\n\r\n")
        await link.drained()

    def _sure(self) -> Link:
        link = self._link
        if link is None:
            raise RuntimeError("prepare comes first")
        if link.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        return link


class Response(StreamResponse):
    """A whole answer. `text` is sent as UTF-8."""

    __slots__ = ("body",)

    def __init__(
        self,
        *,
        status: int = 200,
        body: bytes = b"",
        text: str | None = None,
        headers: HeadersIn = (),
        content_type: str | None = None,
    ) -> None:
        super().__init__(status=status, headers=headers)
        self.body = body if text is None else text.encode()
        if content_type is not None:
            self.headers["Content-Type"] = content_type if text is None else f"{content_type}; charset=utf-8"

    async def prepare(self, request: Request) -> None:
        """Send the answer, all of it."""
        link = request.link
        if link.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        head = link.head(request, self, "" if self.status in _BODYLESS else f"Content-Length: {len(self.body)}\r\n")
        self._link, self.ended = link, True
        silent = request.method == "HEAD" or self.status in _BODYLESS
        link.transport.write(head if silent else head + self.body)


Handler = Callable[[Request], Awaitable[StreamResponse]]


def status_line(status: int) -> str:
    return _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"


def spell(start: str, headers: CIMultiDict[str], rest: str) -> bytes:
    """A head: its first line, headers, and lines that are ready. `ValueError` for a header that holds a line end."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    text = "".join((start, *lines, rest, "\r\n"))
    ends = len(lines) + 2 + rest.count("\n")
    if text.count("\n") != ends or text.count("\r") != ends:
        raise ValueError("a header holds a line end")
    return text.encode("utf-8", "surrogateescape")
