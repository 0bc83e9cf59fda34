"""Side traffic: calls an agent makes beside its turns (titles, compaction, counts, small helpers). Pure functions.

Such calls are kept and can be reported on, but they are no turns of the agent. Recognised by what the real clients send:
no tools in a session that has them, and the purpose in the system prompt or the last message.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reef_cli.experience.chain import role_of, text_of
from reef_cli.experience.model import Role

_TOOLS = re.compile(rb'"(?:tools|functions)"\s*:\s*\[\s*[^\]\s]')
_TITLE = ("title generator", "generate a title", "generate a short title", "generate a brief title", "conversation title")
_COMPACTION = (
    "context summarization assistant",
    "summarize the conversation",
    "summarize this conversation",
    "summarize our conversation",
    "detailed summary of the conversation",
    "detailed summary of our conversation",
    "context checkpoint compaction",
    "handoff summary",
)
_COMPACTION_WITH_TOOLS = ("create a detailed summary of the conversation so far", "context checkpoint compaction")
"""Where tools are offered, a person may well ask the agent for a summary of something."""
_LEAD = 2000
"""Only this many leading characters name the purpose; agents quote all sorts of things further down."""


def has_tools(body: bytes, messages: tuple[int, int] = (0, 0)) -> bool:
    """Whether a request offers tools. A byte scan is exact enough: quotes inside JSON strings are escaped.

    `messages` is where the conversation begins and ends: nearly all of a long body, and no place for tools.
    """
    return _TOOLS.search(body, 0, messages[0]) is not None or _TOOLS.search(body, messages[1]) is not None


def classify(messages: Sequence[Mapping[str, Any]], *, tools: bool, tags: Mapping[str, str]) -> Role | None:
    """The role of an exchange; None for a turn, unless other requests of its session offer tools: then it is side traffic.

    A client that knows better says so with the tag `role`.
    """
    if tags:
        match tags.get("role"):
            case "title" | "compaction" | "count_tokens" | "side" | "turn" as said:
                return said
            case _:
                pass
    asked = _last_user(messages)
    if tools:
        return "compaction" if any(phrase in asked for phrase in _COMPACTION_WITH_TOOLS) else "turn"
    # What the system prompt says of the purpose goes before what the last message seems to ask for.
    opening = _opening(messages)
    return (_purpose(opening) if opening else None) or _purpose(asked)


def _purpose(text: str) -> Role | None:
    if "title" in text and any(phrase in text for phrase in _TITLE):
        return "title"
    if ("summar" in text or "compaction" in text) and any(phrase in text for phrase in _COMPACTION):
        return "compaction"
    return None


def _opening(messages: Sequence[Mapping[str, Any]]) -> str:
    """The head of the system prompt, and of the message after it: some clients put the task there."""
    opening = ""
    if messages and role_of(messages[0]) == "system":
        opening = text_of(messages[0].get("content"))[:_LEAD]
    if len(messages) > 1 and role_of(messages[1]) == "user":
        opening += "\n" + text_of(messages[1].get("content"))[:200]
    return opening.lower() if opening else opening


def _last_user(messages: Sequence[Mapping[str, Any]]) -> str:
    if messages and role_of(messages[-1]) == "user":
        return text_of(messages[-1].get("content"))[:400].lower()
    return ""


def summary_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """One line for lists: the last thing the user said, without control characters, at most 160 characters."""
    for message in reversed(messages):
        if role_of(message) == "user" and (text := one_line(text_of(message.get("content")))):
            return text
    return ""


def one_line(text: str, width: int = 160) -> str:
    """Text safe for a terminal: printable characters on one line."""
    line = text[: 4 * width].strip()
    head = line[: width + 1]
    if "  " not in head and head.isprintable():  # every blank but the plain one is unprintable
        line = head
    else:
        line = " ".join(line.split())
        line = "".join(character for character in line if character.isprintable())
    return line if len(line) <= width else line[: width - 1] + "…"
