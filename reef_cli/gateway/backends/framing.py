"""Where an HTTP/1.1 answer's head and body end (RFC 9112). Pure: bytes in, bytes out, and `ValueError` for what is no HTTP."""

import re
from functools import lru_cache
from typing import NamedTuple, Protocol

from httptools import HttpParserError, HttpResponseParser

_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: (.*))?", re.DOTALL)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CHUNKED = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
"""A head for the parser, after which it takes a body in chunks and nothing behind it."""
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
    """Takes what arrives; gives the body's part of it, and whether bytes followed the body's end (None while it goes on)."""

    def feed(self, data: bytes) -> tuple[bytes, bool | None]: ...


class Counted:
    """A body of known length."""

    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: bytes) -> tuple[bytes, bool | None]:
        part = data[: self._left]
        self._left -= len(part)
        return part, (len(data) > len(part) if self._left == 0 else None)


class UntilClose:
    """A body that ends with its connection."""

    def feed(self, data: bytes) -> tuple[bytes, bool | None]:
        return data, None


class Chunked:
    """A body in chunks, undone by llhttp. Extensions and trailers are read over."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._done = False
        self.on_body = self._parts.append
        self._parser = HttpResponseParser(self)
        self._parser.feed_data(_CHUNKED)

    def on_message_complete(self) -> None:
        self._done = True

    def feed(self, data: bytes) -> tuple[bytes, bool | None]:
        surplus = False
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            if not self._done:
                raise ValueError(f"the chunks of the answer cannot be read: {error}") from error
            surplus = True
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return body, (surplus if self._done else None)


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
