"""Asking an upstream that speaks Anthropic messages: canonical request out, its answer or its events in.

The dialect wants alternating turns, tool results first in the user turn that follows, and a `max_tokens`. Reasoning goes back
only with the signature the provider gave it; unsigned reasoning would be refused there, so it is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from reef_cli.core.errors import UnsupportedField, UpstreamError
from reef_cli.gateway.dialects.assembly import Assembly
from reef_cli.gateway.dialects.canonical import Answered, ChatRequest, Finish, Message, Piece, Usage, no_counterpart, text_of
from reef_cli.gateway.dialects.messages import UNSIGNED, arguments_of
from reef_cli.gateway.sse import Event

PATH = "/v1/messages"
DEFAULT_MAX_TOKENS = 8192
"""Sent when the client named none: the dialect makes it mandatory and no model of it answers longer by default."""

_FINISH: Mapping[str, Finish] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_UNTRANSLATABLE = ("seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "response_format")


def body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The messages body of a request that came in another dialect; `UnsupportedField` names what has no counterpart."""
    options = request.options
    for name in _UNTRANSLATABLE:
        if getattr(options, name):
            raise no_counterpart(request.called(name))
    for name, neutral in (("n", 1), ("logprobs", False), ("top_logprobs", 0), ("logit_bias", {})):
        if getattr(options, name) != neutral:
            raise no_counterpart(request.called(name))
    system, turns = _turns(request.messages)
    asked: dict[str, Any] = {
        "max_tokens": options.max_tokens or DEFAULT_MAX_TOKENS,
        "system": system or None,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "stop_sequences": list(options.stop) or None,
        "tools": [_tool(tool) for tool in request.tools] or None,
        "tool_choice": _tool_choice(request) if request.tools else None,
        "stream": True if request.stream else None,
    }
    return {"model": model, "messages": turns, **{name: value for name, value in asked.items() if value is not None}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    out = {"name": function["name"], "input_schema": function.get("parameters") or {"type": "object", "properties": {}}}
    return out | ({"description": function["description"]} if function.get("description") else {})


def _tool_choice(request: ChatRequest) -> dict[str, Any] | None:
    choice, parallel = request.options.tool_choice, request.options.parallel_tool_calls
    out: dict[str, Any] | None = None
    if isinstance(choice, Mapping):
        out = {"type": "tool", "name": (choice.get("function") or {}).get("name")}
    elif choice is not None:
        out = {"type": {"required": "any"}.get(choice, choice)}
    if parallel is False and (out or {}).get("type") != "none":
        out = (out or {"type": "auto"}) | {"disable_parallel_tool_use": True}
    return out


def _turns(messages: Sequence[Message]) -> tuple[str, list[dict[str, Any]]]:
    """Leading system messages as one text, and alternating turns; later system messages stay where they stand, as user text."""
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role, where = message["role"], f"messages[{index}]"
        if role in ("system", "developer") and not turns:
            system.append(text_of(message["content"], where))
            continue
        kind = "assistant" if role == "assistant" else "user"
        blocks = _assistant(message, where) if kind == "assistant" else _user(message, where)
        if turns and turns[-1]["role"] == kind:
            turns[-1]["content"].extend(blocks)
        elif blocks:
            turns.append({"role": kind, "content": blocks})
    for turn in turns:
        if turn["role"] == "user":
            turn["content"].sort(key=lambda block: block["type"] != "tool_result")
    return "\n\n".join(text for text in system if text), turns


def _user(message: Message, where: str) -> list[dict[str, Any]]:
    if message["role"] in ("tool", "function"):
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": message.get("tool_call_id", "")}
        result["content"] = _blocks(message["content"], where)
        return [result | ({"is_error": True} if message.get("is_error") else {})]
    return _blocks(message["content"], where)


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [_block(part, where) for part in content]


def _block(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "text", "text": part["text"]}
    if part.get("type") != "image_url":
        raise UnsupportedField(
            f"Content of type `{part.get('type')}` has no counterpart in the upstream's dialect.", param=where
        )
    image = part.get("image_url")
    url = str(image.get("url") if isinstance(image, dict) else image)
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    media, _, data = url[5:].partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}


def _assistant(message: Message, where: str) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [
        {"type": "redacted_thinking", "data": data} for data in message.get("redacted_thinking") or ()
    ]
    signature = message.get("reasoning_signature")
    if signature and signature != UNSIGNED:
        # A provider may sign reasoning whose words it keeps to itself.
        blocks.append({"type": "thinking", "thinking": message.get("reasoning_content") or "", "signature": signature})
    text = text_of(message["content"], where)
    if text:
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call.get("id", ""), "name": function["name"], "input": arguments_of(function)})
    return blocks


