"""Where an HTTP/1.1 answer's head and body end (RFC 9112). Pure: bytes in, bytes out, and `ValueError` for what is no HTTP."""

import re
from functools import lru_cache
from typing import NamedTuple, Protocol

_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: (.*))?", re.DOTALL)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_PLAIN_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_LINE_LIMIT = 1 << 14
_KNOWN_LINE = 128
"""Bytes of the longest header line that is remembered."""


class Header(NamedTuple):
    """One header; `key` is its name in lower case."""

    name: str
    value: str
    key: str


class Head(NamedTuple):
    """Status line and headers; `minor` is the protocol's minor version."""

    status: int
    reason: str
    minor: int
    headers: list[Header]


def parse_head(data: bytes) -> Head:
    """A head without the blank line that ends it."""
    first, *lines = data.split(b"\r\n")
    return Head(*_status_line(first), [_header_line(line) for line in lines])


@lru_cache(64)
def _status_line(line: bytes) -> tuple[int, str, int]:
    match = _STATUS.fullmatch(line)
    if match is None:
        raise ValueError("the answer has no status line")
    return int(match[2]), (match[3] or b"").decode("utf-8", "replace"), int(match[1])


def _header_line(line: bytes) -> Header:
    """Most lines of a provider are the same in each of its answers."""
    return _known_line(line) if len(line) <= _KNOWN_LINE else _read_line(line)


def _read_line(line: bytes) -> Header:
    name, colon, value = line.partition(b":")
    if not colon or _NAME.fullmatch(name) is None or b"\n" in value or b"\r" in value or b"\0" in value:
        raise ValueError("a header of the answer cannot be read")
    text = name.decode("ascii")
    return Header(text, value.strip(b" \t").decode("utf-8", "surrogateescape"), text.lower())


_known_line = lru_cache(512)(_read_line)


class Body(Protocol):
    """Takes what arrives; gives the body's part of it, and what followed the body's end (None while it goes on)."""

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]: ...


class Counted:
    """A body of known length."""

    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        part = data[: self._left]
        self._left -= len(part)
        return part, (data[len(part) :] if self._left == 0 else None)


class UntilClose:
    """A body that ends with its connection."""

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        return data, None


class Chunked:
    """A body in chunks. Extensions and trailers are read over."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        self._closing = 0
        """How many of the two bytes behind a chunk are still to come."""
        self._trailing = False

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        fresh = not (self._rest or self._left or self._closing or self._trailing)
        if fresh and (whole := _one_chunk(data)) is not None:
            return whole, None
        buffer = self._rest + data if self._rest else data
        self._rest = b""
        parts: list[bytes] = []
        at, size = _whole_chunks(buffer, parts) if fresh else 0, len(buffer)
        while at < size:
            if self._left:
                part = buffer[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
            elif self._closing:
                mark = b"\r\n"[2 - self._closing :][: size - at]
                if buffer[at : at + len(mark)] != mark:
                    raise ValueError("a chunk does not end where it said")
                at += len(mark)
                self._closing -= len(mark)
            else:
                end = buffer.find(b"\r\n", at)
                if end < 0:
                    self._rest = self._partial(buffer[at:])
                    break
                line, at = buffer[at:end], end + 2
                if self._trailing:
                    if not line:
                        return b"".join(parts), buffer[at:]
                else:
                    self._begin(line)
        return (parts[0] if len(parts) == 1 else b"".join(parts)), None

    def _begin(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None:
            raise ValueError("the size of a chunk cannot be read")
        self._left = int(match[1], 16)
        self._trailing = self._left == 0
        self._closing = 0 if self._trailing else 2

    @staticmethod
    def _partial(line: bytes) -> bytes:
        if len(line) > _LINE_LIMIT:
            raise ValueError("a line between chunks is too long")
        return line


def _one_chunk(data: bytes) -> bytes | None:
    """What is in `data` when it is exactly one chunk, as servers that stream events send them."""
    end = data.find(b"\r\n", 0, 18)
    if end < 1 or not (digits := data[:end]).isalnum():
        return None
    try:
        size = int(digits, 16)
    except ValueError:
        return None
    return data[end + 2 : -2] if 0 < size == len(data) - end - 4 and data.endswith(b"\r\n") else None


def _whole_chunks(data: bytes, parts: list[bytes]) -> int:
    """Take the chunks in front that came whole and without extensions, as is usual; where they end."""
    at = 0
    while (match := _PLAIN_LINE.match(data, at)) is not None:
        begin = match.end()
        end = begin + int(match[1], 16)
        if begin == end or not data.startswith(b"\r\n", end):
            break
        parts.append(data[begin:end])
        at = end + 2
    return at


def body_of(head: Head) -> tuple[Body, bool]:
    """How the body of an answer ends, and whether its connection can serve another request afterwards."""
    options: list[str] = []
    codings: list[str] = []
    lengths: set[str] = set()
    for _, value, key in head.headers:
        if key == "content-length":
            lengths.update(_words(value))
        elif key == "transfer-encoding":
            codings += _words(value)
        elif key == "connection":
            options += _words(value)
    kept = "close" not in options and (head.minor == 1 or "keep-alive" in options)
    if head.status in (204, 304):
        return Counted(0), kept
    if codings:
        # Both at once is how requests are smuggled: the chunks count, and the connection is not trusted again.
        return (Chunked(), kept and not lengths) if codings[-1] == "chunked" else (UntilClose(), False)
    if not lengths:
        return UntilClose(), False
    length, *others = lengths
    if others or not length.isascii() or not length.isdigit():
        raise ValueError("the length of the answer cannot be read")
    return Counted(int(length)), kept


def _words(value: str) -> list[str]:
    """The comma-separated words of a header, in lower case."""
    return [word for part in value.lower().split(",") if (word := part.strip())]
