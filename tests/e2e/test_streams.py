"""Streams through a real server, byte for byte: where the receipt stands, what a broken stream ends with, who is told what."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.doubles.upstream import Upstream, data, event
from tests.e2e.server import Server, until

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEAD = {"id": "c1", "object": "chat.completion.chunk", "created": 7, "model": "stub"}


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return data({**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


CHUNKS = [chunk({"role": "assistant", "content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop")]
USAGE = data({**HEAD, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})
DONE = b"data: [DONE]\n\n"


def ask(path: str, **more: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"model": "m", "input": "hi", "stream": True, **more}
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "stream": True, **more}


def raw(front: Server, path: str, scenario: str, **more: Any) -> tuple[httpx.Response, bytes]:
    with front.client(**{"x-reef-scenario": scenario}).stream("POST", path, json=ask(path, **more)) as reply:
        return reply, b"".join(reply.iter_raw())


def record(front: Server, scenario: str, receipt: str) -> dict[str, Any]:
    return dict(front.get(f"/reef/scenarios/{scenario}/records/{receipt}"))


def payloads(body: bytes) -> list[Any]:
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def test_the_receipt_stands_between_the_last_chunk_and_done(front: Server, provider: Upstream) -> None:
    provider.streams([*CHUNKS, USAGE, DONE])
    reply, body = raw(front, CHAT, "frames")
    assert reply.headers["content-type"] == "text/event-stream"
    assert body.startswith(b"".join(CHUNKS) + b"data: ") and body.endswith(DONE) and b'"usage"' not in body
    frame = json.loads(body[len(b"".join(CHUNKS)) + 6 : -len(DONE)])
    receipt = reply.headers["x-reef-agent-record-id"]
    assert frame == {**HEAD, "choices": [], "reef": {"agent_record_id": receipt}}
    found = record(front, "frames", receipt)
    assert found["complete"] and found["response"]["content"] == "Hello" and found["usage"]["completion_tokens"] == 2


def test_a_receipt_can_be_read_and_cited_when_its_frame_arrives(front: Server, provider: Upstream) -> None:
    """The provider has said all but its last word, and the client's stream is still open."""
    provider.streams([*CHUNKS, DONE], hang=True)
    client = front.client(**{"x-reef-scenario": "at-once"})
    with front.client(**{"x-reef-scenario": "at-once"}).stream("POST", CHAT, json=ask(CHAT)) as reply:
        got = b""
        for piece in reply.iter_raw():
            got += piece
            if b'"reef"' in got:
                break
        receipt = reply.headers["x-reef-agent-record-id"]
        assert record(front, "at-once", receipt)["response"]["content"] == "Hello"
        assert client.post("/reef/report", json={"score": 1, "references": [receipt]}).status_code == 200


def test_a_stream_without_an_end_gives_no_receipt_and_never_trains(front: Server, provider: Upstream) -> None:
    provider.streams(CHUNKS[:2])
    reply, body = raw(front, CHAT, "cut")
    assert body.startswith(b"".join(CHUNKS[:2])) and b'"reef"' not in body and DONE not in body
    error = payloads(body)[-1]["error"]
    assert "connection error" in error["message"], "a word agents try again on"
    found = record(front, "cut", reply.headers["x-reef-agent-record-id"])
    assert not found["complete"] and found["error"] and found["response"]["content"] == "Hello"
    answer = front.client().post("/reef/report", json={"score": 1, "references": [found["id"]]}).json()
    assert answer["eligible"][0]["eligible"] is False


@pytest.mark.parametrize(("path", "last"), [(CHAT, "error"), (MESSAGES, "event: error"), (RESPONSES, "event: response.failed")])
def test_every_dialect_is_told_when_its_stream_breaks(front: Server, provider: Upstream, path: str, last: str) -> None:
    provider.streams(CHUNKS[:2], cut=True)
    reply, body = raw(front, path, "breaks")
    assert reply.status_code == 200 and last in body.decode().split("\n\n")[-2]
    assert not record(front, "breaks", reply.headers["x-reef-agent-record-id"])["complete"]


def test_tool_calls_reach_a_client_of_another_dialect(front: Server, provider: Upstream) -> None:
    provider.calls = [("call_a", "bash", '{"command":"ls -la"}')]
    _, body = raw(front, MESSAGES, "tools", tools=[{"name": "bash", "input_schema": {"type": "object"}}])
    events = payloads(body)
    assert [one["type"] for one in events][:2] == ["message_start", "content_block_start"]
    arguments = "".join(
        one["delta"]["partial_json"] for one in events if one.get("delta", {}).get("type") == "input_json_delta"
    )
    assert json.loads(arguments) == {"command": "ls -la"}
    assert events[-1]["type"] == "message_stop" and events[-1]["reef"]["agent_record_id"]


def test_sampling_fields_reach_the_provider_verbatim(front: Server, provider: Upstream) -> None:
    unusual = {
        "top_k": 7,
        "logit_bias": {"50256": -100},
        "made_up": {"a": [1.50, "é"]},
        "stream_options": {"include_usage": True},
    }
    client = front.client(**{"x-reef-scenario": "verbatim"})
    content = json.dumps(
        {**ask(CHAT), "model": "stub-model", "stream": False, **unusual}, indent=3, ensure_ascii=False
    ).encode()
    assert client.post(CHAT, content=content).status_code == 200
    assert provider.seen[-1].raw == content
    raw(front, CHAT, "verbatim", **unusual)
    assert {name: provider.seen[-1].body[name] for name in unusual} == unusual


def test_a_client_that_leaves_takes_the_call_along(front: Server, provider: Upstream) -> None:
    provider.left.clear()
    provider.streams(CHUNKS[:1], hang=True)
    with front.client(**{"x-reef-scenario": "leaves"}).stream("POST", CHAT, json=ask(CHAT)) as reply:
        receipt = reply.headers["x-reef-agent-record-id"]
        assert next(reply.iter_raw()) == CHUNKS[0]
    until(provider.left.is_set, "the call upstream being cancelled", 20)
    until(lambda: front.client().get(f"/reef/scenarios/leaves/records/{receipt}").status_code == 200, "the record")
    found = record(front, "leaves", receipt)
    assert not found["complete"] and found["error"] == "client_disconnected"


def test_chunks_are_passed_on_as_they_come(front: Server, provider: Upstream) -> None:
    provider.streams([*CHUNKS, DONE], gap=0.3)
    arrived = []
    with front.client(**{"x-reef-scenario": "flow"}).stream("POST", CHAT, json=ask(CHAT)) as reply:
        for piece in reply.iter_raw():
            arrived.append((time.monotonic(), piece))
    assert [piece for _, piece in arrived[:3]] == CHUNKS
    assert arrived[1][0] - arrived[0][0] > 0.15 and arrived[2][0] - arrived[1][0] > 0.15


def test_an_event_stream_never_answers_with_json(front: Server, provider: Upstream) -> None:
    whole = {
        **HEAD,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}],
    }
    provider.replies(200, whole)
    reply, body = raw(front, CHAT, "json")
    assert reply.headers["content-type"] == "text/event-stream" and body.endswith(DONE)
    assert "".join(c["delta"].get("content") or "" for one in payloads(body) for c in one["choices"]) == "Hi"


def test_the_stream_of_an_anthropic_provider_gains_the_receipt_alone(strict: Server, provider: Upstream) -> None:
    strict.client().post("/reef/scenarios", json={"name": "claude"})
    start = {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 1, "output_tokens": 1}}}
    block = {"type": "tool_use", "id": "t", "name": "bash", "input": {}}
    use = {"type": "content_block_start", "index": 0, "content_block": block}
    part = {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1}'}}
    stop = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 4}}
    sent = [event(one) for one in (start, {"type": "ping"}, use, part, {"type": "content_block_stop", "index": 0}, stop)]
    provider.streams([*sent, event({"type": "message_stop"})])
    reply, body = raw(strict, MESSAGES, "claude")
    assert body.startswith(b"".join(sent))
    last = json.loads(body[len(b"".join(sent)) :].split(b"data: ")[1])
    assert last == {"type": "message_stop", "reef": {"agent_record_id": reply.headers["x-reef-agent-record-id"]}}
    provider.script = None
    client = strict.client(**{"x-reef-scenario": "claude"})
    counted = [client.post(f"{MESSAGES}/count_tokens?beta=true", json=ask(MESSAGES)).json() for _ in range(5)]
    assert counted == [{"input_tokens": 123}] * 5
    assert len(strict.get("/reef/scenarios/claude/records")["records"]) == 1, "counts are not recorded"
