"""A small HTTP server on loopback that answers as Reef does, from recorded answers, and remembers what it was asked.

It stands in for the gateway in the tests of its clients: real sockets, real HTTP, no business rule but the head's
compare-and-swap. `push` sends an event to every open stream; `close` drops everything, as a killed server would.
"""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]
TOKEN = "fake-token"
_OPEN = object()


def release(step: int, name: str, **more: Any) -> dict[str, Any]:
    return {
        "release_id": f"r{step}-{name * 8}"[:11],
        "scenario": "default",
        "parent_release_id": None if step == 0 else f"r{step - 1}-00000000",
        "content_id": f"sha256:{name * 64}",
        "kind": "lora",
        "surface": "weights",
        "operation": "creation" if step == 0 else "training",
        "current": False,
        "pending": False,
        "step": step,
        "recorded_at": 1_700_000_000.0 + step * 60,
        "author": "job",
        "evidence": {"reason": f"mean {step / 10:.1f} against 0.0"},
        "restorable": True,
        "gated": True,
        "job_id": None,
        "source_release_id": None,
        "commit": name * 40,
        **more,
    }


def record(sequence: int, **more: Any) -> dict[str, Any]:
    return {
        "sequence": sequence,
        "id": f"{sequence:032x}",
        "scenario": "default",
        "kind": "inference",
        "created_at": 1_700_000_000.0 + sequence,
        "session": None,
        "release_id": "r1-bbbbbbbb",
        "summary": f"What is {sequence} + 1?",
        "score": None,
        "complete": True,
        "error": None,
        "output_tokens": 12,
        **more,
    }


