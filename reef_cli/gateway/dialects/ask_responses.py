"""Asking an upstream that speaks OpenAI responses: canonical request out, its answer or its events in.

Nothing is stored there (`store: false`). Reasoning items need the provider's own ids or encrypted content to be sent back,
which other dialects do not carry, so reasoning of earlier turns is left out, as the provider itself does for finished turns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from reef_cli.core.errors import UnsupportedField, UpstreamError
from reef_cli.gateway.dialects.assembly import Assembly
from reef_cli.gateway.dialects.canonical import Answered, ChatRequest, Message, Piece, Usage, failed, no_counterpart
from reef_cli.gateway.dialects.responses import call_name
from reef_cli.gateway.sse import Event

PATH = "/v1/responses"
_UNTRANSLATABLE = (
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_p",
    "top_k",
    "logit_bias",
)


def body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The responses body of a request that came in another dialect; `UnsupportedField` names what has no counterpart."""
    options = request.options
    for name in _UNTRANSLATABLE:
        if getattr(options, name):
            raise no_counterpart(request.called(name))
    for name, neutral in (("n", 1), ("logprobs", False), ("top_logprobs", 0)):
        if getattr(options, name) != neutral:
            raise no_counterpart(request.called(name))
    asked: dict[str, Any] = {
        "max_output_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "tools": [_tool(tool) for tool in request.tools] or None,
        "tool_choice": _tool_choice(options.tool_choice) if request.tools else None,
        "parallel_tool_calls": options.parallel_tool_calls if request.tools else None,
        "reasoning": {"effort": options.reasoning_effort} if options.reasoning_effort else None,
        "text": _format(options.response_format),
        "stream": True if request.stream else None,
    }
    items = [item for index, message in enumerate(request.messages) for item in _items(message, f"messages[{index}]")]
    named = {name: value for name, value in asked.items() if value is not None}
    return {"model": model, "input": items, "store": False, **named}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    out = {"type": "function", "name": function["name"], "parameters": function.get("parameters") or {}}
    out |= {"description": function["description"]} if function.get("description") else {}
    return out | {"strict": bool(function.get("strict"))}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping):
        return {"type": "function", "name": (choice.get("function") or {}).get("name")}
    return choice


def _format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.get("type") == "json_schema":
        return {"format": {"type": "json_schema", **(form.get("json_schema") or {})}}
    return {"format": dict(form)}


def _items(message: Message, where: str) -> list[dict[str, Any]]:
    role = message["role"]
    if role in ("tool", "function"):
        said = failed(message["content"]) if message.get("is_error") else message["content"]
        output = said if isinstance(said, str) else _parts(said, "input_text", where)
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": output or ""}]
    kind = "output_text" if role == "assistant" else "input_text"
    items: list[dict[str, Any]] = []
    if message["content"]:
        items.append({"type": "message", "role": role, "content": _parts(message["content"], kind, where)})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        name, arguments = function["name"], function.get("arguments") or "{}"
        items.append({"type": "function_call", "call_id": call.get("id", ""), "name": name, "arguments": arguments})
    return items


def _parts(content: Any, kind: str, where: str) -> list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return [{"type": kind, "text": content or ""}]
    parts = []
    for part in content:
        image = part.get("image_url")
        if part.get("type") == "text":
            parts.append({"type": kind, "text": part["text"]})
        elif part.get("type") == "image_url":
            parts.append({"type": "input_image", "image_url": image.get("url") if isinstance(image, dict) else image})
        else:
            raise UnsupportedField(f"Content of type `{part.get('type')}` has no counterpart upstream.", param=where)
    return parts


