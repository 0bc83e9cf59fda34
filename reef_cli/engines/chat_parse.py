"""A local model's raw text read by the conventions models are taught: reasoning first, then text and tool calls.

Reasoning is what stands in `<think>…</think>`, also where the template opened the tag. Tool calls are read only when tools were
offered, so an agent that parses its own markup keeps it: `<tool_call>{json}</tool_call>` (Hermes, Qwen), `<function=name>` with
`<parameter=name>` inside (Qwen's coders), `[TOOL_CALLS]` lists (Mistral), and bare JSON that names an offered tool (Llama).
What cannot be read stays text.
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
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^>\s]+)>(.*?)</function>(?:\s*</tool_call>)?", re.DOTALL)
_JSON_CALL = re.compile(r"(?s:.*?)<tool_call>\s*[{\[]|\s*[{\[]")
"""Calls as JSON, whose strings may hold anything."""
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

Call = Mapping[str, Any]


def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedMessage:
    """Split raw text into reasoning, content and calls; content is None when calls or reasoning are all there is."""
    reasoning, rest = _reasoning(text)
    calls: list[Call] = []
    if tools:
        offered = {
            str(one.get("name")): one.get("parameters") or {} for tool in tools for one in [tool.get("function") or tool]
        }
        rest, calls = _calls(rest, offered)
    content = rest.strip("\n") if calls or reasoning is not None else rest
    return ParsedMessage(content or (None if calls or reasoning is not None else ""), tuple(calls), reasoning)


def _reasoning(text: str) -> tuple[str | None, str]:
    opened = text.lstrip().startswith("<think>")
    if not opened and "</think>" not in text:
        return None, text
    inner = text.lstrip().removeprefix("<think>") if opened else text
    thought, closed, rest = inner.partition("</think>")
    return thought.strip(), rest.lstrip("\n") if closed else ""


def _calls(text: str, names: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[Call]]:
    if _FUNCTION.search(text) and not _JSON_CALL.match(text) and not _MISTRAL.search(text):
        found = _functions(text, names)
        if found[1]:
            return found
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


def _functions(text: str, offered: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """Calls whose parameters are written as text. The tool's schema says which of them are more than text."""
    calls: list[Call] = []

    def read(found: re.Match[str]) -> str:
        if found[1] not in offered or _PARAMETER.sub("", found[2]).strip():
            return found[0]
        kinds = offered[found[1]].get("properties") or {}
        given = {name: _typed(value, kinds.get(name)) for name, value in _PARAMETER.findall(found[2])}
        calls.append(_made(found[1], json.dumps(given, ensure_ascii=False)))
        return ""

    return _FUNCTION.sub(read, text), calls


def _typed(value: str, schema: Any) -> Any:
    """A parameter's text as what its schema asks for; text where that is asked for, or where it is no JSON."""
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        lowered = value.strip().lower()
        return {"true": True, "false": False, "none": None}.get(lowered, value)


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


def _bare(text: str, names: Mapping[str, Any]) -> tuple[str, list[Call]]:
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
    return _made(name, text)


def _made(name: str, arguments: str) -> Call:
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}
