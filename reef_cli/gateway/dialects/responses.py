"""OpenAI responses, as Reef serves them: requests in, response objects and events out.

Input items become chat messages: consecutive function calls and reasoning join the assistant message they belong to. Only
function tools have a meaning outside the provider; others are left out. A namespace of function tools becomes tools named
`NAMESPACE__NAME`, and calls of them go back in the client's own two words. `previous_response_id` and item references need a
server that keeps conversations, so they are refused. A stream numbers its events; each item is added, filled, and sent whole
in `response.output_item.done`; `response.completed` (or `.incomplete`) carries the whole response and the receipt.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reef_cli.core.errors import InvalidRequest, UnsupportedField
from reef_cli.gateway.dialects.canonical import (
    Body,
    ChatRequest,
    Fields,
    Message,
    Options,
    Tool,
    compact,
    names,
    tool_call,
)

KNOWN = names(
    "model input instructions tools tool_choice stream max_output_tokens temperature top_p parallel_tool_calls "
    "reasoning text top_logprobs"
)
HARMLESS = names(
    "store include metadata client_metadata user service_tier prompt_cache_key prompt_cache_retention "
    "safety_identifier stream_options truncation max_tool_calls background"
)
_ROLES = ("user", "assistant", "system", "developer")


def messages_of(body: Body) -> list[Message]:
    """The conversation alone, instructions first."""
    return _messages(Fields(body).text("instructions"), body.get("input"))


def parse(body: Body) -> ChatRequest:
    """Read a body; `InvalidRequest` names the field that is not as documented."""
    fields = Fields(body)
    messages = messages_of(body)
    if body.get("background"):
        raise UnsupportedField("`background` cannot be served.", param="background")
    reasoning = fields.mapping("reasoning") or {}
    _refuse_logprobs(fields)
    entries = fields.objects("tools")
    tools, namespaces = _tools(entries)
    return ChatRequest(
        dialect="responses",
        model=fields.model(),
        messages=messages,
        tools=[tool.canonical() for tool in tools],
        namespaces=namespaces,
        options=Options(
            max_tokens=fields.integer("max_output_tokens", 1),
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            top_logprobs=fields.integer("top_logprobs", 0) or 0,
            tool_choice=_tool_choice(body.get("tool_choice")),
            parallel_tool_calls=fields.flag("parallel_tool_calls"),
            reasoning_effort=Fields(reasoning).text("effort"),
            response_format=_format(fields.mapping("text")),
        ),
        stream=fields.flag("stream") or False,
        include_usage=True,
        extra=fields.extra(KNOWN | HARMLESS),
        left_out=[
            *fields.hints(HARMLESS - {"include"}),
            *(f"reasoning.{name}" for name in reasoning if name != "effort"),
            *(f"text.{name}" for name in fields.mapping("text") or {} if name != "format"),
            *(f"tools.{kind}" for entry in entries if (kind := entry.get("type", "function")) not in ("function", "namespace")),
        ],
    )


def _refuse_logprobs(fields: Fields) -> None:
    """What else `include` may name are parts of tools and reasoning that only a provider of this dialect has."""
    if "message.output_text.logprobs" in fields.texts("include"):
        raise UnsupportedField("`include` of log-probs cannot be served here.", hint="Chat completions can.", param="include")


def _messages(instructions: str | None, items: Any) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise InvalidRequest("`input` must be a string or a non-empty array of items.", param="input")
    open_turn: Message | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant"):
            if open_turn is None or (kind != "function_call" and _closed(open_turn, kind)):
                open_turn = {"role": "assistant", "content": None}
                messages.append(open_turn)
            _extend(open_turn, kind, item, where)
        else:
            open_turn = None
            messages.append(_plain(kind, item, where))
    return messages


def _closed(turn: Message, kind: str) -> bool:
    """Whether a new text or reasoning item starts another assistant turn instead of adding to this one."""
    return bool(turn.get("tool_calls")) or (turn["content"] is not None and kind in ("message", "reasoning"))


def _extend(turn: Message, kind: str, item: Body, where: str) -> None:
    if kind == "function_call":
        call_id = str(item.get("call_id") or item.get("id") or "")
        call = tool_call(call_id, call_name(item), str(item.get("arguments") or "{}"))
        turn.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        parts = [*(item.get("summary") or []), *(item.get("content") or [])]
        text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if text:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    else:
        turn["content"] = _content(item.get("content"), where)


def _plain(kind: str, item: Body, where: str) -> Message:
    if kind == "message" and item.get("role") in _ROLES:
        return {"role": item["role"], "content": _content(item.get("content"), where)}
    if kind == "message":
        raise InvalidRequest(f"`{where}.role` must be one of {', '.join(_ROLES)}.", param=where)
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": _content(item.get("output"), where)}
    raise UnsupportedField(f"An input item of type `{kind}` cannot be served here.", param=where)


def _content(content: Any, where: str) -> Any:
    """Text, or canonical parts; parts other than text and images are kept for whoever can say whether they are served."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequest(f"`{where}.content` must be a string or an array of parts.", param=where)
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text", "summary_text"):
            parts.append({"type": "text", "text": str(part.get("text", ""))})
        elif kind == "refusal":
            parts.append({"type": "text", "text": str(part.get("refusal", ""))})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            parts.append(dict(part))
    return compact(parts)


def call_name(item: Body) -> str:
    """The one name of the function a call item calls, its namespace included."""
    name, namespace = str(item.get("name") or ""), item.get("namespace")
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def _tools(entries: Sequence[Body]) -> tuple[list[Tool], dict[str, tuple[str, str]]]:
    """Function tools, those of namespaces under joined names, and what the joined names stand for."""
    tools: list[Tool] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for index, entry in enumerate(entries):
        if entry.get("type") != "namespace":
            found = _tool(entry)
            tools += [found] if found is not None else []
            continue
        space, members = entry.get("name"), entry.get("tools")
        if not isinstance(space, str) or not isinstance(members, list) or not all(isinstance(one, dict) for one in members):
            raise InvalidRequest(f"The namespace `tools[{index}]` must have a `name` and an array of `tools`.", param="tools")
        for tool in filter(None, map(_tool, members)):
            joined = call_name({"namespace": space, "name": tool.name})
            namespaces[joined] = (space, tool.name)
            about = "\n\n".join(text for text in (entry.get("description"), tool.description) if isinstance(text, str) and text)
            tools.append(replace(tool, name=joined, description=about or None))
    return tools, namespaces


def _tool(entry: Body) -> Tool | None:
    if entry.get("type", "function") != "function":
        return None
    if not isinstance(entry.get("name"), str) or not isinstance(entry.get("parameters"), dict | None):
        raise InvalidRequest("Every function in `tools` must have a `name` and `parameters`.", param="tools")
    parameters = entry.get("parameters") or {"type": "object", "properties": {}}
    return Tool(entry["name"], entry.get("description"), parameters, entry.get("strict"))


def _tool_choice(choice: Any) -> str | dict[str, Any] | None:
    if choice is None or choice in ("auto", "none", "required"):
        return choice  # type: ignore[no-any-return]
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise UnsupportedField("This `tool_choice` cannot be served here.", param="tool_choice")


def _format(text: Body | None) -> dict[str, Any] | None:
    """`text.format` as chat's `response_format`; plain text is the default and says nothing."""
    form = (text or {}).get("format")
    if not isinstance(form, dict) or form.get("type") == "text":
        return None
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
    return dict(form)
