"""A small gateway for tests: chat completions with receipts, reports, requests, head, install scripts. Real sockets, stdlib."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from reef_cli.harness import probe
from reef_cli.harness.probe import framed

USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


class FakeGateway:
    """`replies` are consumed one per chat call: a text, or a list of tool calls `(name, arguments)`; then `ok` for ever."""

    def __init__(self, token: str = "real-token") -> None:
        self.token = token
        self.requests: list[dict[str, Any]] = []
        self.reports: dict[str, dict[str, Any]] = {}
        self.asked: list[dict[str, Any]] = []
        self.replies: list[Any] = []
        self.head: dict[str, Any] = {"release_id": None}
        self.script: Callable[[dict[str, str]], str] = lambda query: "exit 9\n"
        self.fail: int | None = None
        self.delay_report: threading.Event | None = None
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                outer.answer(self, b"")

            def do_POST(self) -> None:
                outer.answer(self, self.rfile.read(int(self.headers.get("content-length") or 0)))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> "FakeGateway":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        url = urlsplit(handler.path)
        if handler.headers.get("authorization") != f"Bearer {self.token}":
            return self.send(handler, 401, {"error": {"message": "wrong token", "code": "unauthorized"}})
        scenario = handler.headers.get("x-reef-scenario")
        if url.path == "/reef/harness":
            return self.send(handler, 200, self.head)
        if url.path == "/reef/harness/install":
            return self.send(handler, 200, self.script({key: value[0] for key, value in parse_qs(url.query).items()}))
        data = json.loads(body or b"null")
        if url.path == "/reef/report":
            return self.report(handler, scenario, data)
        if url.path == "/reef/train":
            self.asked.append({**data, "scenario": scenario})
            return self.send(handler, 200, {"agent_record_id": "asked-1"})
        with self.lock:
            number = len(self.requests)
            self.requests.append(
                {"path": url.path, "headers": {k.lower(): v for k, v in handler.headers.items()}, "body": data}
            )
            reply = self.replies.pop(0) if self.replies else "ok"
        if self.fail is not None:
            return self.send(handler, self.fail, {"error": {"message": "refused", "code": "x"}})
        receipt = f"receipt-{scenario}-{number}"
        if url.path in ("/v1/messages", "/v1/responses"):
            whole, events = probe.DIALECTS[url.path]("m")
            answer: Any = framed(events).decode() if data.get("stream") else whole
            kind = "text/event-stream" if data.get("stream") else "application/json"
            return self.send(handler, 200, answer, {"x-reef-agent-record-id": receipt, "content-type": kind})
        return self.chat(handler, data, receipt, reply)

    def chat(self, handler: BaseHTTPRequestHandler, data: Any, receipt: str, reply: Any) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": reply}
        if not isinstance(reply, str):
            calls = [
                {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
                for i, (n, a) in enumerate(reply)
            ]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        headers = {"x-reef-agent-record-id": receipt, "x-reef-release-id": "r1-00000000"}
        if not data.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.send(handler, 200, {"id": receipt, "object": "chat.completion", "choices": [choice], "usage": USAGE}, headers)
            return
        delta = dict(message)
        for index, call in enumerate(delta.get("tool_calls", [])):
            call["index"] = index
        finish = "tool_calls" if "tool_calls" in message else "stop"
        base = {"id": receipt, "object": "chat.completion.chunk", "created": 1, "model": "m"}
        chunks = [
            {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        ]
        chunks.append({**base, "choices": [], "usage": USAGE})
        handler.send_response(200)
        for name, value in {"content-type": "text/event-stream", "transfer-encoding": "chunked", **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        for event in [*map(json.dumps, chunks), "[DONE]"]:
            piece = f"data: {event}\n\n".encode()
            handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")

    def report(self, handler: BaseHTTPRequestHandler, scenario: str | None, data: dict[str, Any]) -> None:
        if self.delay_report is not None:
            self.delay_report.wait(10)
        with self.lock:
            known = self.reports.get(data["agent_record_id"])
            if known is not None and known != {**data, "scenario": scenario}:
                return self.send(handler, 409, {"error": {"message": "other content", "code": "content_conflict"}})
            self.reports[data["agent_record_id"]] = {**data, "scenario": scenario}
        return self.send(handler, 200, {"agent_record_id": data["agent_record_id"], "eligible": []})

    def send(self, handler: BaseHTTPRequestHandler, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)
