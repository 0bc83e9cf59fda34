"""Bodies that are wrong, large or strange, and a provider that refuses: what clients see, and that nothing false is stored."""

import json
import socket
from typing import Any

import httpx
import pytest

from tests.doubles.upstream import Upstream
from tests.e2e.server import Server

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
NO_OBJECTS = ("[]", '"text"', "7", "null", "true", "", "  ", '{"messages": [', '{"a":1,}', "{'a':1}", "NaN")
STATUSES = {400: 400, 401: 401, 403: 403, 404: 404, 408: 408, 409: 409, 413: 413, 422: 422, 429: 429, 451: 400, 418: 400}
STATUSES |= {500: 502, 503: 502, 504: 502, 529: 502}


def count(front: Server, scenario: str) -> int:
    """Records of a scenario; 0 when there is none of that name."""
    rows = {row["name"]: row["counts"]["records"] for row in front.get("/reef/scenarios")["scenarios"]}
    return int(rows.get(scenario, 0))


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_what_is_no_object_reaches_nobody(front: Server, provider: Upstream, path: str) -> None:
    client = front.client(**{"x-reef-scenario": f"bodies-{path[4:8]}"})
    for body in NO_OBJECTS:
        reply = client.post(path, content=body)
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error", reply.text
        assert "Traceback" not in reply.text
        if body in NO_OBJECTS[:5]:
            assert "must be a JSON object" in reply.json()["error"]["message"]
    assert provider.seen == [] and count(front, f"bodies-{path[4:8]}") == 0
    assert client.post(CHAT, json=ASK).status_code == 200, "the connection goes on"


def test_scores_are_finite(front: Server, provider: Upstream) -> None:
    client = front.client(**{"x-reef-scenario": "finite"})
    client.post(CHAT, json=ASK)
    before = count(front, "finite")
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
        reply = client.post("/reef/report", content=f'{{"score": {number}, "references": []}}')
        assert reply.status_code == 400 and "finite" in reply.json()["error"]["message"], number
    page = client.get("/reef/scenarios/finite/records").text
    json.loads(page, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert count(front, "finite") == before


def test_wrong_feedback_is_named_and_not_stored(front: Server) -> None:
    client = front.client(**{"x-reef-scenario": "default"})
    before = count(front, "default")
    for wrong in ({"score": "1.0"}, {"score": True}, {"feedback": ["a"]}, {"feedback": 7}, {"scores": 1}, {}):
        reply = client.post("/reef/report", json={"references": [], **wrong})
        assert reply.status_code == 400 and all(name in reply.json()["error"]["message"] for name in wrong), reply.text
    assert count(front, "default") == before


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_providers_refusal_keeps_its_words(front: Server, provider: Upstream, path: str) -> None:
    client = front.client(**{"x-reef-scenario": "refused"})
    ask = ASK if path == CHAT else {"model": "m", "input": "hi"}
    for theirs, ours in STATUSES.items():
        words = {"error": {"message": "words of the provider", "type": "some_type"}}
        provider.replies(theirs, words, headers={"Retry-After": "7"})
        for stream in (False, True):
            reply = client.post(path, json=ask | {"stream": stream})
            assert reply.status_code == ours and "words of the provider" in reply.text, reply.text
            assert "x-reef-agent-record-id" not in reply.headers
            if ours == 429:
                assert reply.headers["retry-after"] == "7"
    assert not [row for row in front.get("/reef/scenarios/refused/records")["records"] if row["complete"]]


def test_a_large_conversation_goes_through_whole(front: Server, provider: Upstream) -> None:
    messages = [{"role": "user", "content": "x" * (3 * 1024 * 1024)}]
    reply = front.client(**{"x-reef-scenario": "large"}).post(CHAT, json={**ASK, "messages": messages})
    assert reply.status_code == 200 and provider.seen[-1].body["messages"] == messages
    record = front.get(f"/reef/scenarios/large/records/{reply.headers['x-reef-agent-record-id']}")
    assert json.loads(record["request"])["messages"] == messages


def test_imports_are_limited(front: Server) -> None:
    record = {
        "id": "i:1",
        "dialect": "chat",
        "model": "m",
        "request": {"messages": []},
        "response": {"content": "x" * 1_100_000},
    }
    client = front.client(**{"x-reef-scenario": "imports"})
    for path, body in (("/reef/records", record), ("/reef/records/batch", [record])):
        reply = client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert "reef.import_limit_bytes" in reply.json()["error"]["hint"]
    assert count(front, "imports") == 0


def test_bytes_that_are_no_http_leave_no_traceback_and_no_secret(front: Server) -> None:
    address = httpx.URL(front.url)
    for junk in (
        b"\x00\xff\xfe" * 50,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /reef/report HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: Bearer half-a-secret\x00\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ):
        with socket.create_connection((address.host, address.port or 80), timeout=10) as raw:
            raw.sendall(junk)
            raw.shutdown(socket.SHUT_WR)
            assert b"Traceback" not in raw.makefile("rb").read()
    assert front.client().get("/healthz").status_code == 200
    log: list[dict[str, Any]] = [json.loads(line) for line in (front.home / "logs" / "reef.log").read_text().splitlines()]
    said = [line for line in log if "no HTTP request" in line["message"]]
    assert len(said) >= 3 and not [line for line in log if "traceback" in line]
    assert "half-a-secret" not in front.words()
