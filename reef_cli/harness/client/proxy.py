"""The capture proxy: an HTTP server on loopback between one run of an agent and the gateway.

It knows the real token and adds it, the scenario and the session tag; the agent only knows a token that is good for this run.
Bytes stream through unbuffered and no time-out below ten minutes is added. Receipts are appended to the run's spool.
"""

from __future__ import annotations

import hmac
import http.client
import json
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 900.0
_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "accept-encoding",
        "expect",
    }
)
_OURS = frozenset({"authorization", "x-api-key", "x-reef-scenario", "x-reef-release-id"})
_OUR_TAGS = ("x-reef-tag-session", "x-reef-tag-client", "x-reef-tag-harness", "x-reef-tag-trial")
MAX_BODY = 64 * 1024 * 1024


class Upstream:
    """Where requests go and what is added to them. `connect` makes a fresh connection (TCP, TLS, or a unix socket)."""

    def __init__(self, connect: Callable[[], http.client.HTTPConnection], headers: Mapping[str, str], prefix: str = "") -> None:
        self.connect = connect
        self.headers = dict(headers)
        self.prefix = prefix


class Usage:
    """Token counts out of an answer that streams by: they stand near its start or its end, in every dialect."""

    _INPUT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d+)')
    _OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d+)')

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""

    def feed(self, data: bytes) -> None:
        self._head = (self._head + data[:8192])[:8192]
        self._tail = (self._tail + data)[-16384:]

    def totals(self) -> tuple[int, int]:
        """Input and output tokens; 0 where the answer does not say."""
        text = self._head + b"\n" + self._tail
        found = [max((int(number) for number in pattern.findall(text)), default=0) for pattern in (self._INPUT, self._OUTPUT)]
        return found[0], found[1]


class Limits:
    """How much one run may use; None is no limit. `taken` counts model calls, `used` input and output tokens.

    `price` is per million input and output tokens, in the currency of `cost`. The call during which a budget is used up still
    gets its answer; the next one is refused.
    """

    def __init__(
        self,
        requests: int | None = None,
        tokens: int | None = None,
        cost: float | None = None,
        price: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.requests = requests
        self.tokens = tokens
        self.cost = cost
        self.price = price
        self.used = (0, 0)
        self.taken = 0
        self.refused = 0
        self.statuses: list[int] = []
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            if (self.requests is not None and self.taken >= self.requests) or self.broke:
                self.refused += 1
                return False
            self.taken += 1
            return True

    @property
    def broke(self) -> bool:
        """Whether the token or money budget is used up."""
        spent = (self.used[0] * self.price[0] + self.used[1] * self.price[1]) / 1e6
        return (self.tokens is not None and sum(self.used) >= self.tokens) or (self.cost is not None and spent >= self.cost)

    def spend(self, tokens: tuple[int, int]) -> None:
        with self._lock:
            self.used = (self.used[0] + tokens[0], self.used[1] + tokens[1])

    def note(self, status: int) -> None:
        """How a model call ended, as the gateway said; 0 when the connection broke."""
        with self._lock:
            self.statuses.append(status)


class Handler(BaseHTTPRequestHandler):
    """One request. The server object carries upstream, token, limits and the receipt callback."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def do_HEAD(self) -> None:
        self._forward()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a log line in the terminal would break the agent's screen."""

    def _forward(self) -> None:
        self.close_connection = True
        length = int(self.headers.get("content-length") or 0)
        if length > MAX_BODY:
            return self._refuse(413, "the request body is too large", "request_too_large")
        body = self._chunked() if "chunked" in (self.headers.get("transfer-encoding") or "") else self.rfile.read(length)
        if not self._known():
            return self._refuse(401, "this address serves one run of one agent", "unauthorized")
        path = "/" + self.path.lstrip("/")
        if not path.startswith("/v1/"):
            return self._refuse(404, "only /v1 is served here", "not_found")
        if self.command == "POST" and "count_tokens" not in path and not self.server.limits.take():
            return self._refuse(403, "this run has used up its model calls or its budget", "request_cap")
        upstream = self.server.upstream
        kept = {name: value for name, value in self.headers.items() if name.lower() not in {*_HOP, *_OURS, *_OUR_TAGS}}
        connection = upstream.connect()
        try:
            connection.request(
                self.command, upstream.prefix + path, body or None, {**kept, "accept-encoding": "identity", **upstream.headers}
            )
            self._answer(connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            self._lost(error)
        finally:
            connection.close()
        return None

    def _known(self) -> bool:
        header = self.headers.get("authorization") or ""
        given = header[7:] if header[:7].lower() == "bearer " else self.headers.get("x-api-key") or ""
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _chunked(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        self.server.limits.note(answer.status)
        receipt = answer.headers.get("x-reef-agent-record-id")
        if receipt and answer.status < 300:
            self.server.receipt(
                {
                    "receipt": receipt,
                    "release_id": answer.headers.get("x-reef-release-id"),
                    "path": self.path.split("?")[0],
                    "at": time.time(),
                }
            )
        self.send_response(answer.status)
        sized = answer.headers.get("content-length")
        for name, value in answer.headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("content-length", sized) if sized else self.send_header("transfer-encoding", "chunked")
        self.send_header("connection", "close")
        self.end_headers()
        self._started = True
        if self.command == "HEAD":
            return
        usage = Usage()
        try:
            while data := answer.read1(65536):
                usage.feed(data)
                self.wfile.write(data if sized else f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()
            if not sized:
                self.wfile.write(b"0\r\n\r\n")
        finally:
            if self.command == "POST" and "count_tokens" not in self.path:
                self.server.limits.spend(usage.totals())

    _started = False

    def _lost(self, error: Exception) -> None:
        """Upstream or client broke off. Before the headers there is an answer to give; after them only breaking is honest."""
        if not isinstance(error, BrokenPipeError):
            self.server.limits.note(0)
        if self._started or isinstance(error, BrokenPipeError):
            self.connection.close()
            return
        self._refuse(502, "upstream connection error", "upstream_error")

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = json.dumps({"type": "error", "error": {"type": code, "code": code, "message": message, "param": None}}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)


class Proxy(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """See the module. Start with `with Proxy(...) as proxy:`; `proxy.url` is what the agent is told."""

    daemon_threads = True
    allow_reuse_address = False
    request_queue_size = 128

    def __init__(
        self,
        upstream: Upstream,
        token: str,
        receipt: Callable[[Mapping[str, Any]], None],
        limits: Limits | None = None,
        address: Any = ("127.0.0.1", 0),
    ) -> None:
        self.upstream = upstream
        self.token = token
        self.receipt = receipt
        self.limits = limits or Limits()
        self.address_family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        super().__init__(address, Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        # Handlers name their peer; a unix socket has none.
        return connection, address or ("unix", 0)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left early is normal; nothing is printed into the agent's terminal."""

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def tcp(url: str) -> tuple[Callable[[], http.client.HTTPConnection], str]:
    """A connector for a gateway's URL, and the path prefix of that URL."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    host, port = parts.hostname or "127.0.0.1", parts.port
    return (lambda: kind(host, port, timeout=TIMEOUT_S)), parts.path.rstrip("/")
