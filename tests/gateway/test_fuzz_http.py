"""Any bytes in any pieces: requests give the same answers however they are cut, and what is no request harms nobody."""

import asyncio
import logging
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.gateway.http import Listener, Request, Response, StreamResponse
from reef_cli.gateway.http.connection import Connection
from tests.gateway.fuzzing import FUZZ, Calm, Tally

_DATE = re.compile(rb"Date: [^\r]*\r\n")
Names = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,12}", fullmatch=True).filter(
    lambda name: name.lower() not in ("connection", "upgrade", "expect", "te", "content-length", "transfer-encoding")
)
Values = st.from_regex(r"[!-~]{0,10}( [!-~]{1,10})?", fullmatch=True)
Bodies = st.binary(max_size=300)
ODD = (b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"\r\n", b"PRI * HTTP/2.0\r\n\r\n", b"\r\n\r\n\x00")


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A request as a client sends it, and what `told` says of it."""
    method = draw(st.sampled_from(("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")))
    path = draw(st.from_regex(r"/[a-z0-9/%?=&.~-]{0,20}", fullmatch=True))
    body = draw(Bodies)
    lines = [f"{name}: {value}" for name, value in draw(st.lists(st.tuples(Names, Values), max_size=4))]
    if draw(st.booleans()):
        lines += ["Connection: Upgrade", "Upgrade: h2c"]
    if draw(st.booleans()):
        lines.append(f"Content-Length: {len(body)}")
        sent = body
    else:
        lines.append("Transfer-Encoding: chunked")
        sizes = draw(st.lists(st.integers(1, 80), max_size=5))
        sent = b""
        rest = body
        for size in [*sizes, len(body)]:
            if part := rest[:size]:
                sent += b"%x\r\n%b\r\n" % (len(part), part)
            rest = rest[size:]
        sent += b"0\r\n\r\n"
    head = "\r\n".join((f"{method} {path} HTTP/1.1", *lines))
    return f"{head}\r\n\r\n".encode() + sent, f"{method} {path} ".encode() + body


async def told(request: Request) -> StreamResponse:
    body = b""
    while part := await request.body.chunk():
        body += part
    return Response(body=f"{request.method} {request.target} ".encode() + body)


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.out = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.out += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    calm = Calm()
    logging.getLogger().addHandler(calm)
    with asyncio.Runner() as made:
        yield made
    logging.getLogger().removeHandler(calm)
    calm.check()


async def answered(pieces: list[bytes]) -> tuple[bytes, bool]:
    """What a connection writes for these pieces, and whether it closed itself."""
    listener = Listener(told, lambda text: Response(status=400, text=text))
    connection, transport = Connection(listener), Transport()
    connection.connection_made(transport)
    for piece in pieces:
        if not transport.closed:
            connection.data_received(piece)
        await asyncio.sleep(0)
    for _ in range(200):
        if connection.task is None:
            break
        await asyncio.sleep(0)
    closed = transport.closed
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return _DATE.sub(b"", transport.out), closed


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


@FUZZ
@given(st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(0, 4000), max_size=30))
def test_pieces_do_not_matter(runner: asyncio.Runner, tally: Tally, sent: list[tuple[bytes, bytes]], places: list[int]) -> None:
    expected = b"".join(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text) for _, text in sent)
    out, closed = runner.run(answered(cut(b"".join(data for data, _ in sent), places)))
    tally.add("http", 200)
    assert (out, closed) == (expected, False)


@FUZZ
@given(
    st.lists(requests(), max_size=2),
    st.binary(max_size=80) | st.sampled_from(ODD),
    st.lists(st.integers(0, 4000), max_size=10),
    st.integers(0, 4000),
)
def test_garbage_spoils_only_what_follows_it(
    runner: asyncio.Runner, tally: Tally, sent: list[tuple[bytes, bytes]], garbage: bytes, places: list[int], at: int
) -> None:
    """Whole requests before the garbage are answered; what is written after them is one refusal at most, and the end."""
    good = b"".join(data for data, _ in sent)
    expected = b"".join(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text) for _, text in sent)
    out, _ = runner.run(answered(cut(good + garbage, places)))
    plain = out.replace(b"Connection: close\r\n", b"")
    assert plain.startswith(expected) or not sent, (out, expected)
    assert out.count(b"HTTP/1.1 400") - good.count(b"HTTP/1.1 400") <= 1
    tally.add("http", 400)
    # In the middle of a request too: nothing fails but that request.
    spoilt = good[: at % (len(good) + 1)] + garbage + good[at % (len(good) + 1) :]
    out, _ = runner.run(answered(cut(spoilt, places)))
    assert b"HTTP/1.1 5" not in out
