"""The capture proxy: streams at once, adds what the agent must not know, keeps receipts, breaks honestly."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reef_cli.harness.client import launch, spool
from reef_cli.harness.client.proxy import Limits, Proxy, Upstream, Usage, tcp
from tests.harness.gateway import FakeGateway


@contextmanager
def raw_server(*pieces: bytes | float) -> Iterator[str]:
    """Answers one connection with bytes and pauses, then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            for piece in pieces:
                time.sleep(piece) if isinstance(piece, float) else connection.sendall(piece)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join(5)
    listener.close()


@contextmanager
def proxied(url: str, receipts: list[Any] | None = None, limits: Limits | None = None) -> Iterator[http.client.HTTPConnection]:
    connect, prefix = tcp(url)
    upstream = Upstream(connect, {"authorization": "Bearer real-token", "x-reef-scenario": "demo"}, prefix)
    with Proxy(upstream, "run-token", (receipts if receipts is not None else []).append, limits) as proxy:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.server_address[1], timeout=10)
        yield connection
        connection.close()


MINE = {"authorization": "Bearer run-token", "content-type": "application/json"}
CHAT = json.dumps({"model": "m", "messages": []})


def test_headers_are_swapped_and_receipts_kept(gateway: FakeGateway) -> None:
    receipts: list[Any] = []
    with proxied(gateway.url, receipts) as client:
        client.request(
            "POST",
            "//v1/chat/completions?beta=true",
            CHAT,
            {**MINE, "x-reef-scenario": "other", "x-own": "1", "accept-encoding": "br"},
        )
        assert client.getresponse().status == 200
    headers = gateway.requests[0]["headers"]
    assert (headers["x-reef-scenario"], headers["x-own"], headers["accept-encoding"]) == ("demo", "1", "identity")
    assert [item["receipt"] for item in receipts] == ["receipt-demo-0"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/chat/completions", {"authorization": "Bearer real-token"}, 401),
        ("/v1/messages", {}, 401),
        ("/reef/report", MINE, 404),
        ("/v1/messages", {"x-api-key": "run-token"}, 200),
    ],
)
def test_only_this_run_and_only_inference(path: str, headers: dict[str, str], status: int, gateway: FakeGateway) -> None:
    with proxied(gateway.url) as client:
        client.request("POST", path, CHAT, headers)
        assert client.getresponse().status == status


def test_chunks_arrive_as_they_come() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-reef-agent-record-id: r\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with raw_server(head, b"6\r\nfirst\n\r\n", 1.0, b"7\r\nsecond\n\r\n0\r\n\r\n") as url, proxied(url) as client:
        begun = time.monotonic()
        client.request("POST", "/v1/messages", CHAT, MINE)
        answer = client.getresponse()
        assert answer.read1(100) == b"first\n" and time.monotonic() - begun < 0.7
        assert answer.read() == b"second\n"


@pytest.mark.parametrize("head", [b"transfer-encoding: chunked\r\n\r\n6\r\nfirst\n\r\n", b"content-length: 99\r\n\r\nfirst\n"])
def test_a_stream_that_breaks_off_breaks_off_for_the_agent_too(head: bytes) -> None:
    limits = Limits()
    with raw_server(b"HTTP/1.1 200 OK\r\n" + head) as url, proxied(url, limits=limits) as client:
        client.request("POST", "/v1/messages", CHAT, MINE)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            client.getresponse().read()


def test_no_gateway_is_a_transient_error() -> None:
    limits = Limits()
    with proxied("http://127.0.0.1:9", limits=limits) as client:
        client.request("POST", "/v1/messages", CHAT, MINE)
        answer = client.getresponse()
        assert answer.status == 502 and b"connection error" in answer.read() and limits.statuses == [0]


@pytest.mark.parametrize(
    "body",
    [
        b'{"message":{"usage":{"input_tokens":7,"output_tokens":1}}}' + b"x" * 90_000 + b'{"usage":{"output_tokens":5}}',
        b"y" * 90_000 + b'{"usage":{"prompt_tokens": 7, "completion_tokens": 5}} data: [DONE]',
        b'{"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":0},"output_tokens":5}}',
    ],
)
def test_usage_is_found_in_every_dialect(body: bytes) -> None:
    usage = Usage()
    for start in range(0, len(body), 777):
        usage.feed(body[start : start + 777])
    assert usage.totals() == (7, 5)


def test_chunked_requests_and_limits(gateway: FakeGateway) -> None:
    limits = Limits(1)
    with proxied(gateway.url, limits=limits) as client:
        client.request("POST", "/v1/chat/completions", iter([CHAT[:5].encode(), CHAT[5:].encode()]), MINE, encode_chunked=True)
        assert client.getresponse().status == 200 and gateway.requests[0]["body"]["model"] == "m"
        client.close()
        client.request("POST", "/v1/chat/completions", CHAT, MINE)
        answer = client.getresponse()
        assert answer.status == 403 and b"used up" in answer.read() and limits.refused == 1


def test_a_run_whose_wrapper_died_counts_as_done(tmp_path: Path) -> None:
    (tmp_path / "1-999999999-aa.open").write_text('{"receipt": "a"}\n{"torn')
    mine = spool.Run(tmp_path, spool.new_run())
    mine.add({"receipt": "b"})
    assert spool.pending(tmp_path) == 1
    (claim,) = spool.claim(tmp_path)
    assert claim.receipts == [{"receipt": "a"}]
    assert list(spool.claim(tmp_path)) == []
    claim.release()
    mine.close()
    assert spool.pending(tmp_path) == 2


def test_placeholders_fill_known_names_only() -> None:
    known = launch.values("/c", "/p", "http://h", "t", "org/m", "s")
    assert launch.fill("{config}/{other} {model} {", known) == "/c/{other} org/m {"
    argv = launch.arguments(
        {"headless": ["{program}", "{prompt}"], "args": ["--x", "{model}"], "runner": ["py"]}, "headless", known, "{token}"
    )
    assert argv == ["py", "/p", "--x", "{model}", "{token}"]
