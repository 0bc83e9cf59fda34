"""The client of the upstream over real sockets: framing however it is cut, pooling, silence, back-pressure, broken answers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from reef_cli.gateway.backends.framing import Chunked, Counted, body_of, parse_head
from reef_cli.gateway.backends.wire import Answer, BrokenOff, Unreachable, Wire

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@asynccontextmanager
async def wired(serve: Serve, *, silence_s: float = 5.0) -> AsyncIterator[tuple[Wire, list[int]]]:
    """A wire to a server that treats each connection with `serve`; the list grows with every connection made."""
    made: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(1)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    wire = Wire(URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), silence_s=silence_s, connect_s=5.0)
    try:
        yield wire, made
    finally:
        wire.close()
        server.close()


def answering(*answers: bytes, gap: float = 0.0) -> Serve:
    """Each request gets all of `answers`, written apart."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await request(reader):
            for part in answers:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(gap)

    return serve


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return head + await reader.readexactly(int(length or 0))


async def get(wire: Wire) -> Answer:
    return await wire.ask("GET", "/", (), None)


async def test_a_request_is_written_as_given_and_connections_are_used_again() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await request(reader))
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)

    async with wired(serve) as (wire, made):
        for _ in range(3):
            answer = await wire.ask("POST", "/v1/x?a=b", [("X-Name", "väl")], b"body")
            assert (answer.status, await answer.read()) == (200, b"ok")
        assert len(made) == 1
    port = seen[0].partition(b"Host: ")[2].partition(b"\r\n")[0]
    assert seen[0] == (
        b"POST /v1/x?a=b HTTP/1.1\r\nHost: " + port + "\r\nX-Name: väl\r\nContent-Length: 4\r\n\r\nbody".encode()
    )


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async with wired(answering(OK, gap=0.05)) as (wire, made):
        answers = await asyncio.gather(*(get(wire) for _ in range(4)))
        assert [await answer.read() for answer in answers] == [b"ok"] * 4
        assert len(made) == 4


@pytest.mark.parametrize(
    ("answer", "body", "connections"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\nTrailer: x\r\n\r\n", b"abc", 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", 1),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", b"", 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", b"ok", 2),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", 2),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok", b"ok", 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more", b"ok", 2),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"", 2),
    ],
)
async def test_where_an_answer_ends_and_whether_its_connection_lives_on(answer: bytes, body: bytes, connections: int) -> None:
    async with wired(answering(answer)) as (wire, made):
        for _ in range(2):
            assert await (await get(wire)).read() == body
            await asyncio.sleep(0.01)
        assert len(made) == connections


