"""One client's connection: requests come in order, one is answered at a time, each in a task of its own.

When the client leaves, the task is cancelled at once, and with it the call upstream. A body that nobody wanted is read over
after the answer, for a while, so that the answer is not lost with it.
"""

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict

from reef_cli.gateway.http.messages import READ_AHEAD, Body, Request, Response, StreamResponse, spell, status_line

if TYPE_CHECKING:
    from reef_cli.gateway.http.listening import Listener

HEAD_LIMIT = 1 << 16
IDLE_S = 75.0
"""How long a client may take until its next request's head is there."""
LINGER_S = 10.0
"""How long a body that nobody wanted is read over."""
_KEEP = "Connection: keep-alive\r\n"
_CLOSE = "Connection: close\r\n"
_log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """Implements `Link`. `since` is when it last fell idle or began to read over an unwanted body."""

    transport: asyncio.Transport

    def __init__(self, listener: "Listener") -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self.since = self._loop.time()
        self.task: asyncio.Task[None] | None = None
        self._target = b""
        self._headers: list[tuple[str, str]] = []
        self._head_size = 0
        self._coming: Request | None = None
        """The request whose body arrives."""
        self._waiting: deque[Request] = deque()
        """Requests that came while another is answered."""
        self._lingering = False
        self._refused = False
        self._throttled = False
        self._resuming = False
        self._choked = False
        """Whether the client reads slower than is written."""
        self._drains: list[asyncio.Future[None]] = []
        """Who waits for that: an answer's own writer, and its keep-alive."""
        self._gone = False

    # -- what asyncio calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._listener.connections.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._gone = True
        self._listener.forget(self)
        self._parser = None
        self._waiting.clear()
        gone = ConnectionResetError("the client is gone")
        if self._coming is not None:
            self._coming.body.end(gone)
        for waiter in self._drains:
            if not waiter.done():
                waiter.set_exception(gone)
        self._drains.clear()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._choked = True

    def resume_writing(self) -> None:
        self._choked = False
        for waiter in self._drains:
            if not waiter.done():
                waiter.set_result(None)
        self._drains.clear()

    def data_received(self, data: bytes) -> None:
        while data and self._parser is not None and not self._refused:
            try:
                self._parser.feed_data(data)
                break
            except HttpParserUpgrade as upgrade:
                # No other protocol is spoken here: what follows is read as if none had been asked for.
                self._stay()
                data = data[upgrade.args[0] :]
            except HttpParserError as error:
                self._refuse(type(error).__name__, "the bytes sent are no HTTP/1.1 request")
        if self._head_size > HEAD_LIMIT and self._coming is None:
            self._refuse("too long", f"the head of the request is longer than {HEAD_LIMIT} bytes")
        if self.task is None and self._waiting and not self._lingering:
            self._begin()

    def _stay(self) -> None:
        """Parse on where the parser stopped for another protocol, which it does before the body: Java's client sends one."""
        self._parser = HttpRequestParser(self)
        request = self._coming
        if request is not None:
            length = request.body.length
            self._resuming = True
            how = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % how)
            self._resuming = False

    # -- what the parser calls -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target, self._headers, self._head_size = b"", [], 0

    def on_url(self, part: bytes) -> None:
        self._target += part
        self._head_size += len(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._coming is None:  # else it is a trailer
            self._headers.append((name.decode(), value.decode("utf-8", "surrogateescape")))
            self._head_size += len(name) + len(value)

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser is None or self._resuming:
            return
        headers = CIMultiDict(self._headers)
        old = parser.get_http_version() == "1.0"
        coding, length = headers.get("Transfer-Encoding"), headers.get("Content-Length")
        if coding is not None and coding.strip().lower() != "chunked":
            self._refuse("transfer-encoding", "the body's transfer-encoding is not supported: send it in chunks")
        unasked = not old and headers.get("Expect", "").lower() == "100-continue"
        body = Body(self, None if coding is not None else int(length or 0), unasked)
        request = Request(
            self,
            parser.get_method().decode(),
            self._target.decode("utf-8", "surrogateescape"),
            headers,
            body,
            parser.should_keep_alive(),
            old,
        )
        self._coming = request
        if self._head_size <= HEAD_LIMIT and not self._refused:
            self._waiting.append(request)

    def on_body(self, data: bytes) -> None:
        if self._coming is not None and not self._lingering:
            self._coming.body.feed(data)

    def on_message_complete(self) -> None:
        request = self._coming
        if request is None or (request.body.length != 0 and self._parser is not None and self._parser.should_upgrade()):
            return
        self._coming = None
        request.body.end()
        if self._lingering:
            self._lingering = False
            self._fall_idle(request)
        elif self.task is not None:
            self.flow()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.task = self._loop.create_task(self._serve(self._waiting.popleft()))

    async def _serve(self, request: Request) -> None:
        try:
            response = await self._listener.handle(request)
            await self._finish(request, response)
        except ConnectionError:
            self.transport.abort()
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except Exception:
            # The edge of the process: the application answers its own failures, so this one is in an answer's head or body.
            _log.exception("an answer could not be sent")
            self.transport.abort()
        finally:
            self.task = None
        self._next(request)

    async def _finish(self, request: Request, response: StreamResponse) -> None:
        if not response.prepared:
            await response.prepare(request)
        if not response.ended:
            await response.write_eof()
        elif self._choked:
            await self.drained()

    def _next(self, request: Request) -> None:
        """The answer is out: go on to the next request, read over what is left of this one, or close."""
        if self._gone or self.transport.is_closing():
            return
        if self._waiting and request.keep:
            self._begin()
            self.flow()
        elif self._refused:
            self._close()
        elif self._coming is not request:
            self._fall_idle(request)
        elif request.body.unasked:
            self._close()  # nobody knows whether the body comes
        else:
            self._lingering = True
            self.since = self._loop.time()
            request.body.held = 0
            self.flow()

    def _fall_idle(self, request: Request) -> None:
        self.since = self._loop.time()
        if request.keep and not self._listener.closing:
            self.flow()
        else:
            self._close()

    def _refuse(self, kind: str, text: str) -> None:
        """What came is no request, or not one that can be read; there is no next one on this connection."""
        if self._refused:
            return
        self._refused = True
        # Without the bytes, since headers may hold tokens; a stranger's mistake is no failure of the server.
        _log.info("a client sent what is no HTTP request: %s", kind)
        if self._coming is not None:
            self._coming.body.end(ConnectionResetError("the body broke off"))
        elif self.task is None and not self._waiting:
            response = self._listener.malformed(text)
            response.headers["Connection"] = "close"
            self.transport.write(spell(status_line(response.status), response.headers, self._framing(response)) + response.body)
            self._close()

    def _framing(self, response: Response) -> str:
        return f"Content-Length: {len(response.body)}\r\n{self._listener.date()}"

    def _close(self) -> None:
        self._parser = None
        self.transport.close()

    def look(self, now: float) -> None:
        """The listener's, from time to time: close what was idle, or read over, for too long."""
        limit = LINGER_S if self._lingering else IDLE_S
        if self.task is None and now - self.since > limit:
            self._close()

    def end(self) -> None:
        """The listener's: close unless a request is being answered."""
        if self.task is None:
            self._close()

    # -- what messages ask ---------------------------------------------------------------------------------------------

    def continues(self) -> None:
        if self._coming is not None and self._coming.body.unasked:
            self._coming.body.unasked = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def flow(self) -> None:
        """Read on, or let the client wait: for a body's reader, or for the answer to an earlier request."""
        full = bool(self._waiting) or (self._coming is not None and self._coming.body.held > READ_AHEAD)
        if full != self._throttled and not (self._gone or self.transport.is_closing()):
            self._throttled = full
            if full:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    async def drained(self) -> None:
        if self._gone or self.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if self._choked:
            waiter = self._loop.create_future()
            self._drains.append(waiter)
            await waiter

    def head(self, request: Request, response: StreamResponse, framing: str) -> bytes:
        listener = self._listener
        if listener.decorate is not None:
            listener.decorate(request, response)
        if listener.closing or (self._refused and not self._waiting):
            request.keep = False
        if not request.keep:
            framing += _CLOSE
        elif request.http_1_0:
            framing += _KEEP
        return spell(status_line(response.status), response.headers, framing + listener.date())