class FakeReef:
    """State a test may change between requests; `requests` lists `(method, path, query, body, headers)`."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[tuple[str, str, dict[str, str], Any, dict[str, str]]] = []
        self.overrides: dict[tuple[str, str], Callable[[dict[str, str], Any], Reply]] = {}
        self.records = [record(number) for number in range(1, 9)]
        self.records += [record(9, kind="report", score=1.0, summary="good"), record(10, summary="\x1b[2Jwiped [red]x[/red]")]
        self.releases = [
            release(3, "d", pending=True, evidence={"reason": "0.9 against 0.6, waits for a person"}),
            release(2, "c", current=True),
            release(1, "b"),
            release(0, "a"),
        ]
        self.scenarios: list[dict[str, Any]] = [
            {
                "name": "default",
                "recipe": "sao",
                "training_mode": "auto",
                "paused": False,
                "created_at": 1_700_000_000.0,
                "head": "r2-cccccccc",
                "served": "r2-cccccccc",
                "state": "training",
                "phase": "backward",
                "done": 3,
                "total": 16,
                "counts": {"records": 10, "reports": 1, "queued": 4, "consumed": 6},
                "rewards": [0.1, 0.2, 0.25, 0.4, 0.5, 0.55, 0.7],
                "job": {"job_id": "0198aaaabbbbccccddddeeeeffff0001", "state": "training"},
                "last_outcome": {"job_id": "x", "outcome": "select", "reason": "0.55 against 0.40", "at": 1_700_000_000.0},
            },
            {
                "name": "support",
                "training_mode": "manual",
                "paused": True,
                "state": "idle",
                "head": "r0-aaaaaaaa",
                "rewards": [],
            },
        ]
        self._streams: list[queue.Queue[Any]] = []
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._server = self._listen(port)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def _listen(self, port: int) -> ThreadingHTTPServer:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None: ...

            def setup(self) -> None:
                super().setup()
                fake._sockets.add(self.connection)

            def finish(self) -> None:
                fake._sockets.discard(self.connection)
                with suppress(OSError):
                    super().finish()

            def _any(self) -> None:
                fake._handle(self)

            do_GET = do_POST = do_DELETE = _any

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_: object) -> None: ...  # clients leave as they like

        for _ in range(100):
            try:
                return Server(("127.0.0.1", port), Handler)
            except OSError:
                time.sleep(0.05)
        raise OSError(f"port {port} stays taken")

    def push(self, kind: str, cursor: str, data: dict[str, Any]) -> None:
        for stream in list(self._streams):
            stream.put(f"id: {cursor}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode())

    def wait_for_stream(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._streams and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self._streams, "nobody listens to events"

    def asked(self, method: str, path: str) -> list[tuple[dict[str, str], Any, dict[str, str]]]:
        return [request[2:] for request in self.requests if request[:2] == (method, path)]

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self._server.shutdown()
        self._server.server_close()
        for stream in self._streams:
            stream.put(None)
        for connection in list(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(2)

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        raw = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        body = json.loads(raw) if raw else None
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self._lock:
            self.requests.append((handler.command, parts.path, query, body, headers))
        if headers.get("authorization") != f"Bearer {TOKEN}":
            self._send(handler, 401, {"error": {"code": "unauthorized", "message": "the token is missing or wrong"}}, {})
        elif parts.path == "/reef/events":
            self._stream(handler, query)
        else:
            custom = self.overrides.get((handler.command, parts.path))
            with self._lock:
                status, answer, *more = (
                    custom(query, body) if custom else self._answer(handler.command, parts.path, query, body)
                )
            self._send(handler, status, answer, more[0] if more else {})

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, answer: Any, headers: dict[str, str]) -> None:
        payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(payload)))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(payload)

    def _stream(self, handler: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write(b"id: 0\n: connected\n\n")
        handler.wfile.flush()
        stream: queue.Queue[Any] = queue.Queue()
        self._streams.append(stream)
        try:
            while (item := stream.get()) is not None:
                handler.wfile.write(item)
                handler.wfile.flush()
        except OSError:
            pass
        finally:
            self._streams.remove(stream)
            handler.close_connection = True

    def _answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Reply:
        name, _, rest = path.removeprefix("/reef/scenarios/").partition("/")
        if path == "/reef/status":
            engine = {
                "kind": "embedded",
                "model": "smollm2-135m-instruct",
                "state": "ready",
                "weight_version": "default@r2-cccccccc",
            }
            return 200, {"version": "0.1.0", "uptime_s": 300.0, "ready": True, "engine": engine, "scenarios": self.scenarios}
        if (method, path) == ("GET", "/reef/scenarios"):
            return 200, {"scenarios": self.scenarios}
        if not any(row["name"] == name for row in self.scenarios):
            return 404, {
                "error": {"code": "scenario_not_found", "message": f"no scenario {name!r}", "hint": "see: reef scenario list"}
            }
        if (method, rest) == ("GET", "releases"):
            return 200, {"scenario": name, "releases": self.releases if name == "default" else [release(0, "a", current=True)]}
        if (method, rest) == ("GET", "records"):
            return 200, {"scenario": name, "records": self._page(query)}
        if method == "POST" and rest in ("pause", "resume"):
            row = next(row for row in self.scenarios if row["name"] == name)
            row["paused"] = rest == "pause"
            return 200, row
        if method == "POST" and rest in ("promote", "rollback"):
            return self._move(rest, body)
        return 404, {"error": {"code": "route_not_found", "message": f"no route {method} {path}"}}

    def _page(self, query: dict[str, str]) -> list[dict[str, Any]]:
        limit = int(query.get("limit", 100))
        rows = [row for row in self.records if row["sequence"] > int(query.get("after_sequence", 0))]
        if query.get("request_type"):
            rows = [row for row in rows if row["kind"] == query["request_type"]]
        return rows[::-1][:limit] if query.get("order") == "newest" else rows[:limit]

    def _move(self, verb: str, body: Any) -> Reply:
        head = next(row for row in self.releases if row["current"])
        expected = body.get("expected_head")
        if expected not in (None, head["release_id"]):
            message = f"the head moved: now {head['release_id']}"
            return 409, {"error": {"code": "head_moved", "message": message, "details": {"head": head["release_id"]}}}
        target = next((row for row in self.releases if row["release_id"] == body.get("release_id")), None)
        if target is None:
            return 404, {"error": {"code": "release_not_found", "message": "no such release"}}
        if verb == "promote" and not target["pending"]:
            return 409, {"error": {"code": "not_pending", "message": f"{target['release_id']} is not held"}}
        new = release(head["step"] + 1, "e", operation=verb, content_id=target["content_id"], current=True)
        head["current"] = False
        self.releases = [new, *(row for row in self.releases if not (verb == "promote" and row is target))]
        self.scenarios[0]["head"] = new["release_id"]
        return 200, new
