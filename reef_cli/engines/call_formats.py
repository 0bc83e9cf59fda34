"""Tool calls as models write them: one reader per family, each over the whole text.

A reader returns what is not part of a call it could read, and the calls. Where JSON stands in a call the JSON itself says where
it ends, since its strings may hold any marker; what follows a call is kept, and what cannot be read stays where it was.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

Call = Mapping[str, Any]
Offered = Mapping[str, Mapping[str, Any]]
"""Schemas of the offered tools' parameters, by name."""
Read = tuple[str, list[Call]]
Reader = Callable[[str, Offered], Read]

_TAG = re.compile(r"<tool_call>\s*(?=[{\[])")
_TAG_END = re.compile(r"\s*</tool_call>")
_MISTRAL_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MISTRAL_LIST = re.compile(r"\[TOOL_CALLS\]\s*(?=[\[{])")
_MISTRAL_END = re.compile(r"\s*</s>")
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>([^<]*)<｜tool▁sep｜>(?:([^\n<{]+)\n```json)?\s*(?=\{)")
_DEEPSEEK_END = re.compile(r"\s*(?:```\s*)?(?:<｜tool▁call▁end｜>|\Z)")
_KIMI = re.compile(r"<\|tool_call_begin\|>([^<]*)<\|tool_call_argument_begin\|>\s*(?=\{)")
_KIMI_NAME = re.compile(r"\s*(?:functions\.)?(\S+?)(?::\d+)?\s*")
_KIMI_END = re.compile(r"\s*<\|tool_call_end\|>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?")
_ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_MOST_FAULTS = 50
"""Unreadable calls after which a text is read no further: a model that repeats itself must not hold up the others."""

_PYTHON_MARKS = ("<|python_start|>", "<|python_tag|>", "<|python_end|>")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def tagged(text: str, offered: Offered) -> Read:
    """Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    del offered
    return _scan(text, _TAG, _TAG_END, lambda _, value: _listed(value))


def functions(text: str, offered: Offered) -> Read:
    """`<function=name>` with `<parameter=name>` inside (Qwen's coders), or with JSON inside (Llama 3.1)."""

    def read(head: str, body: str) -> list[Call]:
        given = (
            _json(body) if body.lstrip().startswith("{") else _arguments(body, _PARAMETER, "</parameter>", offered.get(head))
        )
        return _named(head, given) if head in offered else []

    calls: list[Call] = []
    kept: list[str] = []
    at = 0
    for start, head, body, end in _enclosed(text, "<function=", ">", "</function>"):
        if found := read(head, body):
            calls += found
            before = text[at:start]
            wrapped = before.rstrip().endswith("<tool_call>")
            kept.append(before.rstrip().removesuffix("<tool_call>") if wrapped else before)
            at = end
            if wrapped and (closed := _TAG_END.match(text, end)):
                at = closed.end()
    return "".join(kept) + text[at:], calls


def paired(text: str, offered: Offered) -> Read:
    """GLM: `<tool_call>name`, then `<arg_key>` and `<arg_value>` in turn."""
    calls: list[Call] = []
    kept: list[str] = []
    at = 0
    for start, _, body, end in _enclosed(text, "<tool_call>", "", "</tool_call>"):
        name, key, more = body.partition("<arg_key>")
        if (name := name.strip()) in offered and (
            found := _named(name, _arguments(key + more, _ARGUMENT, "</arg_value>", offered[name]))
        ):
            calls += found
            kept.append(text[at:start])
            at = end
    return "".join(kept) + text[at:], calls


def _enclosed(text: str, opens: str, heads: str, closes: str) -> Iterable[tuple[int, str, str, int]]:
    """What stands between marks, first after first: where it begins, its head up to `heads`, its body, and where it ends."""
    end = 0
    while (start := text.find(opens, end)) >= 0 and (close := text.find(closes, start)) >= 0:
        inner = text[start + len(opens) : close]
        head, _, body = inner.partition(heads) if heads else ("", "", inner)
        end = close + len(closes)
        yield start, head, body, end


def _arguments(text: str, opens: re.Pattern[str], closes: str, schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Arguments written as text, one after the other; the schema says which of them are more. None where anything else stands
    between them."""
    kinds = (schema or {}).get("properties") or {}
    given: dict[str, Any] = {}
    at = 0
    while (opened := opens.match(text, at)) is not None:
        close = text.find(closes, opened.end())
        if close < 0:
            return None
        value = text[opened.end() : close]
        value = value.removesuffix("\n") if closes == "</parameter>" else value
        given[opened[1]] = _typed(value, kinds.get(opened[1]))
        at = close + len(closes)
    return given if not text[at:].strip() else None


def mistral(text: str, offered: Offered) -> Read:
    """`[TOOL_CALLS][{…}, {…}]`, and newer `[TOOL_CALLS]name[ARGS]{…}`, one after the other."""
    rest, named = _scan(text, _MISTRAL_NAMED, _MISTRAL_END, lambda head, value: _named(head[1], value))
    if named:
        return rest, named
    del offered
    return _scan(text, _MISTRAL_LIST, _MISTRAL_END, lambda _, value: _listed(value))


def deepseek(text: str, offered: Offered) -> Read:
    """V3 (`function<｜tool▁sep｜>name` and a fenced block of JSON) and V3.1 (`name<｜tool▁sep｜>{…}`) between their markers."""
    del offered
    read = _scan(text, _DEEPSEEK, _DEEPSEEK_END, lambda head, value: _named(head[2] or head[1], value))
    return _without(read, ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), "<｜tool▁call▁begin｜>")


def kimi(text: str, offered: Offered) -> Read:
    """K2: `functions.name:0` and its arguments between their markers."""
    del offered

    def named(head: re.Match[str], value: Any) -> list[Call]:
        name = _KIMI_NAME.fullmatch(head[1])
        return _named(name[1], value) if name else []

    read = _scan(text, _KIMI, _KIMI_END, named)
    for word in ("calls", "call"):
        read = _without(read, (f"<|tool_{word}_section_begin|>", f"<|tool_{word}_section_end|>"), "<|tool_call_begin|>")
    return read


def bare(text: str, offered: Offered) -> Read:
    """Llama: nothing but JSON that names offered tools, or nothing but a Python list of calls of them."""
    body = text.strip()
    for mark in _PYTHON_MARKS:
        body = body.removeprefix(mark).removesuffix(mark).strip()
    if not body.startswith(("{", "[")):
        return text, []
    found = [call for value in _documents(body) for call in _listed(value) or (None,)]
    if None in found and body.startswith("["):
        found = list(_pythonic(body))
    calls = [call for call in found if call is not None and call["function"]["name"] in offered]
    return ("", calls) if calls and len(calls) == len(found) else (text, [])


def _scan(text: str, head: re.Pattern[str], tail: re.Pattern[str], read: Callable[[re.Match[str], Any], list[Call]]) -> Read:
    """Calls that begin as `head` says and hold JSON; `tail` may close them. What `read` makes nothing of stays."""
    calls: list[Call] = []
    kept: list[str] = []
    at = faults = 0
    while faults < _MOST_FAULTS and (opened := head.search(text, at)) is not None:
        try:
            value, end = json.JSONDecoder().raw_decode(text, opened.end())
            found = read(opened, value)
        except (ValueError, RecursionError):
            found, end = [], opened.end()
        if found:
            calls.extend(found)
            kept.append(text[at : opened.start()])
            end = closed.end() if (closed := tail.match(text, end)) else end
        else:
            faults += 1
            kept.append(text[at:end])
        at = end
    return "".join(kept) + text[at:], calls


def _without(read: Read, around: tuple[str, str], call: str) -> Read:
    """The markers around all calls go when no call is left between them."""
    text, calls = read
    if not calls or call in text:
        return read
    before, begun, inside = text.partition(around[0])
    text = before + inside.lstrip() if begun else text
    inside, ended, after = text.partition(around[1])
    return inside.rstrip("\n") + after if ended else text, calls


def _documents(body: str) -> Iterable[Any]:
    """JSON values one after another, separated by blanks or semicolons; a None marks what is no JSON."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        while at < len(body) and body[at] in "; \n\t":
            at += 1


def _pythonic(body: str) -> list[Call]:
    """Calls of `[f(a=1), g(b="x")]`; none when anything in it is no such call."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(body, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_python_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> Call:
    """Raises `ValueError` where the arguments are not named, or are no plain values."""
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("no call with named arguments")
    given = {str(one.arg): _literal(one.value) for one in node.keywords if one.arg is not None}
    if len(given) != len(node.keywords):
        raise ValueError("arguments that have no name, or one twice")
    json.dumps(given, allow_nan=False)
    return made(ast.unparse(node.func), given)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("keys that are no text")
        return {str(ast.literal_eval(key)): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


def _typed(value: str, schema: Any) -> Any:
    """A parameter's text as what its schema asks for; text where that is asked for, or where it is no JSON."""
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return _WORDS.get(value.strip().lower(), value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _named(name: str, arguments: Any) -> list[Call]:
    return [made(name.strip(), arguments)] if name.strip() and isinstance(arguments, dict) else []


def _listed(value: Any) -> list[Call]:
    """Calls of an object or a list of objects; none when one of them is no call."""
    found = [_object(one) for one in (value if isinstance(value, list) else [value])]
    return [] if None in found else [call for call in found if call is not None]


def _object(raw: Any) -> Call | None:
    if not isinstance(raw, dict):
        return None
    raw = raw.get("function") if isinstance(raw.get("function"), dict) else raw
    name = raw.get("name")
    arguments = raw.get("arguments", raw.get("parameters", {}))
    if not isinstance(name, str) or not name or arguments is None:
        return None
    return made(name, arguments)


def made(name: str, arguments: Any) -> Call:
    """A call in OpenAI's shape, with an id of its own."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": text}}


def offered_of(tools: Sequence[Mapping[str, Any]]) -> Offered:
    """The offered tools' parameters by name."""
    functions = [tool.get("function") or tool for tool in tools]
    return {str(one.get("name")): one.get("parameters") or {} for one in functions}
