"""HTTP/1.1 on the wire: framing, order, reuse of connections, clients that leave, stall, or send what is no request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reef_cli.gateway.http import Handler, Listener, Request, Response, StreamResponse, connection
from reef_cli.gateway.http.messages import READ_AHEAD

GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"


async def echo(request: Request) -> StreamResponse:
    """What came, as text."""
    body = b""
    while part := await request.body.chunk():
        body += part
    return Response(text=f"{request.method} {request.path} {request.query_string} {body.decode()}")


@asynccontextmanager
async def listening(handle: Handler, **more: Any) -> AsyncIterator[tuple[Listener, int]]:
    listener = Listener(handle, lambda text: Response(status=400, text=text), **more)
    port = await listener.start("127.0.0.1", 0)
    try:
        yield listener, port
    finally:
        await listener.close(0.2)
        assert not listener.connections


class Wire:
    """A client that writes and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, data: bytes = b"") -> "Wire":
        wire = cls(*await asyncio.open_connection("127.0.0.1", port))
        wire.writer.write(data)
        return wire

    async def head(self) -> tuple[str, dict[str, str]]:
        async with asyncio.timeout(5):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        return first, {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    async def answer(self) -> tuple[str, dict[str, str], bytes]:
        status, headers = await self.head()
        async with asyncio.timeout(5):
            if headers.get("transfer-encoding") == "chunked":
                return status, headers, await self._chunks()
            return status, headers, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(5):
            return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    async def slow_first(request: Request) -> StreamResponse:
        await asyncio.sleep(0.05 if request.path == "/1" else 0)
        return await echo(request)

    async with listening(slow_first) as (_, port):
        posts = [b"POST /%d?q=%d HTTP/1.1\r\nContent-Length: 1\r\n\r\n%d" % (n, n, n) for n in range(1, 6)]
        wire = await Wire.open(port, b"".join(posts))
        for number in range(1, 6):
            status, headers, body = await wire.answer()
            assert (status, body.decode()) == ("HTTP/1.1 200 OK", f"POST /{number} q={number} {number}")
            assert headers["date"].endswith("GMT") and "connection" not in headers
        await wire.close()


async def test_a_request_in_pieces_and_a_body_in_chunks() -> None:
    async with listening(echo) as (_, port):
        wire = await Wire.open(port)
        data = b"POST /a/b?c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        data += b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
        for byte in data:
            wire.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await wire.answer())[2] == b"POST /a/b c abcde"
        wire.writer.write(GET)
        assert (await wire.answer())[2] == b"GET /a  "
        await wire.close()


@pytest.mark.parametrize(
    ("request_line", "headers", "kept"),
    [
        ("GET / HTTP/1.1", "", True),
        ("GET / HTTP/1.1", "Connection: close\r\n", False),
        ("GET / HTTP/1.0", "", False),
        ("GET / HTTP/1.0", "Connection: keep-alive\r\n", True),
    ],
)
async def test_whether_a_connection_is_kept(request_line: str, headers: str, kept: bool) -> None:
    async with listening(echo) as (_, port):
        wire = await Wire.open(port, f"{request_line}\r\n{headers}\r\n".encode())
        _, found, _ = await wire.answer()
        if kept:
            assert found.get("connection", "keep-alive") == "keep-alive"
            wire.writer.write(GET)
            assert (await wire.answer())[0] == "HTTP/1.1 200 OK"
        else:
            assert found["connection"] == "close"
            assert await wire.rest() == b""
        await wire.close()


