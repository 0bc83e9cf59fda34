"""Streams made short for reading: frames that differ in their text alone become one frame with all of it.

Nearly all frames of a stream are the same but for a few words. Once the beginning and the end of one are known, the others can
be cut from theirs at once, and the texts, still as they are written in JSON, put behind each other: the frame made of them says
the same to any reader that joins texts. 200 frames take a tenth of the time that parsing each would. What differs in anything
else stays as it is. Knows no dialect: `only_text` gives the text of an event that brings nothing else, None for others.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

OnlyText = Callable[[Mapping[str, Any]], str | None]

_LEAST = 8
"""Shorter runs are not worth the look."""
_LEAST_BYTES = 1000
_TEXT = re.compile(rb'"(?:content|text|thinking|partial_json)": ?"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\.")
_BLANK = b"\n\n"
_MARK = "the text, and no other part of the event"


def condense(data: bytes, only_text: OnlyText) -> bytes:
    """The stream with its runs of text as one frame each; the same bytes where there is none to speak of."""
    if len(data) < _LEAST_BYTES or b"\r" in data:
        return data
    begin = data.rfind(_BLANK, 0, len(data) // 2)
    end = data.find(_BLANK, begin + 2)
    if begin < 0 or end < 0 or (wrapping := _wrapping(data[begin:end], only_text)) is None:
        return data
    before, after = wrapping
    texts = data.split(after + before)
    # The first text may stand in a frame that only ends like the others, the last in one that only begins like them.
    lead, led, text = texts[0].rpartition(before)
    texts[:1] = [text] if led else []
    lead = lead if led else text + after
    text, followed, trail = (texts.pop() if texts else b"").partition(after + _BLANK)
    if followed and not _quotes(text):
        texts.append(text)
        trail = _BLANK + trail
    else:
        trail = before + text + followed + trail
    if len(texts) < _LEAST or not _whole(texts):
        return data
    return b"".join((condense(lead, only_text), before, *texts, after, condense(trail, only_text)))


def _quotes(text: bytes) -> int:
    """How many quotes end or begin a string."""
    return (_ESCAPE.sub(b"", text) if b"\\" in text else text).count(b'"')


def _whole(texts: list[bytes]) -> bool:
    """Whether each is the inside of one JSON string, no more and no less."""
    joined = b'","'.join(texts)
    if _quotes(joined) != 2 * (len(texts) - 1):
        return False
    try:
        return len(orjson.loads(b'["%b"]' % joined)) == len(texts)
    except orjson.JSONDecodeError:
        return False


def _wrapping(frame: bytes, only_text: OnlyText) -> tuple[bytes, bytes] | None:
    """What stands before and after the text of a frame that has nothing but text."""
    match = _TEXT.search(frame)
    if match is None:
        return None
    before, after = frame[: match.start(1)], frame[match.end(1) :]
    try:
        event = orjson.loads((before + _MARK.encode() + after).partition(b"data: ")[2])
        return (before, after) if isinstance(event, dict) and only_text(event) == _MARK else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