def usage_of(raw: Any) -> Usage:
    """Usage of a response; absent counts are 0."""
    if not isinstance(raw, dict):
        return Usage()
    cached = (raw.get("input_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (raw.get("output_tokens_details") or {}).get("reasoning_tokens") or 0
    return Usage(raw.get("input_tokens") or 0, raw.get("output_tokens") or 0, cached, reasoning)


def read(answer: Mapping[str, Any]) -> list[Answered]:
    """The response as an answer; `UpstreamError` when it failed or is none."""
    if not isinstance(answer.get("output"), list) or answer.get("status") == "failed":
        raise UpstreamError(_error_text(answer) or "the upstream answered without output: server error there")
    assembly = Assembly()
    for index, item in enumerate(answer["output"]):
        for piece in _whole(item, index):
            assembly.push(piece)
    _close(assembly, answer)
    return [assembly.answered(usage_of(answer.get("usage")))]


def _close(assembly: Assembly, response: Mapping[str, Any]) -> None:
    reason = (response.get("incomplete_details") or {}).get("reason")
    assembly.finish = "content_filter" if reason == "content_filter" else "length" if reason else "stop"


def _error_text(response: Mapping[str, Any]) -> str:
    error = response.get("error")
    return str(error.get("message") or "") if isinstance(error, dict) else ""


def _whole(item: Mapping[str, Any], index: int) -> list[Piece]:
    match item.get("type"):
        case "message":
            parts = item.get("content") or ()
            return [Piece("text", part.get("text") or part.get("refusal") or "") for part in parts]
        case "reasoning":
            parts = [*(item.get("summary") or ()), *(item.get("content") or ())]
            return [Piece("reasoning", part.get("text") or "") for part in parts]
        case "function_call":
            call_id = item.get("call_id") or item.get("id") or ""
            call = Piece("call", number=index, id=call_id, name=call_name(item))
            return [call, Piece("arguments", item.get("arguments") or "", number=index)]
    return []


class Reader:
    """Reads the events of a streamed response. Items that came without deltas are taken from `output_item.done`."""

    def __init__(self) -> None:
        self.done = False
        self.error: UpstreamError | None = None
        self.usage: Usage | None = None
        self.response: Mapping[str, Any] = {}
        self._assembly = Assembly()
        self._told: set[int] = set()

    @property
    def finished(self) -> bool:
        return self._assembly.finish is not None

    def answers(self) -> list[Answered]:
        return [self._assembly.answered(self.usage or Usage())]

    @staticmethod
    def only_text(_: Mapping[str, Any], /) -> str | None:
        """None: events are numbered, no two are alike."""
        return None

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
        index = data.get("output_index") or 0
        match data.get("type"):
            case "response.created":
                self.response = data.get("response") or {}
            case "response.output_text.delta" | "response.refusal.delta":
                return self._told_piece(index, Piece("text", data.get("delta") or ""))
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                return self._told_piece(index, Piece("reasoning", data.get("delta") or ""))
            case "response.output_item.added" if (data.get("item") or {}).get("type") == "function_call":
                return [piece for piece in _whole(data["item"], index) if piece.kind == "call"]
            case "response.function_call_arguments.delta":
                return self._told_piece(index, Piece("arguments", data.get("delta") or "", number=index))
            case "response.output_item.done":
                return self._item(index, data.get("item") or {})
            case "response.completed" | "response.incomplete":
                self.done = True
                response = data.get("response") or {}
                self.usage = usage_of(response.get("usage"))
                _close(self._assembly, response)
            case "response.failed":
                text = _error_text(data.get("response") or {})
                self.error = UpstreamError(text or "the upstream reported an error")
            case "error":
                self.error = UpstreamError(str(data.get("message") or "the upstream reported an error"))
        return ()

    def _told_piece(self, index: int, piece: Piece) -> Sequence[Piece]:
        self._told.add(index)
        return (piece,)

    def _item(self, index: int, item: Mapping[str, Any]) -> Sequence[Piece]:
        if index in self._told:
            return ()
        pieces = _whole(item, index)
        return [piece for piece in pieces if not (piece.kind == "call" and self._assembly.knows(index))]