async def test_streams() -> None:
    async def stream(request: Request) -> StreamResponse:
        response = StreamResponse(headers={"Content-Type": "text/event-stream"})
        assert not response.write_now(b"early")
        await response.prepare(request)
        await response.write(b"one")
        assert response.write_now(b"") is (request.method == "GET" and not request.http_1_0)
        await response.write(b"two")
        return response

    async with listening(stream) as (_, port):
        wire = await Wire.open(port, GET + b"HEAD /a HTTP/1.1\r\n\r\n" + GET)
        assert (await wire.answer())[2] == b"onetwo"
        _, headers = await wire.head()
        assert "transfer-encoding" not in headers
        assert (await wire.answer())[2] == b"onetwo"
        await wire.close()
        old = await Wire.open(port, b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        _, headers = await old.head()
        assert headers["connection"] == "close" and "transfer-encoding" not in headers
        assert await old.rest() == b"onetwo"


async def test_answers_without_a_body() -> None:
    async def handle(request: Request) -> StreamResponse:
        return Response(status=204) if request.path == "/none" else Response(text="héllo", status=201)

    async with listening(handle) as (_, port):
        wire = await Wire.open(port, b"GET /none HTTP/1.1\r\n\r\nHEAD / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        status, headers = await wire.head()
        assert status == "HTTP/1.1 204 No Content" and "content-length" not in headers
        status, headers = await wire.head()
        assert (status, headers["content-length"]) == ("HTTP/1.1 201 Created", "6")
        assert (await wire.answer())[2] == "héllo".encode()
        await wire.close()


async def test_a_client_that_waits_is_asked_for_its_body_only_when_it_is_read() -> None:
    async def handle(request: Request) -> StreamResponse:
        return Response(status=401) if request.path == "/no" else await echo(request)

    async with listening(handle) as (_, port):
        ask = b"POST /%b HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
        wire = await Wire.open(port, ask % b"yes")
        assert (await wire.head())[0] == "HTTP/1.1 100 Continue"
        wire.writer.write(b"body")
        assert (await wire.answer())[2] == b"POST /yes  body"
        wire.writer.write(ask % b"no")
        assert (await wire.answer())[0] == "HTTP/1.1 401 Unauthorized"
        assert await wire.rest() == b"", "nobody knows whether the body comes"


async def test_an_unwanted_body_is_read_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(request: Request) -> StreamResponse:
        return Response(status=413) if request.method == "POST" else await echo(request)

    async with listening(refuse) as (listener, port):
        size = 3 * READ_AHEAD
        wire = await Wire.open(port, b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
        assert (await wire.answer())[0].startswith("HTTP/1.1 413")
        wire.writer.write(b"x" * size + GET)
        assert (await wire.answer())[2] == b"GET /a  ", "the connection stays usable"
        wire.writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
        await wire.answer()
        (held,) = listener.connections
        held.look(held.since + connection.LINGER_S - 1)
        assert len(listener.connections) == 1
        held.look(held.since + connection.LINGER_S + 1)
        assert await wire.rest() == b""


async def test_a_slow_handler_makes_its_client_wait() -> None:
    go = asyncio.Event()

    async def handle(request: Request) -> StreamResponse:
        await go.wait()
        size = 0
        while part := await request.body.chunk():
            size += len(part)
        return Response(text=str(size))

    async with listening(handle) as (listener, port):
        size = 64 * READ_AHEAD
        wire = await Wire.open(port, b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
        wire.writer.write(b"x" * size)
        await until(lambda: any(one._throttled for one in listener.connections))
        await asyncio.sleep(0.05)
        (one,) = listener.connections
        assert one._coming is not None and one._coming.body.held < 8 * READ_AHEAD
        go.set()
        assert (await wire.answer())[2] == str(size).encode()
        await wire.close()


async def test_a_slow_reader_makes_the_handler_wait() -> None:
    sent = 0

    async def flood(request: Request) -> StreamResponse:
        nonlocal sent
        response = StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            assert sent < 1000 or not response.write_now(b"x")
            sent += 1

    async with listening(flood) as (_, port):
        wire = await Wire.open(port, GET)
        await wire.head()
        seen = -1
        while seen != sent:
            seen = sent
            await asyncio.sleep(0.1)
        assert sent < 1000, "64 MB lie nowhere"
        await wire.close()


async def test_everybody_who_waits_for_a_slow_reader_goes_on() -> None:
    """The writer of a stream and its keep-alive may both wait; one of them may be cancelled."""

    async def flood(request: Request) -> StreamResponse:
        response = StreamResponse()
        await response.prepare(request)
        (one,) = listener.connections
        while not one._choked:
            response._sure().transport.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await asyncio.sleep(0)
        waiting = [asyncio.create_task(response.write(b"")) for _ in range(3)]
        await asyncio.sleep(0.05)
        waiting[1].cancel()
        choked.set()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in done] == [type(None), asyncio.CancelledError, type(None)]
        await response.write(b"the end")
        return response

    choked = asyncio.Event()
    async with listening(flood) as (listener, port):
        wire = await Wire.open(port, GET)
        await asyncio.wait_for(choked.wait(), 10)
        _, _, body = await asyncio.wait_for(wire.answer(), 20)
        assert body.endswith(b"the end")
        await wire.close()


async def test_a_client_that_leaves_cancels_its_handler() -> None:
    ends: list[str] = []
    running = asyncio.Event()

    async def handle(request: Request) -> StreamResponse:
        try:
            running.set()
            if request.method == "POST":
                return await echo(request)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return Response()

    async with listening(handle) as (_, port):
        wire = await Wire.open(port, GET)
        await running.wait()
        wire.writer.transport.abort()
        await until(lambda: ends == ["cancelled"])
        half = await Wire.open(port, b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf")
        await asyncio.sleep(0.05)
        half.writer.transport.abort()
        await until(lambda: ends == ["cancelled", "cancelled"])


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HELLO / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nA: b\n\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization : Bearer secret-token\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: secret-token\x00\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nContent-Length: -3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * connection.HEAD_LIMIT + b"\r\n\r\n",
        b"GET /" + b"x" * connection.HEAD_LIMIT + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_refused_once_and_calmly(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with listening(echo) as (_, port):
        with caplog.at_level(logging.DEBUG):
            wire = await Wire.open(port, data)
            status, headers, body = await wire.answer()
            assert status == "HTTP/1.1 400 Bad Request" and headers["connection"] == "close" and body
            assert await wire.rest() == b""
        assert "secret-token" not in caplog.text and "Traceback" not in caplog.text
        assert len([one for one in caplog.records if one.name.startswith("reef_cli")]) == 1


async def test_what_follows_a_good_request_does_not_spoil_its_answer() -> None:
    async with listening(echo) as (_, port):
        for data in (GET + b"nonsense\r\n\r\n", GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + GET):
            wire = await Wire.open(port, data)
            status, headers, body = await wire.answer()
            assert (status, body, headers["connection"]) == ("HTTP/1.1 200 OK", b"GET /a  ", "close")
            assert await wire.rest() == b""


async def test_a_body_that_stops_being_chunks_breaks_off() -> None:
    async with listening(echo) as (_, port):
        wire = await Wire.open(port, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcXX")
        assert await wire.rest() == b""


async def test_other_protocols_are_not_switched_to() -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    async with listening(echo) as (_, port):
        wire = await Wire.open(port, b"POST /1 HTTP/1.1\r\n" + upgrade + b"Content-Length: 3\r\n\r\nabc" + GET)
        assert (await wire.answer())[2] == b"POST /1  abc"
        assert (await wire.answer())[2] == b"GET /a  "
        wire.writer.write(b"POST /2 HTTP/1.1\r\n" + upgrade + b"Transfer-Encoding: chunked\r\n\r\n3\r\nab")
        await asyncio.sleep(0.02)
        wire.writer.write(b"c\r\n0\r\n\r\n")
        assert (await wire.answer())[2] == b"POST /2  abc"
        wire.writer.write((b"GET /n HTTP/1.1\r\n" + upgrade + b"\r\n") * 1500)
        for _ in range(1500):
            assert (await wire.answer())[2] == b"GET /n  "
        wire.writer.write(b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await wire.answer())[2] == b"GET /ws  "
        await wire.close()


async def test_targets() -> None:
    async def handle(request: Request) -> StreamResponse:
        return Response(text=f"{request.path} {dict(request.query)} {request.host}")

    async with listening(handle) as (_, port):
        for target, told in (
            (b"/a%20b?x=1&y=%C3%A9&x=2#f", "/a%20b {'x': '1', 'y': 'é'} h"),
            (b"http://elsewhere/c?d=+", "/c {'d': ' '} h"),
            (b"*", "* {} h"),
            (b"//a//b", "//a//b {} h"),
        ):
            wire = await Wire.open(port, b"OPTIONS %b HTTP/1.1\r\nHost: h\r\n\r\n" % target)
            assert (await wire.answer())[2].decode() == told
            await wire.close()
        wire = await Wire.open(port, b"GET / HTTP/1.1\r\n\r\n")
        assert (await wire.answer())[2].decode() == f"/ {{}} 127.0.0.1:{port}"
        await wire.close()


async def test_a_header_cannot_hold_a_line_end(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(request: Request) -> StreamResponse:
        return Response(headers={"x-a": "b\r\nx-evil: c" if request.path == "/a" else "\udce9"})

    async with listening(handle) as (_, port):
        wire = await Wire.open(port, GET)
        assert await wire.rest() == b""
        assert "a header holds a line end" in caplog.text
        wire = await Wire.open(port, b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(5):
            assert b"x-a: \xe9\r\n" in await wire.reader.readuntil(b"\r\n\r\n")
        await wire.close()


async def test_idle_connections_are_closed_in_time() -> None:
    async with listening(echo) as (listener, port):
        silent = await Wire.open(port)
        halfway = await Wire.open(port, GET + b"GET / HT")
        await halfway.answer()
        await until(lambda: len(listener.connections) == 2)
        for one in tuple(listener.connections):
            one.look(one.since + connection.IDLE_S - 1)
        assert len(listener.connections) == 2
        for one in tuple(listener.connections):
            one.look(one.since + connection.IDLE_S + 1)
        assert await silent.rest() == b"" and await halfway.rest() == b""


async def test_closing_lets_running_requests_finish_and_cancels_those_that_do_not() -> None:
    async def handle(request: Request) -> StreamResponse:
        await asyncio.sleep(0.1 if request.path == "/a" else 60)
        return Response(text="done")

    listener = Listener(handle, lambda text: Response(status=400, text=text))
    port = await listener.start("127.0.0.1", 0)
    quick, slow, idle = await Wire.open(port, GET), await Wire.open(port, b"GET / HTTP/1.1\r\n\r\n"), await Wire.open(port)
    await until(lambda: sum(one.task is not None for one in listener.connections) == 2)
    closing = asyncio.create_task(listener.close(0.5))
    assert await idle.rest() == b""
    _, headers, body = await quick.answer()
    assert (headers["connection"], body) == ("close", b"done")
    assert await slow.rest() == b""
    await closing
    with pytest.raises(OSError):
        await Wire.open(port)