def usage_of(raw: Any, before: Usage | None = None) -> Usage:
    """Usage of a message or of its delta, which repeats only some counts."""
    before = before or Usage()
    if not isinstance(raw, dict):
        return before
    cached = raw.get("cache_read_input_tokens")
    written = raw.get("cache_creation_input_tokens")
    cached = before.cached if cached is None else cached
    written = before.cache_written if written is None else written
    fresh = raw.get("input_tokens")
    fresh = before.prompt - before.cached - before.cache_written if fresh is None else fresh
    output = raw.get("output_tokens")
    return Usage(fresh + cached + written, before.output if output is None else output, cached, 0, written)


def read(answer: Mapping[str, Any]) -> list[Answered]:
    """The message as an answer; `UpstreamError` when it is none."""
    content = answer.get("content")
    if not isinstance(content, list):
        raise UpstreamError("the upstream answered without content: server error there")
    assembly = Assembly()
    for index, block in enumerate(content):
        for piece in _whole(block, index):
            assembly.push(piece)
    assembly.finish = _FINISH.get(answer.get("stop_reason") or "end_turn", "stop")
    assembly.matched = answer.get("stop_sequence")
    return [assembly.answered(usage_of(answer.get("usage")))]


def _whole(block: Mapping[str, Any], index: int) -> list[Piece]:
    match block.get("type"):
        case "text":
            return [Piece("text", block.get("text") or "")]
        case "thinking":
            return [Piece("reasoning", block.get("thinking") or ""), Piece("signature", block.get("signature") or "")]
        case "redacted_thinking":
            return [Piece("redacted", block.get("data") or "")]
        case "tool_use":
            call = Piece("call", number=index, id=block.get("id") or "", name=block.get("name") or "")
            return [call, Piece("arguments", orjson.dumps(block.get("input") or {}).decode(), number=index)]
    return []


_TEXTS: Mapping[str, str] = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
"""Kinds of delta that join to one text, and the name of the text in each."""


class Reader:
    """Reads the events of a streamed message."""

    def __init__(self) -> None:
        self.done = False
        self.error: UpstreamError | None = None
        self.usage: Usage | None = None
        self._assembly = Assembly()
        self._calls: dict[int, int] = {}
        self._bare: set[int] = set()

    @property
    def finished(self) -> bool:
        return self._assembly.finish is not None

    def answers(self) -> list[Answered]:
        return [self._assembly.answered(self.usage or Usage())]

    @staticmethod
    def only_text(event: Mapping[str, Any], /) -> str | None:
        text: str | None = event["delta"][_TEXTS[event["delta"]["type"]]]
        return text if event["type"] == "content_block_delta" and len(event["delta"]) == 2 else None

    def feed(self, event: Event) -> Sequence[Piece]:
        try:
            data = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            return ()
        if not isinstance(data, dict):
            return ()
        pieces = self._pieces(data)
        for piece in pieces:
            self._assembly.push(piece)
        return pieces

    def _pieces(self, data: Mapping[str, Any]) -> Sequence[Piece]:
        match data.get("type"):
            case "message_start":
                self.usage = usage_of((data.get("message") or {}).get("usage"))
            case "content_block_start":
                return self._start(data.get("index") or 0, data.get("content_block") or {})
            case "content_block_delta":
                return self._delta(data.get("index") or 0, data.get("delta") or {})
            case "content_block_stop" if (index := data.get("index") or 0) in self._bare:
                self._bare.discard(index)
                return [Piece("arguments", "{}", number=self._calls[index])]
            case "message_delta":
                delta = data.get("delta") or {}
                if delta.get("stop_reason"):
                    self._assembly.finish = _FINISH.get(delta["stop_reason"], "stop")
                self._assembly.matched = delta.get("stop_sequence")
                self.usage = usage_of(data.get("usage"), self.usage)
            case "message_stop":
                self.done = True
            case "error":
                text = (data.get("error") or {}).get("message")
                self.error = UpstreamError(str(text or "the upstream reported an error"))
        return ()

    def _start(self, index: int, block: Mapping[str, Any]) -> Sequence[Piece]:
        match block.get("type"):
            case "tool_use":
                number = self._calls[index] = len(self._calls)
                self._bare.add(index)
                call = Piece("call", number=number, id=block.get("id") or "", name=block.get("name") or "")
                if not block.get("input"):
                    return [call]
                self._bare.discard(index)
                return [call, Piece("arguments", orjson.dumps(block["input"]).decode(), number=number)]
            case "text" if block.get("text"):
                return [Piece("text", block["text"])]
            case "thinking" if block.get("thinking"):
                return [Piece("reasoning", block["thinking"])]
            case "redacted_thinking":
                return [Piece("redacted", block.get("data") or "")]
        return ()

    def _delta(self, index: int, delta: Mapping[str, Any]) -> Sequence[Piece]:
        match delta.get("type"):
            case "text_delta":
                return [Piece("text", delta.get("text") or "")]
            case "thinking_delta":
                return [Piece("reasoning", delta.get("thinking") or "")]
            case "signature_delta":
                return [Piece("signature", delta.get("signature") or "")]
            case "input_json_delta" if delta.get("partial_json"):
                self._bare.discard(index)
                return [Piece("arguments", delta["partial_json"], number=self._calls.get(index, 0))]
        return ()
