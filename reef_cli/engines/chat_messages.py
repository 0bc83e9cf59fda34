"""Canonical chat messages made fit for a chat template: pure functions over dicts.

Templates differ in what they take: a late system message, any system message, tools, two turns of one role. What a template
takes is probed once (`Abilities`); what it does not take is rewritten here in plain text, in the way Hermes and Qwen models
were taught: `<tools>`, `<tool_call>{json}</tool_call>`, `<tool_response>`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reef_cli.core.errors import InvalidRequest, UnsupportedField

Message = dict[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_ROLES = {"developer": "system", "function": "tool"}


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a template renders by itself."""

    system: bool
    late_system: bool
    tools: bool


def canonical(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Content as text, roles as templates know them, tool arguments as objects. Raises `UnsupportedField`, `InvalidRequest`."""
    if not messages:
        raise InvalidRequest("messages must not be empty", hint="send at least one message")
    return [_canonical(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _canonical(message: Mapping[str, Any], where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest("every message needs a role", hint='use "system", "user", "assistant" or "tool"')
    clean: Message = {"role": _ROLES.get(role, role), "content": text_of(message.get("content"), where)}
    if message.get("is_error") and "error" not in clean["content"][:80].lower():
        clean["content"] = f"Error: {clean['content']}"
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if calls:
        clean["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            clean[key] = message[key]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        clean["reasoning_content"] = reasoning
    return clean


def text_of(content: Any, where: str = "content") -> str:
    """The text of a message's content: null is empty, text parts are joined by newlines. `UnsupportedField` names `where`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type") in _TEXT_PARTS:
            texts.append(str(part.get("text") or part.get("refusal") or ""))
        else:
            raise UnsupportedField(
                f"Content of type {part.get('type')!r} in `{where}` cannot be given to this model",
                hint="send text content only",
                param=where,
            )
    return "\n".join(texts)


def _call(call: Mapping[str, Any]) -> Message:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # A model's malformed arguments are shown to it as it wrote them.
        with suppress(ValueError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    made: Message = {"type": "function", "function": {"name": function.get("name"), "arguments": arguments or {}}}
    if call.get("id"):
        made["id"] = call["id"]
    return made


def fit(messages: list[Message], tools: Sequence[Mapping[str, Any]], abilities: Abilities) -> list[Message]:
    """Rewrite what the template cannot render. Tools go along separately when it can render them."""
    if not abilities.tools:
        messages = [_plain(message) for message in messages]
        if tools:
            messages = [{"role": "system", "content": tools_text(tools)}, *messages]
    if not abilities.system or not abilities.late_system:
        messages = _gather_system(messages)
    if not abilities.system:
        messages = _system_into_user(messages)
    elif tools and not abilities.tools:
        messages = _gather_system(messages)
    return messages


def _gather_system(messages: Sequence[Message]) -> list[Message]:
    """All system text in one first message, in order."""
    texts = [message["content"] for message in messages if message["role"] == "system" and message["content"]]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest] if texts else rest


def _system_into_user(messages: list[Message]) -> list[Message]:
    """The first system message's text put before the first user message's."""
    if not messages or messages[0]["role"] != "system":
        return messages
    text, rest = messages[0]["content"], messages[1:]
    if rest and rest[0]["role"] == "user":
        return [rest[0] | {"content": f"{text}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message, for templates that insist on alternation."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] and not ({"tool_calls"} & (message.keys() | merged[-1].keys())):
            merged[-1] = merged[-1] | {"content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _plain(message: Message) -> Message:
    """Tool calls and results as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [message["content"]] if message["content"] else []
    parts += [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(parts)}


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The system text that tells a model without tool support which tools there are and how to call them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more functions to assist with the user query. The functions are:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each call, answer with a JSON object of the function's name and arguments inside <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )
