"""Calls passed to a provider of the same dialect: bytes both ways, receipts, statuses, framing, broken streams."""

import asyncio
import re
from itertools import pairwise
from pathlib import Path

import aiohttp
import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reef_cli.gateway import sse
from reef_cli.gateway.backends.provider import Provider
from reef_cli.gateway.deps import GatewayOptions
from tests.doubles.upstream import data, event
from tests.gateway.fakes import AUTH
from tests.gateway.inference_kit import API, PATHS, H, ask, only, payloads, post, relaying, stored

CHUNKS = [
    data(
        {
            "id": "c1",
            "object": "chat.completion.chunk",
            "created": 5,
            "model": "m",
            "choices": [{"index": 0, "delta": d, "finish_reason": f}],
        }
    )
    for d, f in (({"role": "assistant", "content": "Hel"}, None), ({"content": "lo"}, None), ({}, "stop"))
]
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"1", b"null"])
async def test_a_body_that_is_no_object_goes_nowhere(tmp_path: Path, body: bytes) -> None:
    async with relaying(tmp_path) as (made, up):
        status, _, answer = await post(made, PATHS["chat"], body)
        assert status == 400 and b"must be a JSON object" in answer
        assert up.seen == [] and made.records() == 0


async def test_truncated_json_leaves_the_connection_usable(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        status, _, _ = await post(made, PATHS["chat"], b'{"messages": [')
        assert status == 400 and up.seen == []
        assert (await post(made, PATHS["chat"], ask("chat")))[0] == 200


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_the_providers_bytes_and_the_clients_bytes_pass(tmp_path: Path, dialect: str) -> None:
    async with relaying(tmp_path, API[dialect]) as (made, up):
        raw = orjson.dumps(ask(dialect, top_k=7, logit_bias={"5": 1.5}, unusual={"a": [1, 2.50]})).replace(b":", b" : ")
        status, headers, answer = await post(
            made, PATHS[dialect] + "?beta=true", raw, **{"x-custom": "kept", "Connection": "x-hop", "x-hop": "1"}
        )
        assert status == 200
        seen = up.seen[0]
        assert seen.raw == raw and seen.path == PATHS[dialect] and seen.query == "beta=true"
        names = {name.lower() for name in seen.headers}
        assert "x-custom" in names and "x-hop" not in names
        assert not any(name.startswith("x-reef") for name in names) and AUTH["Authorization"] not in seen.headers.values()
        sent_key = seen.headers.get("x-api-key") if dialect == "messages" else seen.headers.get("Authorization")
        assert sent_key == ("the-provider-key" if dialect == "messages" else "Bearer the-provider-key")
        record = stored(made, headers["x-reef-agent-record-id"])
        assert record.request == raw and record.complete and record.tokens is None
        assert record.response is not None and record.response["content"] == up.text
        assert record.usage["prompt_tokens"] == 100 and record.usage["cached_tokens"] == 10
        assert headers["x-reef-release-id"] == record.release_id
        up.replies(200, raw_answer := answer)
        assert (await post(made, PATHS[dialect], ask(dialect)))[2] == raw_answer


async def test_the_receipt_frame_stands_right_before_done(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        up.streams([*CHUNKS, DONE])
        status, headers, answer = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert status == 200 and headers["content-type"] == "text/event-stream"
        assert answer.startswith(b"".join(CHUNKS)) and answer.endswith(DONE)
        extra = orjson.loads(answer[len(b"".join(CHUNKS)) : -len(DONE)].removeprefix(b"data: "))
        receipt = headers["x-reef-agent-record-id"]
        assert extra == {
            "id": "c1",
            "object": "chat.completion.chunk",
            "model": "m",
            "created": 5,
            "choices": [],
            "reef": {"agent_record_id": receipt},
        }
        record = stored(made, receipt)
        assert record.complete and record.stream and record.response == {"role": "assistant", "content": "Hello"}
        assert record.finish == "stop" and record.timings["first_s"] >= 0


async def test_the_receipt_is_citable_when_its_frame_arrives(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        up.streams([*CHUNKS, DONE], gap=0.01)
        async with made.client.post(PATHS["chat"], json=ask("chat", stream=True), headers=H) as answer:
            async for line in answer.content:
                if b'"reef"' in line:
                    receipt = orjson.loads(line[6:])["reef"]["agent_record_id"]
                    assert (await made.get(f"/reef/scenarios/s1/records/{receipt}"))["complete"] is True
                    break
            else:
                pytest.fail("no receipt frame")


async def test_a_stream_without_terminator_gives_no_receipt(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        up.streams(CHUNKS[:2])
        _, _, answer = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert answer.startswith(b"".join(CHUNKS[:2])) and b"reef" not in answer and b"[DONE]" not in answer
        error = payloads(answer)[-1]["error"]
        assert "connection error" in error["message"]
        record = only(made)
        assert not record.complete and record.error is not None and record.response == {"role": "assistant", "content": "Hello"}


async def test_a_finished_stream_without_done_is_kept_incomplete_and_not_contradicted(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        up.streams(CHUNKS)
        _, _, answer = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert answer == b"".join(CHUNKS)
        assert not only(made).complete


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_a_broken_connection_ends_in_the_dialects_error(tmp_path: Path, dialect: str) -> None:
    async with relaying(tmp_path, API[dialect]) as (made, up):
        first = {
            "chat": CHUNKS[0],
            "messages": event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}}),
            "responses": event({"type": "response.output_text.delta", "output_index": 0, "delta": "Hel"}),
        }[dialect]
        up.streams([first], gap=0.05, cut=True)
        status, _, answer = await post(made, PATHS[dialect], ask(dialect, stream=True))
        last = payloads(answer)[-1]
        assert status == 200 and answer.startswith(first)
        message = {
            "chat": lambda: last["error"]["message"],
            "messages": lambda: last["error"]["message"],
            "responses": lambda: last["response"]["error"]["message"],
        }[dialect]()
        assert "connection error" in message
        assert {
            "chat": "error" in last,
            "messages": last.get("type") == "error",
            "responses": last.get("type") == "response.failed",
        }[dialect]
        record = only(made)
        assert not record.complete and record.response is not None and record.response["content"] == "Hel"


@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_the_terminal_event_gains_the_receipt_and_nothing_else_changes(tmp_path: Path, dialect: str) -> None:
    async with relaying(tmp_path, API[dialect]) as (made, up):
        up.calls = [("call_1", "bash", '{"command":"ls -la"}')]
        up.reasoning = "Let me think."
        up.text = ""
        body = ask(dialect, stream=True)
        _, headers, answer = await post(made, PATHS[dialect], body)
        async with aiohttp.ClientSession() as session, session.post(up.url + PATHS[dialect], json=body) as plain:
            direct = await plain.read()
        receipt = headers["x-reef-agent-record-id"].encode()
        assert (
            answer
            == direct[: direct.rindex(b"}")] + b',"reef":{"agent_record_id":"' + receipt + b'"}' + direct[direct.rindex(b"}") :]
        )
        record = stored(made, receipt.decode())
        assert record.complete and record.response is not None
        assert record.response["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":"ls -la"}'}
        assert record.response["reasoning_content"] == "Let me think." and record.finish == "tool_calls"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (400, 400),
        (401, 401),
        (403, 403),
        (404, 404),
        (408, 408),
        (409, 409),
        (413, 413),
        (422, 422),
        (429, 429),
        (451, 400),
        (500, 502),
        (503, 502),
        (529, 502),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_statuses_are_relayed_with_the_providers_words(tmp_path: Path, theirs: int, ours: int, streams: bool) -> None:
    async with relaying(tmp_path) as (made, up):
        words = {"error": {"message": "the provider says no", "type": "x", "code": "odd"}}
        up.replies(theirs, words, headers={"retry-after": "7"})
        status, headers, answer = await post(made, PATHS["chat"], ask("chat", stream=streams))
        assert status == ours and orjson.loads(answer) == words
        assert headers["retry-after"] == "7" and "x-reef-agent-record-id" not in headers
        assert only(made).complete is False


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_plain_text_errors_are_put_in_the_dialects_shape(tmp_path: Path, dialect: str) -> None:
    async with relaying(tmp_path, API[dialect]) as (made, up):
        up.replies(502, b"Bad gateway from proxy")
        status, _, answer = await post(made, PATHS[dialect], ask(dialect))
        error = orjson.loads(answer)["error"]
        assert (
            status == 502
            and "Bad gateway from proxy" in error["message"]
            and re.search("connection error|server error", error["message"])
        )
        up.replies(429, b"")
        status, headers, _ = await post(made, PATHS[dialect], ask(dialect))
        assert status == 429 and int(headers["retry-after"]) >= 1


@pytest.mark.parametrize("body", [b"not json", b"[]", b"{}", b'{"choices": 5}', b'{"choices": [7]}'])
async def test_a_broken_answer_is_a_502_and_an_incomplete_record(tmp_path: Path, body: bytes) -> None:
    async with relaying(tmp_path) as (made, up):
        up.replies(200, body)
        assert (await post(made, PATHS["chat"], ask("chat")))[0] == 502
        record = only(made)
        assert not record.complete and (record.error or "").startswith("upstream_error")


async def test_nobody_listening_is_a_502(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, _):
        made.deps.backend.provider = Provider("http://127.0.0.1:9", "openai", None)  # type: ignore[attr-defined]
        for streams in (False, True):
            status, _, answer = await post(made, PATHS["chat"], ask("chat", stream=streams))
            assert status == 502 and b"connection error" in answer and b"127.0.0.1" not in answer


@pytest.mark.parametrize("streams", [False, True])
async def test_silence_is_a_504(tmp_path: Path, streams: bool) -> None:
    async with relaying(tmp_path, timeout_s=0.2) as (made, up):
        up.replies(200, {}, delay=5)
        status, _, answer = await post(made, PATHS["chat"], ask("chat", stream=streams))
        assert status == 504 and orjson.loads(answer)["error"]["code"] == "upstream_timeout"
        assert (only(made).error or "").startswith("upstream_timeout")


async def test_silence_in_a_stream_ends_it_with_an_error(tmp_path: Path) -> None:
    async with relaying(tmp_path, timeout_s=0.3) as (made, up):
        up.streams(CHUNKS[:1], hang=True)
        _, _, answer = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert re.search("time-?out", payloads(answer)[-1]["error"]["message"], re.IGNORECASE)
        assert (only(made).error or "").startswith("upstream_timeout")


async def test_a_large_body_passes_whole(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        raw = orjson.dumps(ask("chat", "x" * (3 * 1024 * 1024)))
        status, headers, _ = await post(made, PATHS["chat"], raw)
        assert status == 200 and up.seen[0].raw == raw
        assert stored(made, headers["x-reef-agent-record-id"]).request == raw


@pytest.mark.parametrize("streams", [False, True])
async def test_capture_off_leaves_nothing(tmp_path: Path, streams: bool) -> None:
    async with relaying(tmp_path) as (made, up):
        body = ask("chat", stream=streams)
        status, headers, answer = await post(made, PATHS["chat"], body, **{"x-reef-capture": "off"})
        assert status == 200 and b"reef" not in answer and "x-reef-agent-record-id" not in headers
        assert up.seen[0].body == body and made.records() == 0


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_obfuscation": False}])
async def test_usage_is_asked_for_the_record_and_not_shown(tmp_path: Path, options: dict[str, bool] | None) -> None:
    async with relaying(tmp_path) as (made, up):
        more = {} if options is None else {"stream_options": options}
        _, headers, answer = await post(made, PATHS["chat"], ask("chat", stream=True, **more))
        assert up.seen[0].body["stream_options"] == {**(options or {}), "include_usage": True}
        assert not any(isinstance(chunk, dict) and chunk.get("usage") for chunk in payloads(answer))
        assert stored(made, headers["x-reef-agent-record-id"]).usage["completion_tokens"] == 7


async def test_usage_the_client_asked_for_is_shown_and_the_body_untouched(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        raw = orjson.dumps(ask("chat", stream=True, stream_options={"include_usage": True}))
        _, _, answer = await post(made, PATHS["chat"], raw)
        assert up.seen[0].raw == raw and any(isinstance(chunk, dict) and chunk.get("usage") for chunk in payloads(answer))


async def test_the_configured_model_replaces_only_the_name(tmp_path: Path) -> None:
    async with relaying(tmp_path, model="real-model") as (made, up):
        raw = b'{"messages" : [{"role":"user","content":"the \\"model\\": \\"m\\""}],\n "model" : "m" , "temperature": 0.50}'
        assert (await post(made, PATHS["chat"], raw))[0] == 200
        assert up.seen[0].raw == raw.replace(b'"model" : "m"', b'"model" : "real-model"')


async def test_json_in_answer_to_a_stream_becomes_a_stream(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        choice = {"index": 0, "message": {"role": "assistant", "content": "whole"}, "finish_reason": "stop"}
        up.replies(200, {"id": "x", "choices": [choice]})
        status, headers, answer = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert status == 200 and headers["content-type"] == "text/event-stream" and answer.endswith(DONE)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in payloads(answer)[:-1] if c["choices"]) == "whole"
        assert stored(made, headers["x-reef-agent-record-id"]).complete


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_silence_is_broken_by_keepalives_and_headers_go_out(tmp_path: Path, dialect: str) -> None:
    async with relaying(tmp_path, API[dialect], options=GatewayOptions(keep_alive_s=0.1)) as (made, up):
        inner, go = up._answer, asyncio.Event()

        async def slow(request, raw):  # type: ignore[no-untyped-def]
            await go.wait()
            return await inner(request, raw)

        up.script = slow
        beat = {"chat": b": keep-alive", "messages": b"event: ping", "responses": b"event: response.in_progress"}[dialect]
        raw = b""
        # The provider says nothing until the client has its headers and three beats.
        async with asyncio.timeout(8), made.client.post(PATHS[dialect], json=ask(dialect, stream=True), headers=H) as answer:
            while raw.count(beat) < 3:
                raw += await answer.content.readany()
            go.set()
            raw += await answer.read()
        assert only(made).complete and b'"reef"' in raw


async def test_a_late_refusal_becomes_an_error_frame(tmp_path: Path) -> None:
    async with relaying(tmp_path, options=GatewayOptions(keep_alive_s=0.1)) as (made, up):
        up.replies(429, {"error": {"message": "slow down"}}, delay=0.25)
        status, _, answer = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert status == 200 and "slow down" in payloads(answer)[-1]["error"]["message"]
        assert not only(made).complete


async def test_an_error_inside_the_stream_passes_and_spoils_the_record(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        frames = [CHUNKS[0], data({"error": {"message": "upstream died", "type": "server_error", "code": 502}}), DONE]
        up.streams(frames)
        _, _, answer = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert answer == b"".join(frames)
        record = only(made)
        assert not record.complete and "upstream died" in (record.error or "")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_takes_the_upstream_call_along(tmp_path: Path, streams: bool) -> None:
    async with relaying(tmp_path) as (made, up):
        if streams:
            up.streams(CHUNKS[:1], hang=True)
        else:
            up.replies(200, {}, delay=30)
        asking = asyncio.create_task(post(made, PATHS["chat"], ask("chat", stream=streams)))
        while not up.seen:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait_for(up.left.wait(), 10)
        for _ in range(100):
            if made.records():
                break
            await asyncio.sleep(0.02)
        record = only(made)
        assert not record.complete and record.error == "client_disconnected"


async def test_connections_to_the_provider_are_used_again(tmp_path: Path) -> None:
    async with relaying(tmp_path) as (made, up):
        ports = set()
        inner = up._answer

        async def note(request, raw):  # type: ignore[no-untyped-def]
            ports.add(request.transport.get_extra_info("peername")[1])
            return await inner(request, raw)

        up.script = note
        for streams in (False, True, False, True, True):
            assert (await post(made, PATHS["chat"], ask("chat", stream=streams)))[0] == 200
        assert len(ports) == 1


async def test_models_and_token_counts(tmp_path: Path) -> None:
    async with relaying(tmp_path, "anthropic") as (made, _):
        async with made.client.get("/v1/models", headers={**AUTH, "anthropic-version": "2023-06-01"}) as answer:
            assert (await answer.json())["data"][0]["id"] == "stub-model"
        status, _, answer_ = await post(made, "/v1/messages/count_tokens?beta=true", ask("messages"))
        assert status == 200 and orjson.loads(answer_) == {"input_tokens": 123} and made.records() == 0
    async with relaying(tmp_path / "b", "openai") as (made, _up):
        assert (await made.get("/v1/models"))["data"][0]["object"] == "model"
        status, headers, answer_ = await post(made, "/v1/messages/count_tokens", ask("messages", "x" * 400))
        assert orjson.loads(answer_)["input_tokens"] > 100 and headers["x-reef-estimate"] == "true"


@pytest.mark.parametrize("path", ["/v1//chat/completions", "/s/s1/v1/chat/completions"])
async def test_tolerated_paths_reach_the_same_route(tmp_path: Path, path: str) -> None:
    async with relaying(tmp_path) as (made, up):
        assert (await post(made, path, ask("chat")))[0] == 200
        assert up.seen[0].path == PATHS["chat"] and made.records() == 1


_TEXT = [CHUNKS[0], b": a comment\n\n", b"event: ping\ndata: {}\n\n", *CHUNKS[1:], DONE]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(newline=st.sampled_from([b"\n", b"\r\n", b"\r"]), cuts=st.lists(st.integers(0, 900), max_size=12))
@example(newline=b"\r\n", cuts=[507])
@example(newline=b"\r\n", cuts=list(range(900)))
def test_any_newline_split_anywhere_passes_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, newline: bytes, cuts: list[int]
) -> None:
    wire = b"".join(_TEXT).replace(b"\n", newline)
    edges = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    parts = [wire[a:b] for a, b in pairwise(edges)]

    async def run() -> None:
        async with relaying(tmp_path_factory.mktemp("split")) as (made, up):
            up.streams(parts)
            _, headers, answer = await post(made, PATHS["chat"], ask("chat", stream=True))
            receipt = headers["x-reef-agent-record-id"].encode()
            before, frame, after = re.split(rb'(data: \{[^\r\n]*"reef"[^\r\n]*' + newline + newline + b")", answer)
            assert (before + after).replace(newline, b"\n").replace(b"\n", b"") == wire.replace(newline, b"")
            assert receipt in frame and after.strip() == b"data: [DONE]"
            assert [e.data for e in sse.events(before)] == [e.data for e in sse.events(b"".join(_TEXT[:-1]))]
            assert stored(made, receipt.decode()).response == {"role": "assistant", "content": "Hello"}

    asyncio.run(run())
