"""Answers in OpenAI's responses dialect: whole response objects, and the event sequence of a stream.

Reasoning is a `reasoning` item with one summary part, text a `message` item with one `output_text` part, each call its own
`function_call` item. Item ids are made from the response's id and the item's place.
"""

from collections.abc import Sequence
from typing import Any

from reef_cli.core.errors import ReefError
from reef_cli.gateway.dialects.canonical import Answered, ChatRequest, Envelope, InOrder, Piece, Usage
from reef_cli.gateway.errors import stream_error
from reef_cli.gateway.sse import event_frame

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts in the responses shape."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }


def _response(envelope: Envelope, request: ChatRequest, status: str, output: Sequence[Any]) -> dict[str, Any]:
    parallel = request.options.parallel_tool_calls
    return {
        "id": envelope.id,
        "object": "response",
        "created_at": envelope.created,
        "status": status,
        "model": envelope.model,
        "output": list(output),
        "parallel_tool_calls": True if parallel is None else parallel,
        "tool_choice": request.options.tool_choice if isinstance(request.options.tool_choice, str) else "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "usage": None,
    }


def _text_item(item_id: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": item_id, "role": "assistant", "status": "completed", "content": [part]}


def _reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": item_id, "summary": [{"type": "summary_text", "text": text}]}


def _call_item(item_id: str, call_id: str, name: str, arguments: str, request: ChatRequest) -> dict[str, Any]:
    space, own = request.namespaces.get(name, (None, name))
    call = {"type": "function_call", "id": item_id, "call_id": call_id, "name": own, "arguments": arguments}
    return call | ({"namespace": space} if space is not None else {}) | {"status": "completed"}


def items_of(response_id: str, request: ChatRequest, answer: Answered) -> list[dict[str, Any]]:
    """The output items of a whole answer, in the order a stream writes them."""
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        items.append(_reasoning_item(f"rs_{response_id}_{len(items)}", answer.reasoning))
    if answer.content or not (answer.tool_calls or answer.reasoning):
        items.append(_text_item(f"msg_{response_id}_{len(items)}", answer.content or ""))
    for call in answer.tool_calls:
        function = call["function"]
        item_id = f"fc_{response_id}_{len(items)}"
        items.append(_call_item(item_id, call["id"], function["name"], function["arguments"], request))
    return items


def _ended(response: dict[str, Any], answer: Answered) -> dict[str, Any]:
    reason = _INCOMPLETE.get(answer.finish)
    response["usage"] = usage_body(answer.usage)
    if reason is not None:
        response |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
    return response


def encode(envelope: Envelope, request: ChatRequest, answers: Sequence[Answered]) -> dict[str, Any]:
    """A whole `response` object; the dialect knows one answer only."""
    return _ended(_response(envelope, request, "completed", items_of(envelope.id, request, answers[0])), answers[0])


class ResponsesEncoder:
    """Writes a streamed response; one item is open at a time."""

    def __init__(self, envelope: Envelope, request: ChatRequest) -> None:
        self._envelope = envelope
        self._request = request
        self._number = 0
        self._order = InOrder()
        self._items: list[dict[str, Any]] = []
        self._open: Piece | None = None
        self._text: list[str] = []

    def _event(self, kind: str, **more: Any) -> bytes:
        frame = event_frame(kind, {"type": kind, "sequence_number": self._number, **more})
        self._number += 1
        return frame

    def begin(self) -> bytes:
        response = _response(self._envelope, self._request, "in_progress", ())
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def push(self, piece: Piece) -> bytes:
        return b"".join(self._write(ready) for ready in self._order.push(piece))

    def keepalive(self) -> bytes:
        return self._event("response.in_progress", response=_response(self._envelope, self._request, "in_progress", ()))

    def _write(self, piece: Piece) -> bytes:
        if piece.kind in ("signature", "redacted"):
            return b""  # No provider of this dialect signs reasoning; there is no place for one.
        out = b""
        if piece.kind == "call" or self._open is None or (piece.kind != "arguments" and self._open.kind != piece.kind):
            out = self._close() + self._start(piece)
        if piece.kind == "call":
            return out
        self._text.append(piece.text)
        return out + (self._delta(piece.text) if piece.text else b"")

    @property
    def _id(self) -> str:
        assert self._open is not None
        prefix = {"text": "msg", "reasoning": "rs"}.get(self._open.kind, "fc")
        return f"{prefix}_{self._envelope.id}_{len(self._items)}"

    def _place(self, part: bool = True) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id, "output_index": len(self._items)}
        if part and self._open is not None and self._open.kind != "call":
            place["summary_index" if self._open.kind == "reasoning" else "content_index"] = 0
        return place

    def _start(self, piece: Piece) -> bytes:
        self._open, self._text = piece, []
        match piece.kind:
            case "reasoning":
                item: dict[str, Any] = {"type": "reasoning", "id": self._id, "summary": []}
                part: tuple[str, dict[str, Any]] = (
                    "response.reasoning_summary_part.added",
                    {"type": "summary_text", "text": ""},
                )
            case "text":
                item = {**_text_item(self._id, ""), "content": [], "status": "in_progress"}
                part = ("response.content_part.added", {"type": "output_text", "text": "", "annotations": []})
            case _:
                item = {**_call_item(self._id, piece.id, piece.name, "", self._request), "status": "in_progress"}
                return self._event("response.output_item.added", output_index=len(self._items), item=item)
        added = self._event("response.output_item.added", output_index=len(self._items), item=item)
        return added + self._event(part[0], **self._place(), part=part[1])

    def _delta(self, text: str) -> bytes:
        assert self._open is not None
        kind = {
            "reasoning": "response.reasoning_summary_text.delta",
            "text": "response.output_text.delta",
        }.get(self._open.kind, "response.function_call_arguments.delta")
        return self._event(kind, **self._place(), delta=text)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        text = "".join(self._text)
        match self._open.kind:
            case "reasoning":
                item = _reasoning_item(self._id, text)
                out = self._event("response.reasoning_summary_text.done", **self._place(), text=text)
                out += self._event("response.reasoning_summary_part.done", **self._place(), part=item["summary"][0])
            case "text":
                item = _text_item(self._id, text)
                out = self._event("response.output_text.done", **self._place(), text=text)
                out += self._event("response.content_part.done", **self._place(), part=item["content"][0])
            case _:
                item = _call_item(self._id, self._open.id, self._open.name, text, self._request)
                out = self._event("response.function_call_arguments.done", **self._place(), arguments=text)
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return out

    def finish(self, answers: Sequence[Answered]) -> bytes:
        out = b"".join(self._write(piece) for piece in self._order.rest()) + self._close()
        if not self._items:
            out += self._start(Piece("text")) + self._close()
        response = _ended(_response(self._envelope, self._request, "completed", self._items), answers[0])
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        return out + self._event(kind, response=response, **self._envelope.reef())

    def fail(self, error: ReefError) -> bytes:
        response = _response(self._envelope, self._request, "failed", self._items)
        response["sequence_number"] = self._number
        return stream_error("responses", error, self._envelope.request_id, response=response)
