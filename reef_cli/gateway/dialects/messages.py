"""Anthropic messages, as Reef serves them: requests in, answers and events out.

`system` and `role: system` entries anywhere become system messages in place. A user turn with tool results becomes `tool`
messages followed by what else the person said. Thinking blocks become `reasoning_content` with their signature. A stream is
`message_start`, the content blocks one after another, `message_delta` with the stop reason and usage, `message_stop`, which
carries the receipt.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from reef_cli.core.errors import InvalidRequest, ReefError, UnsupportedField
from reef_cli.gateway.dialects.canonical import (
    Answered,
    Body,
    ChatRequest,
    Envelope,
    Fields,
    InOrder,
    Message,
    Options,
    Piece,
    Tool,
    Usage,
    compact,
    names,
    tool_call,
)
from reef_cli.gateway.errors import stream_error
from reef_cli.gateway.sse import event_frame

KNOWN = names(
    "model messages system tools tool_choice stream max_tokens temperature top_p top_k stop_sequences output_config "
    "output_format"
)
HARMLESS = names(
    "metadata context_management cache_control service_tier betas anthropic_beta inference_geo speed anthropic_version "
    "diagnostics thinking"
)
UNSIGNED = "cmVlZg=="
"""Signature of reasoning no provider signed. Clients keep a signed block as reasoning when they send it back."""

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
    "abort": "end_turn",
}


def messages_of(body: Body) -> list[Message]:
    """The conversation alone, system text first."""
    messages = _system(body.get("system"))
    turns = Fields(body).objects("messages")
    if not turns:
        raise InvalidRequest("`messages` must be a non-empty array.", param="messages")
    for index, turn in enumerate(turns):
        messages.extend(_turn(turn, f"messages[{index}]"))
    return messages


def parse(body: Body) -> ChatRequest:
    """Read a body; `InvalidRequest` names the field that is not as documented."""
    fields = Fields(body)
    messages = messages_of(body)
    choice, parallel = _tool_choice(fields.mapping("tool_choice"))
    entries = fields.objects("tools")
    tools = [_tool(entry) for entry in entries]
    config = fields.mapping("output_config") or {}
    return ChatRequest(
        dialect="messages",
        model=fields.model(),
        messages=messages,
        tools=[tool.canonical() for tool in tools if tool is not None],
        options=Options(
            max_tokens=fields.integer("max_tokens", 1),
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            top_k=fields.integer("top_k"),
            stop=fields.stop("stop_sequences"),
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=_format(config.get("format") or body.get("output_format")),
        ),
        stream=fields.flag("stream") or False,
        extra=fields.extra(KNOWN | HARMLESS),
        left_out=[
            *fields.hints(HARMLESS),
            *(f"output_config.{name}" for name in config if name != "format"),
            *(f"tools.{entry.get('type')}" for entry, tool in zip(entries, tools, strict=True) if tool is None),
        ],
    )


def _format(form: Any) -> dict[str, Any] | None:
    """The schema an answer must follow, as chat's `response_format`."""
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise UnsupportedField("This `output_config.format` cannot be served here.", param="output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"], "strict": True}}


def _system(system: Any) -> list[Message]:
    if not system:
        return []
    return [{"role": "system", "content": _text(_blocks(system, "system"), "system")}]


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise InvalidRequest(f"`{where}` must be a string or an array of content blocks.", param=where)


def _text(blocks: Sequence[Body], where: str) -> str:
    texts = []
    for block in blocks:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise UnsupportedField(f"A block of type `{block.get('type')}` cannot stand in `{where}`.", param=where)
        texts.append(block["text"])
    return "\n\n".join(texts)


def _turn(turn: dict[str, Any], where: str) -> list[Message]:
    role = turn.get("role")
    blocks = _blocks(turn.get("content"), f"{where}.content")
    if role == "assistant":
        return [_assistant(blocks, where)]
    if role == "system":
        return [{"role": "system", "content": _text(blocks, where)}]
    if role == "user":
        return _user(blocks, where)
    raise InvalidRequest(f"`{where}.role` must be user, assistant or system.", param=where)


def _user(blocks: Sequence[Body], where: str) -> list[Message]:
    out: list[Message] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            out.append(_tool_result(block, where))
        else:
            parts.append(_part(block, where))
    if parts:
        out.append({"role": "user", "content": compact(parts)})
    return out


