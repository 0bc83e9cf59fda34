"""Which exchange continues which: hash chains over messages in a normal form. Pure functions.

Link `i` of a chain stands for the first `i` messages, so a request continues the earlier one whose whole chain is a link of
its own. The normal form drops what clients change between turns without meaning to (call ids, cache marks, billing headers,
reminders, dates and paths in the system prompt), so replayed answers meet their records by structure, not by spelling.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from struct import Struct
from typing import Any

import orjson

Message = Mapping[str, Any]

_LINK = Struct("<q")
_TEXT_PARTS = ("text", "input_text", "output_text")
_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>\s*", re.DOTALL)
_VOLATILE = re.compile(
    r"x-anthropic-billing-header:[^\n]*\n?"
    r"|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"|\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?Z?)?"
    r"|(?i:\b(?:mon|tues|wednes|thurs|fri|satur|sun)day,? "
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d{1,2},? \d{4})"
    r"|(?:/(?:home|Users|root|tmp|private|var)|[A-Z]:\\Users)[/\\][^\s\"'<>`]*"
)


def text_of(content: Any) -> str:
    """The readable text of a message's content: a string, a list of parts, or nothing."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    return "".join(
        part["text"]
        for part in content
        if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)
    )


def role_of(message: Message) -> str:
    """`developer` is `system` under another name."""
    role = message.get("role")
    if not isinstance(role, str):
        return str(role)
    return "system" if role == "developer" else role


def message_key(message: Message) -> bytes:
    """The normal form of a message as bytes: equal for what a client means to be the same message."""
    role = role_of(message)
    content = message.get("content")
    text = content if isinstance(content, str) else text_of(content)
    if role == "system":
        text = _VOLATILE.sub("", text)
    elif "<system-reminder>" in text:
        text = _REMINDER.sub("", text)
    key: list[Any] = [role, text.strip()]
    if isinstance(content, list) and (rest := [_plain(part) for part in content if not _is_text(part)]):
        key.append(rest)
    if calls := message.get("tool_calls"):
        key.append([_call(call) for call in calls])
    return orjson.dumps(key, option=orjson.OPT_SORT_KEYS)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS


def _plain(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return {name: value for name, value in part.items() if name not in ("cache_control", "id", "tool_use_id", "signature")}


def _call(call: Any) -> list[Any]:
    """Name and arguments of a tool call; arguments as JSON when they are, since clients re-encode them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ["", call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return [function.get("name"), arguments]


def digest64(data: bytes) -> int:
    """64 bits of SHA-256 as a signed integer, the form SQLite indexes best."""
    found: int = _LINK.unpack_from(sha256(data).digest())[0]
    return found


def follow(link: int, message: Message) -> int:
    """The link after `link` when `message` comes next."""
    return digest64(_LINK.pack(link) + message_key(message))


def answer_link(link: int, answer: Message | None) -> int | None:
    """The link by which a later request that replays this answer is recognised."""
    if answer is None:
        return None
    return follow(link, answer if answer.get("role") == "assistant" else {**answer, "role": "assistant"})


def links(messages: Sequence[Message], seed: int, known: Sequence[Message] = (), known_links: Sequence[int] = ()) -> list[int]:
    """The chain of `messages`: `links[i]` stands for the first `i + 1` of them.

    `known` is a conversation whose links were computed before with the same seed; what it shares is compared, not hashed
    again, which keeps the cost of a turn near that of its new messages.
    """
    shared = 0
    if known:
        for mine, theirs in zip(messages, known, strict=False):
            if mine != theirs:
                break
            shared += 1
    chain = list(known_links[:shared])
    last = chain[-1] if chain else seed
    for message in messages[shared:] if shared else messages:
        last = follow(last, message)
        chain.append(last)
    return chain


def continuation_points(messages: Sequence[Message]) -> list[int]:
    """Counts of leading messages that may be an earlier request, longest first: what stands before an answer.

    Where no answer was replayed (it was cut off), the last few user or tool messages may end one as well.
    """
    roles = [role_of(message) for message in messages]
    near = len(roles) - 8
    return [
        count
        for count in range(len(roles) - 1, 0, -1)
        if roles[count] == "assistant" or (count > near and roles[count - 1] in ("user", "tool"))
    ]
