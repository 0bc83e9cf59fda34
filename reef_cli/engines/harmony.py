"""The channels of gpt-oss: one answer is several messages, each with a header that says to whom it goes.

`analysis` is reasoning, `final` and unaddressed `commentary` are content, and what is addressed to an offered function is its
call. A message that cannot be read stays text, header and all.
"""

import json
import re

from reef_cli.core.ports import ParsedMessage
from reef_cli.engines.call_formats import Call, Offered, made

_OPENERS = ("<|channel|>", "<|start|>")
_HEADER = re.compile(r"(?:<\|start\|>([^<]*))?(?:<\|channel\|>([^<]*))?(?:<\|constrain\|>[^<]*)?<\|message\|>")
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_TO = re.compile(r"\bto=(?:functions\.)?(\S+)")


def speaks(text: str) -> bool:
    """Whether a text is in channels."""
    return text.lstrip().startswith(_OPENERS)


def parse(text: str, offered: Offered) -> ParsedMessage:
    """The message of a text in channels."""
    thoughts: list[str] = []
    said: list[str] = []
    calls: list[Call] = []
    at = 0
    while (header := _HEADER.search(text, at)) is not None:
        said.append(text[at : header.start()].strip())
        ended = _END.search(text, header.end())
        body = text[header.end() : ended.start() if ended else len(text)]
        end = ended.end() if ended else len(text)
        channel = (header[2] or "").split()
        to = _TO.search(f"{header[1] or ''} {header[2] or ''}")
        call = _call(to[1], body, offered) if to else None
        if call is not None:
            calls.append(call)
        elif to is not None:
            said.append(text[header.start() : end])
        elif channel[:1] == ["analysis"]:
            thoughts.append(body.strip())
        else:
            said.append(body.strip("\n"))
        at = end
    said.append(text[at:])
    content = "\n\n".join(part for part in said if part) or None
    return ParsedMessage(content, tuple(calls), "\n\n".join(thoughts) if thoughts else None)


def _call(name: str, body: str, offered: Offered) -> Call | None:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return made(name, given) if name in offered and isinstance(given, dict) else None
