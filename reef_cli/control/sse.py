"""Reading server-sent events (WHATWG HTML, section 9.2) from a byte stream, one event at a time.

Comments and pings are consumed silently; an event without data is no event. Lines are bounded, so that a broken peer cannot
fill the memory. Knows nothing of reconnecting.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from reef_cli.core.errors import UpstreamError

_LONGEST_LINE = 4 * 1024 * 1024


class Lines(Protocol):
    """What `http.client.HTTPResponse` and `io.BytesIO` have in common."""

    def readline(self, limit: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its type (`message` by default), its data, and the cursor to resume after it (None before the first id)."""

    kind: str
    data: str
    cursor: str | None

    def json(self) -> Any:
        return json.loads(self.data)


def parse_events(stream: Lines) -> Iterator[Event]:
    """Events until the stream ends; an unfinished last event is discarded, as the standard says."""
    kind, data, cursor = "", list[str](), None
    while raw := stream.readline(_LONGEST_LINE):
        if len(raw) >= _LONGEST_LINE:
            raise UpstreamError("an event line is longer than 4 MiB", hint="is that a Reef server?")
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if data:
                yield Event(kind or "message", "\n".join(data), cursor)
            kind, data = "", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            cursor = value or None
