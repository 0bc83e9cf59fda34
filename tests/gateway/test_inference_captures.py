"""Real agents' requests, as captured, on every dialect of provider and on a local engine."""

from pathlib import Path

import orjson
import pytest

from tests.gateway.inference_kit import API, CAPTURES, PATHS, Capture, captures, local, payloads, post, relaying, stored

ALL = captures()
SERVED = [capture for capture in ALL if capture.dialect in PATHS]


def test_every_capture_is_there() -> None:
    assert len(ALL) == len(list(CAPTURES.glob("*.json"))) >= 45
    assert {capture.dialect for capture in ALL} == {*PATHS, "count_tokens"}


def ended(capture: Capture, raw: bytes, receipt: str) -> None:
    """The answer ends as its client needs it, and hands over the receipt."""
    if not capture.body.get("stream"):
        assert isinstance(orjson.loads(raw), dict)
        return
    events = payloads(raw)
    if capture.dialect == "chat":
        assert events[-1] == "[DONE]" and events[-2]["reef"] == {"agent_record_id": receipt}
        usage = [event for event in events[:-1] if event.get("usage")]
        assert bool(usage) == bool((capture.body.get("stream_options") or {}).get("include_usage"))
        assert any(choice["finish_reason"] for event in events[:-1] for choice in event["choices"])
    else:
        kind = {"messages": "message_stop", "responses": "response.completed"}[capture.dialect]
        assert events[-1]["type"] == kind and events[-1]["reef"] == {"agent_record_id": receipt}


@pytest.mark.parametrize("api", list(PATHS))
async def test_providers_serve_them_all(tmp_path: Path, api: str) -> None:
    async with relaying(tmp_path, API[api]) as (made, up):
        for capture in SERVED:
            raw = orjson.dumps(capture.body)
            status, headers, answer = await post(made, capture.path, raw, **capture.headers)
            assert status == 200, (capture.name, answer)
            receipt = headers["x-reef-agent-record-id"]
            ended(capture, answer, receipt)
            record = stored(made, receipt)
            assert record.complete and record.request == raw and len(record.messages) > 0, capture.name
            assert record.response is not None and record.response["content"] == up.text, capture.name
            assert record.usage["prompt_tokens"] == 100, capture.name
            if api == capture.dialect and api != "chat":
                assert up.seen[-1].raw == raw, capture.name
            if api == capture.dialect:
                changed = {name for name, value in up.seen[-1].body.items() if capture.body.get(name) != value}
                assert changed <= {"stream_options"}, capture.name


async def test_a_local_engine_serves_them_all(tmp_path: Path) -> None:
    async with local(tmp_path) as (made, engine):
        for capture in SERVED:
            status, headers, answer = await post(made, capture.path, capture.body, **capture.headers)
            assert status == 200, (capture.name, answer)
            receipt = headers["x-reef-agent-record-id"]
            ended(capture, answer, receipt)
            record = stored(made, receipt)
            assert record.complete and record.raw_text == engine.text and record.tokens is not None, capture.name


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_tool_loops_survive_translation(tmp_path: Path, dialect: str) -> None:
    """After-tool turns keep every call id, its arguments and its result, whatever the provider speaks."""
    turns = [capture for capture in SERVED if "after" in capture.name]
    async with relaying(tmp_path, API[dialect]) as (made, up):
        for capture in turns:
            status, _, answer = await post(made, capture.path, capture.body, **capture.headers)
            assert status == 200, (capture.name, answer)
            for call_id in call_ids(capture.body):
                assert up.seen[-1].raw.count(call_id.encode()) >= 2, (capture.name, call_id)
            assert b"hello-from-stub" in up.seen[-1].raw


def call_ids(value: object) -> set[str]:
    """Ids of calls that were answered, in any dialect's body."""
    found: set[str] = set()
    if isinstance(value, dict):
        found |= {value[name] for name in ("tool_call_id", "tool_use_id") if name in value}
        if value.get("type") == "function_call_output":
            found.add(value["call_id"])
        for child in value.values():
            found |= call_ids(child)
    elif isinstance(value, list):
        for child in value:
            found |= call_ids(child)
    return found


async def test_count_tokens_is_cheap_and_unrecorded(tmp_path: Path) -> None:
    capture = next(capture for capture in ALL if capture.dialect == "count_tokens")
    async with local(tmp_path) as (made, engine):
        for _ in range(28):
            status, _, answer = await post(made, capture.path, capture.body, **capture.headers)
            assert status == 200 and orjson.loads(answer)["input_tokens"] > 0
        assert engine.asked == [] and made.records() == 0
