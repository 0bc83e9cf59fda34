"""A model that always says the same, on loopback, in all three dialects: for load tests of trees, where only starting counts.

Enough of each dialect for every shipped agent to finish a turn, streaming and not; each API's reference has the fields.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SAYS = "ok"
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def framed(events: Iterable[tuple[str, Any]]) -> bytes:
    """Server-sent events of `(name, data)`; data that is no text becomes JSON."""
    parts = []
    for name, value in events:
        head = f"event: {name}\n" if name else ""
        parts.append(f"{head}data: {value if isinstance(value, str) else json.dumps(value)}\n\n")
    return "".join(parts).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        self.close_connection = True
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        path = self.path.split("?")[0]
        self.server.calls += 1
        if path.endswith("/count_tokens"):
            return self._json({"input_tokens": 1})
        model = str(body.get("model", "m"))
        make = DIALECTS.get(path)
        if make is None:
            return self._json({"error": {"message": "no such path", "type": "not_found_error"}}, 404)
        whole, events = make(model)
        return self._events(events) if body.get("stream") else self._json(whole)

    def _json(self, value: Mapping[str, Any], status: int = 200) -> None:
        data = json.dumps(value).encode()
        self._head(status, "application/json", len(data))
        self.wfile.write(data)

    def _events(self, events: Iterable[tuple[str, Any]]) -> None:
        data = framed(events)
        self._head(200, "text/event-stream", len(data))
        self.wfile.write(data)

    def _head(self, status: int, kind: str, length: int) -> None:
        self.send_response(status)
        for name, value in (("content-type", kind), ("content-length", str(length)), ("connection", "close")):
            self.send_header(name, value)
        self.end_headers()


class Probe:
    """`with Probe() as probe:`; `probe.url` is the gateway of a load test."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.calls = 0  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Probe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _chat(model: str) -> tuple[dict[str, Any], Iterator[tuple[str, Any]]]:
    base = {"id": "probe", "created": 1, "model": model}

    def events() -> Iterator[tuple[str, Any]]:
        chunk = {**base, "object": "chat.completion.chunk"}
        yield "", {**chunk, "choices": [{"index": 0, "delta": {"role": "assistant", "content": SAYS}, "finish_reason": None}]}
        yield "", {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        yield "", {**chunk, "choices": [], "usage": _USAGE}
        yield "", "[DONE]"

    choice = {"index": 0, "message": {"role": "assistant", "content": SAYS}, "finish_reason": "stop"}
    return {**base, "object": "chat.completion", "choices": [choice], "usage": _USAGE}, events()


def _messages(model: str) -> tuple[dict[str, Any], Iterator[tuple[str, Any]]]:
    usage = {"input_tokens": 1, "output_tokens": 1}
    empty = {"id": "msg_probe", "type": "message", "role": "assistant", "model": model, "content": [], "usage": usage}

    def events() -> Iterator[tuple[str, Any]]:
        for kind, value in (
            ("message_start", {"message": {**empty, "stop_reason": None, "stop_sequence": None}}),
            ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
            ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": SAYS}}),
            ("content_block_stop", {"index": 0}),
            ("message_delta", {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage}),
            ("message_stop", {}),
        ):
            yield kind, {"type": kind, **value}

    return {**empty, "content": [{"type": "text", "text": SAYS}], "stop_reason": "end_turn", "stop_sequence": None}, events()


def _responses(model: str) -> tuple[dict[str, Any], Iterator[tuple[str, Any]]]:
    usage = {
        "input_tokens": 1,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 2,
    }
    part = {"type": "output_text", "text": SAYS, "annotations": []}
    item = {"id": "item_probe", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    whole = {
        "id": "resp_probe",
        "object": "response",
        "created_at": 1,
        "model": model,
        "status": "completed",
        "output": [item],
        "usage": usage,
    }

    def events() -> Iterator[tuple[str, Any]]:
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        at = {"output_index": 0, "content_index": 0, "item_id": "item_probe"}
        for kind, value in (
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
            ("response.output_item.added", {"output_index": 0, "item": {**item, "status": "in_progress", "content": []}}),
            ("response.content_part.added", {**at, "part": {**part, "text": ""}}),
            ("response.output_text.delta", {**at, "delta": SAYS}),
            ("response.output_text.done", {**at, "text": SAYS}),
            ("response.content_part.done", {**at, "part": part}),
            ("response.output_item.done", {"output_index": 0, "item": item}),
            ("response.completed", {"response": whole}),
        ):
            yield kind, {"type": kind, **value}

    return whole, events()


DIALECTS: Mapping[str, Callable[[str], tuple[dict[str, Any], Iterator[tuple[str, Any]]]]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
}
"""Path to maker of `(whole answer, events)` for a model's name."""