async def test_a_body_may_end_with_its_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall ")
        await asyncio.sleep(0.02)
        writer.write(b"of it")

    async with wired(serve) as (wire, _):
        assert await (await get(wire)).read() == b"all of it"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nName : x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokXX0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17),
        b"",
    ],
)
async def test_an_answer_in_doubt_is_an_error(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(answer)

    async with wired(serve) as (wire, _):
        with pytest.raises(BrokenOff):
            await (await get(wire)).read()


async def test_silence_and_absence_have_errors_of_their_own() -> None:
    async with wired(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nso far"), silence_s=0.1) as (wire, _):
        answer = await get(wire)
        assert await answer.chunk() == b"so far"
        with pytest.raises(TimeoutError):
            await answer.chunk()
    async with wired(answering(b""), silence_s=0.1) as (wire, _):
        with pytest.raises(TimeoutError):
            await get(wire)
    with pytest.raises(Unreachable):
        await get(Wire(URL("http://127.0.0.1:1"), silence_s=1, connect_s=1))
    with pytest.raises(Unreachable):
        await get(Wire(URL("no-scheme"), silence_s=1, connect_s=1))


async def test_a_connection_is_tried_again_before_anything_was_sent() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        wire = Wire(URL(f"http://127.0.0.1:{port}"), silence_s=5.0, connect_s=5.0)
        asking = asyncio.ensure_future(get(wire))
        await asyncio.sleep(0.02)  # bound and not listening: connections are refused
        assert not asking.done()
        taken.listen()
        connection, _ = await asyncio.to_thread(taken.accept)
        with connection:
            assert await asyncio.to_thread(connection.recv, 1000)
            connection.sendall(OK)
            assert await (await asking).read() == b"ok"
        wire.close()


@pytest.mark.parametrize(
    ("second", "tried"),
    [
        (b"", True),
        (b"HTTP/1.1 2", False),
    ],
)
async def test_a_used_connection_found_closed_is_replaced_once_and_only_where_no_byte_came(second: bytes, tried: bool) -> None:
    asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        asked.append(1)
        writer.write(OK)
        await request(reader)
        asked.append(2)
        writer.write(second)

    async with wired(serve) as (wire, made):
        assert await (await get(wire)).read() == b"ok"
        if not tried:
            with pytest.raises(BrokenOff):
                await get(wire)
            assert asked == [1, 2]
            return
        assert await (await get(wire)).read() == b"ok"
        assert (len(made), asked) == (2, [1, 2, 1])


async def test_a_first_connection_that_breaks_is_never_asked_again() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)

    async with wired(serve) as (wire, made):
        with pytest.raises(BrokenOff):
            await get(wire)
        assert len(made) == 1


async def test_what_comes_slowly_is_not_silence() -> None:
    parts = [b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", *(b"x" for _ in range(6))]
    async with wired(answering(*parts, gap=0.25), silence_s=1.0) as (wire, _):
        assert await (await get(wire)).read() == b"xxxxxx"


async def test_a_slow_reader_holds_the_upstream_back() -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1

    async with wired(serve, silence_s=1.0) as (wire, _):
        answer = await get(wire)
        await asyncio.sleep(1.5)
        assert sent < 40, "the upstream was read far ahead of the reader"
        assert len(await answer.read()) == 64 << 20


@pytest.mark.parametrize("gap", [0.0, 0.01])
async def test_pieces_are_handed_on_as_they_come_until_the_taker_stops(gap: float) -> None:
    parts = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *(b"1\r\n%d\r\n" % n for n in range(6)), b"0\r\n\r\n"]
    async with wired(answering(*parts, gap=gap)) as (wire, made):
        answer = await get(wire)
        taken = b""

        def take(data: bytes) -> bool:
            nonlocal taken
            taken += data
            return b"3" not in taken

        await answer.forward(take)
        assert taken[:4] == b"0123" and not answer.spent
        rest = await answer.read()
        assert (taken + rest, answer.spent) == (b"012345", True)
        assert await (await get(wire)).read() == b"012345"
        assert len(made) == 1


async def test_what_is_handed_on_may_break_off() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nso")
        await asyncio.sleep(0.02)
        writer.write(b" far")

    async with wired(serve) as (wire, _):
        taken = bytearray()
        answer = await get(wire)
        with pytest.raises(BrokenOff):
            await answer.forward(lambda data: bool(taken.__iadd__(data)))
        assert taken == b"so far"


async def test_giving_an_answer_up_closes_its_connection() -> None:
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nso far")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    async with wired(serve) as (wire, _):
        (await get(wire)).close()
        await asyncio.wait_for(left.wait(), 20)
        left.clear()
        reading = asyncio.create_task((await get(wire)).read())
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.wait_for(left.wait(), 20)


async def test_bytes_nobody_asked_for_end_an_idle_connection() -> None:
    ready, left = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK)
        await ready.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    async with wired(serve) as (wire, made):
        assert await (await get(wire)).read() == b"ok"
        ready.set()
        await asyncio.wait_for(left.wait(), 20)
        assert await (await get(wire)).read() == b"ok"
        assert len(made) == 2


async def test_a_header_with_a_line_end_is_refused() -> None:
    async with wired(answering(OK)) as (wire, made):
        with pytest.raises(ValueError, match="line end"):
            await wire.ask("GET", "/", [("X", "a\r\nY: b")], None)
        assert not made


@settings(deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_chunks_come_back_however_the_bytes_are_cut(chunks: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\nnext"
    body, found, at, more = Chunked(), b"", 0, None
    for turn in range(len(wire)):
        at, before = at + cuts[turn % len(cuts)], at
        part, more = body.feed(wire[before:at])
        found += part
        if more is not None:
            break
    assert found == b"".join(chunks)
    assert more is (at > len(wire) - len(b"next"))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_no_http(data: bytes) -> None:
    for candidate in (data, b"HTTP/1.1 200 OK\r\n" + data):
        try:
            body, _ = body_of(parse_head(candidate))
        except ValueError:
            continue
        assert body.feed(b"") is not None
    assert Counted(3).feed(b"abcd") == (b"abc", True)
