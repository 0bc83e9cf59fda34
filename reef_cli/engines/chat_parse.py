"""A local model's raw text read by the conventions models are taught: reasoning first, then text and tool calls.

Reasoning is what stands in `<think>…</think>`, also where the template opened the tag. Tool calls are read only when tools were
offered, so an agent that parses its own markup keeps it: `<tool_call>{json}</tool_call>` (Hermes, Qwen), `[TOOL_CALLS]` lists
(Mistral), and bare JSON that names an offered tool (Llama). What cannot be read stays text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from reef_cli.core.ports import ParsedMessage

_OPEN_TAG = re.compile(r"<tool_call>\s*")
_CLOSE_TAG = re.compile(r"\s*</tool_call>")
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*")
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
_PYTHON_TAG = "<|python_tag|>"

Call = Mapping[str, Any]


def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedMessage:
    """Split raw text into reasoning, content and calls; content is None when calls or reasoning are all there is."""
    reasoning, rest = _reasoning(text)
    calls: list[Call] = []
    if tools:
        names = {str((tool.get("function") or tool).get("name")) for tool in tools}
        rest, calls = _calls(rest, names)
    content = rest.strip("\n") if calls or reasoning is not None else rest
    return ParsedMessage(content or (None if calls or reasoning is not None else ""), tuple(calls), reasoning)


def _reasoning(text: str) -> tuple[str | None, str]:
    opened = text.lstrip().startswith("<think>")
    if not opened and "</think>" not in text:
        return None, text
    inner = text.lstrip().removeprefix("<think>") if opened else text
    thought, closed, rest = inner.partition("</think>")
    return thought.strip(), rest.lstrip("\n") if closed else ""


def _calls(text: str, names: set[str]) -> tuple[str, list[Call]]:
    if "<tool_call>" in text:
        return _tagged(text)
    if _MISTRAL.search(text):
        return _mistral(text)
    return _bare(text, names)


def _tagged(text: str) -> tuple[str, list[Call]]:
    """Calls in tags; the JSON decides where one ends, since its strings may hold the closing tag."""
    calls: list[Call] = []
    kept: list[str] = []
    at = 0
    while (opened := _OPEN_TAG.search(text, at)) is not None:
        try:
            raw, end = json.JSONDecoder().raw_decode(text, opened.end())
        except ValueError:
            raw, end = None, opened.end()
        found = _call(raw)
        if found is None:
            kept.append(text[at:end])
        else:
            calls.append(found)
            kept.append(text[at : opened.start()])
            end = closed.end() if (closed := _CLOSE_TAG.match(text, end)) else end
        at = end
    return "".join(kept) + text[at:], calls


def _mistral(text: str) -> tuple[str, list[Call]]:
    head, *bodies = _MISTRAL.split(text)
    calls: list[Call] = []
    for body in bodies:
        named = _NAMED.match(body)
        found = (
            [{"name": named[1], "arguments": _json(body[named.end() :])}] if named else _json(body.strip().removesuffix("</s>"))
        )
        read = [_call(each) for each in (found if isinstance(found, list) else [found])]
        if not read or None in read:
            return text, []
        calls.extend(call for call in read if call is not None)
    return head, calls


def _bare(text: str, names: set[str]) -> tuple[str, list[Call]]:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith(("{", "[")):
        return text, []
    found: list[Any] = []
    for part in _documents(body):
        found.extend(part if isinstance(part, list) else [part])
    calls = [_call(each) for each in found]
    if not calls or any(call is None or call["function"]["name"] not in names for call in calls):
        return text, []
    return "", [call for call in calls if call is not None]


def _documents(body: str) -> Iterable[Any]:
    """JSON values one after another, separated by blanks or semicolons; a None marks what is no JSON."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except ValueError:
            yield None
            return
        yield value
        while at < len(body) and body[at] in "; \n\t":
            at += 1


def _json(text: str) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text.strip())[0]
    except ValueError:
        return None


def _call(raw: Any) -> Call | None:
    if not isinstance(raw, dict):
        return None
    raw = raw.get("function") if isinstance(raw.get("function"), dict) else raw
    name = raw.get("name")
    arguments = raw.get("arguments", raw.get("parameters", {}))
    if not isinstance(name, str) or not name or arguments is None:
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": text}}
