"""A provider's stream on its way to a client of the same dialect: byte for byte, with the receipt put in.

Frames go on as they complete; nothing is parsed while they do, beyond a look for the terminal frame's marker. That frame waits
until everything collected was read once and recorded. A usage chunk only Reef had asked for is taken out.
"""

from dataclasses import dataclass, field

import orjson

from reef_cli.core.errors import UpstreamError
from reef_cli.core.types import Dialect
from reef_cli.gateway import sse
from reef_cli.gateway.condense import condense
from reef_cli.gateway.dialects.ask_chat import Reader as ChatReader
from reef_cli.gateway.dialects.ask_responses import Reader as ResponsesReader
from reef_cli.gateway.dialects.assembly import StreamReader
from reef_cli.gateway.dialects.canonical import Piece
from reef_cli.gateway.dialects.chat import receipt_frame

_MARKS: dict[Dialect, tuple[bytes, ...]] = {
    "chat": (b"[DONE]",),
    "completions": (b"[DONE]",),
    "messages": (b"message_stop",),
    "responses": (b"response.completed", b"response.incomplete"),
}
_TERMINAL_TYPES = frozenset({"message_stop", "response.completed", "response.incomplete"})
_EMPTY_CHOICES = (b'"choices":[]', b'"choices": []')


def is_terminal(dialect: Dialect, frame: bytes) -> bool:
    """Whether a frame ends a whole answer."""
    if not any(mark in frame for mark in _MARKS[dialect]):
        return False
    event = sse.read(frame)
    if event is None:
        return False
    if dialect in ("chat", "completions"):
        return event.data.strip() == b"[DONE]"
    try:
        data = orjson.loads(event.data)
    except orjson.JSONDecodeError:
        return False
    return isinstance(data, dict) and data.get("type") in _TERMINAL_TYPES


def _suspect(ready: bytes, marks: tuple[bytes, ...]) -> int:
    """Where the first frame starts that may need a look, or -1. Frames before it go on unseen."""
    first = -1
    for mark in marks:
        at = ready.find(mark)
        if at >= 0 and (first < 0 or at < first):
            first = at
    if first < 0:
        return -1
    blank = -1 if b"\r" in ready else ready.rfind(b"\n\n", 0, first)
    return blank + 2 if blank >= 0 else 0


def is_usage_only(frame: bytes) -> bool:
    """Whether a chat frame brings usage and no choice."""
    if b'"usage"' not in frame or not any(mark in frame for mark in _EMPTY_CHOICES):
        return False
    event = sse.read(frame)
    try:
        data = orjson.loads(event.data) if event else None
    except orjson.JSONDecodeError:
        return False
    return isinstance(data, dict) and data.get("choices") == [] and bool(data.get("usage"))


@dataclass
class Relay:
    """Splits what arrives into what goes on now and what waits: `held` is the terminal frame and whatever follows it."""

    dialect: Dialect
    drop_usage: bool = False
    collected: list[bytes] = field(default_factory=list)
    held: bytes = b""

    def __post_init__(self) -> None:
        self._splitter = sse.Splitter()
        self._marks = _MARKS[self.dialect] + (_EMPTY_CHOICES if self.drop_usage else ())

    def feed(self, chunk: bytes) -> bytes:
        """Frames to send on now."""
        self.collected.append(chunk)
        return self._pass(self._splitter.feed(chunk))

    def end(self) -> bytes:
        """The upstream ended: a last frame without its blank line counts as one."""
        rest, self._splitter.rest = self._splitter.rest, b""
        return self._pass(rest)

    def _pass(self, ready: bytes) -> bytes:
        if not ready:
            return ready
        if self.held:
            self.held += ready
            return b""
        start = _suspect(ready, self._marks)
        if start < 0:
            return ready
        out = [ready[:start]]
        for frame in sse.frames(ready[start:]):
            if self.held or is_terminal(self.dialect, frame):
                self.held += frame
            elif not (self.drop_usage and is_usage_only(frame)):
                out.append(frame)
        return b"".join(out)

    def read(self, reader: StreamReader) -> None:
        """Let a reader see the whole stream, once."""
        data = condense(b"".join(self.collected), reader.only_text)
        if not (isinstance(reader, ChatReader) and _read_plain(reader, data)):
            feed(reader, data)

    def last(self, reader: StreamReader, receipt: str | None) -> bytes:
        """The held frames with the receipt."""
        if receipt is None:
            return self.held
        first = next(sse.frames(self.held))
        if self.dialect in ("chat", "completions"):
            assert isinstance(reader, ChatReader), "the chat dialects are read by the chat reader"
            usage = None if self.drop_usage else reader.told_usage
            return receipt_frame(reader.head, receipt, usage, sse.newline(first)) + self.held
        rest = self.held[len(first) :]
        return sse.add_member(first, "reef", {"agent_record_id": receipt}) + rest


def _read_plain(reader: ChatReader, data: bytes) -> bool:
    try:
        return reader.feed_plain(data)
    except (AttributeError, KeyError, TypeError, ValueError):
        reader.error = _unreadable()
        return True


def feed(reader: StreamReader, data: bytes) -> list[Piece]:
    """Pieces of whole frames; what is shaped like nothing known counts as the provider's error."""
    pieces: list[Piece] = []
    try:
        for event in sse.events(data):
            pieces.extend(reader.feed(event))
    except (AttributeError, KeyError, TypeError, ValueError):
        reader.error = _unreadable()
    return pieces


def _unreadable() -> UpstreamError:
    return UpstreamError("upstream connection error: the stream cannot be read")


def keepalive(dialect: Dialect, receipt: str, relay: Relay) -> bytes:
    """What breaks a silence: a comment, a ping, or `response.in_progress` with the response as it was announced."""
    if dialect in ("chat", "completions"):
        return b": keep-alive\n\n"
    if dialect == "messages":
        return sse.event_frame("ping", {"type": "ping"})
    response = announced(relay) or {"id": receipt, "object": "response", "status": "in_progress", "output": []}
    return sse.event_frame("response.in_progress", {"type": "response.in_progress", "sequence_number": 0, "response": response})


def announced(relay: Relay) -> dict[str, object]:
    """The response object of a responses stream as far as the provider announced it."""
    reader = ResponsesReader()
    for event in sse.events(b"".join(relay.collected[:4])):
        reader.feed(event)
        if reader.response:
            break
    return dict(reader.response)


def early_end() -> UpstreamError:
    return UpstreamError("upstream connection error: the stream ended early")