def _tool_result(block: Body, where: str) -> Message:
    content = block.get("content")
    parts = [] if content is None else [_part(part, where) for part in _blocks(content, where)]
    message: Message = {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": compact(parts) or ""}
    if block.get("is_error"):
        message["is_error"] = True
    return message


def _part(block: Body, where: str) -> dict[str, Any]:
    """One block of a person's or a tool's words; images become `image_url` parts, everything else is kept as it is."""
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source")
    if kind == "image" and isinstance(source, dict):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if not isinstance(kind, str):
        raise InvalidRequest(f"A content block in `{where}` has no type.", param=where)
    return {name: value for name, value in block.items() if name != "cache_control"}


def _assistant(blocks: Sequence[Body], where: str) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    message: Message = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    redacted: list[str] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(str(block.get("text", "")))
            case "thinking":
                reasoning.append(str(block.get("thinking", "")))
                if block.get("signature"):
                    message["reasoning_signature"] = block["signature"]
            case "redacted_thinking":
                redacted.append(str(block.get("data", "")))
            case "tool_use":
                arguments = orjson.dumps(block.get("input") or {}).decode()
                calls.append(tool_call(str(block.get("id", "")), str(block.get("name", "")), arguments))
            case kind:
                raise UnsupportedField(f"A block of type `{kind}` cannot be read in `{where}`.", param=where)
    if texts:
        message["content"] = "".join(texts)
    extras = {"tool_calls": calls, "reasoning_content": "".join(reasoning), "redacted_thinking": redacted}
    return message | {name: value for name, value in extras.items() if value}


def _tool(entry: Body) -> Tool | None:
    """A custom tool; a provider's own server tools mean nothing elsewhere and are left out."""
    if entry.get("type", "custom") != "custom" or (entry.get("input_schema") is None and "type" in entry):
        return None
    schema = entry.get("input_schema")
    if not isinstance(entry.get("name"), str) or not isinstance(schema, dict | None):
        raise InvalidRequest("Every entry of `tools` must have a `name` and an `input_schema`.", param="tools")
    return Tool(entry["name"], entry.get("description"), schema or {"type": "object", "properties": {}})


def _tool_choice(choice: Body | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case "auto" | "none" as kind:
            return kind, parallel
        case "any":
            return "required", parallel
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    raise InvalidRequest("`tool_choice.type` must be auto, any, tool or none.", param="tool_choice")


def usage_body(usage: Usage) -> dict[str, int]:
    """Token counts in Anthropic's shape, where `input_tokens` leaves out what came from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached - usage.cache_written,
        "cache_creation_input_tokens": usage.cache_written,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }


def stop_of(answer: Answered) -> tuple[str, str | None]:
    """`(stop_reason, stop_sequence)`."""
    if answer.finish == "stop" and answer.matched:
        return "stop_sequence", answer.matched
    return _STOP_REASONS[answer.finish], None


def blocks_of(answer: Answered) -> list[dict[str, Any]]:
    """The content blocks of a whole answer."""
    blocks: list[dict[str, Any]] = [{"type": "redacted_thinking", "data": data} for data in answer.redacted]
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": answer.signature or UNSIGNED})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments_of(function)})
    return blocks


def arguments_of(function: Body) -> Any:
    """A call's arguments as an object; a model's broken JSON is kept as text under `_raw`, so that nothing is lost."""
    text = function.get("arguments") or "{}"
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"_raw": text}
    return value if isinstance(value, dict) else {"_raw": text}


def _message(envelope: Envelope, usage: Usage) -> dict[str, Any]:
    return {
        "id": envelope.id,
        "type": "message",
        "role": "assistant",
        "model": envelope.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_body(usage),
    }


def encode(envelope: Envelope, answers: Sequence[Answered]) -> dict[str, Any]:
    """A whole `message` object; the dialect knows one answer only."""
    answer = answers[0]
    reason, sequence = stop_of(answer)
    body = _message(envelope, answer.usage)
    return body | {"content": blocks_of(answer), "stop_reason": reason, "stop_sequence": sequence}


class MessagesEncoder:
    """Writes a streamed message; one content block is open at a time."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._open: str | None = None
        self._index = -1
        self._signed = False
        self._order = InOrder()

    def begin(self) -> bytes:
        message = _message(self._envelope, Usage(prompt=self._envelope.prompt_tokens))
        return event_frame("message_start", {"type": "message_start", "message": message})

    def push(self, piece: Piece) -> bytes:
        return b"".join(self._write(ready) for ready in self._order.push(piece))

    def _write(self, piece: Piece) -> bytes:
        match piece.kind:
            case "text":
                return self._switch("text", {"type": "text", "text": ""}) + self._delta("text_delta", text=piece.text)
            case "reasoning":
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._switch("thinking", block) + self._delta("thinking_delta", thinking=piece.text)
            case "signature":
                if self._open != "thinking":
                    return b""
                self._signed = True
                return self._delta("signature_delta", signature=piece.text)
            case "redacted":
                return self._switch("redacted", {"type": "redacted_thinking", "data": piece.text}, fresh=True)
            case "call":
                call: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                return self._switch("call", call, fresh=True)
            case "arguments":
                return self._delta("input_json_delta", partial_json=piece.text) if piece.text else b""

    def _switch(self, kind: str, block: dict[str, Any], fresh: bool = False) -> bytes:
        """Close the open block and open another, unless the open one is of this kind already."""
        if self._open == kind and not fresh:
            return b""
        closed = self._close()
        self._open, self._index, self._signed = kind, self._index + 1, False
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + event_frame("content_block_start", start)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking" and not self._signed:
            signed = self._delta("signature_delta", signature=UNSIGNED)
        self._open = None
        return signed + event_frame("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _delta(self, kind: str, **more: str) -> bytes:
        delta = {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **more}}
        return event_frame("content_block_delta", delta)

    def keepalive(self) -> bytes:
        return event_frame("ping", {"type": "ping"})

    def finish(self, answers: Sequence[Answered]) -> bytes:
        reason, sequence = stop_of(answers[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        closing = event_frame("message_delta", {"type": "message_delta", "delta": delta, "usage": usage_body(answers[0].usage)})
        held = b"".join(self._write(piece) for piece in self._order.rest())
        return held + self._close() + closing + event_frame("message_stop", {"type": "message_stop", **self._envelope.reef()})

    def fail(self, error: ReefError) -> bytes:
        return stream_error("messages", error, self._envelope.request_id)
