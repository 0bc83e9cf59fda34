"""Bodies that are wrong, large or strange, and a provider that refuses: what clients see, and that nothing false is stored."""

import json
import socket
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from tests.doubles.upstream import Upstream
from tests.e2e.server import Server

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMPLETIONS, COUNT = "/v1/completions", "/v1/messages/count_tokens"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
NO_OBJECTS = ("[]", '"text"', "7", "null", "true", "", "  ", '{"messages": [', '{"a":1,}', "{'a':1}", "NaN")
STATUSES = {400: 400, 401: 401, 403: 403, 404: 404, 408: 408, 409: 409, 413: 413, 422: 422, 429: 429, 451: 400, 418: 400}
STATUSES |= {500: 502, 503: 502, 504: 502, 529: 502}


def count(front: Server, scenario: str) -> int:
    """Records of a scenario; 0 when there is none of that name."""
    rows = {row["name"]: row["counts"]["records"] for row in front.get("/reef/scenarios")["scenarios"]}
    return int(rows.get(scenario, 0))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, COUNT, RESPONSES])
def test_what_is_no_object_reaches_nobody(front: Server, provider: Upstream, path: str) -> None:
    scenario = f"bodies-{path[4:].replace('/', '-')}"
    client = front.client(**{"x-reef-scenario": scenario})
    for body in NO_OBJECTS:
        reply = client.post(path, content=body)
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error", reply.text
        assert "Traceback" not in reply.text
        if body in NO_OBJECTS[:5]:
            assert "must be a JSON object" in reply.json()["error"]["message"]
    assert provider.seen == [] and count(front, scenario) == 0


def test_a_cut_off_body_leaves_its_connection_usable(front: Server, provider: Upstream) -> None:
    url = httpx.URL(front.url)
    headers = {"Authorization": f"Bearer {front.token}", "x-reef-scenario": "cut-off", "Content-Type": "application/json"}
    with closing(HTTPConnection(url.host, url.port, timeout=60)) as connection:
        connection.connect()
        one = connection.sock
        for body, status in ((b'{"messages": [', 400), (json.dumps(ASK).encode(), 200), (b"[", 400), (b"\xff", 400)):
            connection.request("POST", CHAT, body, headers)
            with connection.getresponse() as reply:
                assert reply.status == status and b"Traceback" not in reply.read()
            assert connection.sock is one, "nothing was closed"
    assert count(front, "cut-off") == len(provider.seen) == 1


@pytest.mark.parametrize(
    "path",
    ["/reef/report", "/reef/train", "/reef/records", "/reef/scenarios", "/reef/harness/proposals"]
    + [f"/reef/scenarios/default/{word}" for word in ("update", "jobs", "promote", "rollback", "dismiss", "evaluate")],
)
def test_controls_take_objects_only(front: Server, path: str) -> None:
    before = front.get("/reef/scenarios")
    for body in NO_OBJECTS[:5]:
        reply = front.client().post(path, content=body)
        error = reply.json()["error"]
        assert reply.status_code == 400 and "object" in error["message"], (path, body, reply.text)
    assert front.get("/reef/scenarios") == before


def test_scores_are_finite(front: Server, provider: Upstream) -> None:
    client = front.client(**{"x-reef-scenario": "finite"})
    client.post(CHAT, json=ASK)
    before = count(front, "finite")
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
        reply = client.post("/reef/report", content=f'{{"score": {number}, "references": []}}')
        assert reply.status_code == 400 and "finite" in reply.json()["error"]["message"], number
    (receipt,) = [row["id"] for row in client.get("/reef/scenarios/finite/records").json()["records"]]
    imported = '{"id": "n", "dialect": "chat", "model": "m", "request": {"x": %s}, "response": {}}'
    elsewhere = (
        ("/reef/report", '{"feedback": {"x": [%s]}, "references": ["' + receipt + '"]}'),
        ("/reef/report", '{"score": 1, "metadata": {"x": %s}, "references": ["' + receipt + '"]}'),
        ("/reef/records", imported),
        ("/reef/records/batch", f"[{imported}]"),
        (CHAT, '{"model": "m", "messages": [], "temperature": %s}'),
    )
    for path, body in elsewhere:
        for number in ("NaN", "-Infinity", "1e999"):
            assert client.post(path, content=body % number).status_code == 400, (path, number)
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


@pytest.mark.parametrize("api", ["front", "strict"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_providers_refusal_keeps_its_words(request: pytest.FixtureRequest, provider: Upstream, path: str, api: str) -> None:
    front: Server = request.getfixturevalue(api)
    front.client().post("/reef/scenarios", json={"name": "refused"})
    client = front.client(**{"x-reef-scenario": "refused"})
    ask = {"model": "m", "input": "hi"} if path == RESPONSES else ASK | {"max_tokens": 9}
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
    small = record | {"id": "i:0", "response": {"content": "y"}}
    for path, body in (("/reef/records", record), ("/reef/records/batch", [small, record])):
        reply = client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert "reef.import_limit_bytes" in reply.json()["error"]["hint"]
    assert count(front, "imports") == 0
    nearly = record | {"response": {"role": "assistant", "content": "x" * 1_000_000}}
    assert client.post("/reef/records", json=nearly).status_code == 200 and count(front, "imports") == 1


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
