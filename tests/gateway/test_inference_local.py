"""Calls answered by a local engine: tokens as records, true streams, limits, refusals, broken and abandoned answers."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from reef_cli.core.errors import ContextOverflow, EngineError, EngineUnavailable
from reef_cli.gateway.backends.local import engine_ids
from reef_cli.gateway.deps import GatewayOptions
from tests.doubles.engine import WordChat
from tests.gateway.inference_kit import PATHS, H, ask, local, only, payloads, post, stored, with_tool

CALL = 'Sure.\n<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'


def shown(dialect: str, answer: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Text, calls and reasoning of a whole answer in any dialect."""
    match dialect:
        case "chat":
            message = answer["choices"][0]["message"]
            calls = [(c["function"]["name"], orjson.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
            return message["content"] or "", calls, message.get("reasoning_content", "")
        case "messages":
            blocks = answer["content"]
            calls = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
            text = "".join(b["text"] for b in blocks if b["type"] == "text")
            return text, calls, "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
        case _:
            items = answer["output"]
            calls = [(i["name"], orjson.loads(i["arguments"])) for i in items if i["type"] == "function_call"]
            text = "".join(p["text"] for i in items if i["type"] == "message" for p in i["content"])
            return text, calls, "".join(p["text"] for i in items if i["type"] == "reasoning" for p in i["summary"])


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_an_answer_and_its_record_hold_the_engines_tokens(tmp_path: Path, dialect: str) -> None:
    async with local(tmp_path, "<think>hm</think>" + CALL) as (made, engine):
        status, headers, raw = await post(made, PATHS[dialect], ask(dialect, **with_tool(dialect)))
        assert status == 200
        answer = orjson.loads(raw)
        assert shown(dialect, answer) == ("Sure.", [("bash", {"command": "ls"})], "hm")
        receipt = headers["x-reef-agent-record-id"]
        assert answer["id"] == receipt and headers["x-reef-weight-version"] == "base"
        record = stored(made, receipt)
        ids = tuple(engine.chat.encode(engine.text))
        assert record.tokens is not None and record.tokens.fault() is None
        assert record.tokens.prompt_ids == tuple(engine.asked[0].input_ids) and record.tokens.output_ids == ids
        assert record.tokens.loss_mask == (1,) * len(ids) and record.raw_text == engine.text
        assert record.weight_version == "base" and record.release_id == headers["x-reef-release-id"]
        assert "trainable" not in record.usage and record.usage["cached_tokens"] == 2
        assert record.usage["completion_tokens"] == len(ids) and record.finish == "tool_calls"


@pytest.mark.parametrize("dialect", list(PATHS))
@pytest.mark.parametrize(
    "text", ["Plain words, 3 < 4.", "<think>why not</think> So.", CALL, "<think>x</think>" + CALL, '{"a": 1}', ""]
)
async def test_a_stream_says_what_the_whole_answer_says(tmp_path: Path, dialect: str, text: str) -> None:
    async with local(tmp_path, text) as (made, _):
        body = ask(dialect, **with_tool(dialect))
        _, _, whole = await post(made, PATHS[dialect], body)
        status, headers, raw = await post(made, PATHS[dialect], {**body, "stream": True})
        assert status == 200 and headers["content-type"] == "text/event-stream"
        assert gathered(dialect, payloads(raw)) == shown(dialect, orjson.loads(whole))
        record = stored(made, headers["x-reef-agent-record-id"])
        assert record.complete and record.stream and record.tokens is not None and record.raw_text == text


def gathered(dialect: str, events: list[Any]) -> tuple[str, list[tuple[str, Any]], str]:
    """The same of a stream, put together from its deltas alone."""
    if dialect == "chat":
        return _chat(events)
    text, reasoning = "", ""
    calls: dict[int, list[str]] = {}
    for event in events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                calls[event["index"]] = [event["content_block"]["name"], ""]
            case "content_block_delta":
                delta = event["delta"]
                text += delta.get("text", "")
                reasoning += delta.get("thinking", "")
                if "partial_json" in delta:
                    calls[event["index"]][1] += delta["partial_json"]
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                calls[event["output_index"]] = [event["item"]["name"], ""]
            case "response.output_text.delta":
                text += event["delta"]
            case "response.reasoning_summary_text.delta":
                reasoning += event["delta"]
            case "response.function_call_arguments.delta":
                calls[event["output_index"]][1] += event["delta"]
    return text, [(name, orjson.loads(arguments)) for name, arguments in calls.values()], reasoning


def _chat(events: list[Any]) -> tuple[str, list[tuple[str, Any]], str]:
    text, reasoning = "", ""
    calls: dict[int, list[str]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                entry = calls.setdefault(call["index"], ["", ""])
                entry[0] += call["function"].get("name") or ""
                entry[1] += call["function"].get("arguments") or ""
    return text, [(name, orjson.loads(arguments)) for name, arguments in calls.values()], reasoning


async def test_text_streams_token_by_token(tmp_path: Path) -> None:
    async with local(tmp_path, "one two three four") as (made, _engine):
        _, _, raw = await post(made, PATHS["chat"], ask("chat", stream=True))
        deltas = [c["choices"][0]["delta"].get("content") for c in payloads(raw)[:-1] if c["choices"]]
        assert [d for d in deltas if d] == ["one", " two", " three", " four"]


async def test_a_template_that_opens_reasoning_streams_it_as_reasoning(tmp_path: Path) -> None:
    async with local(tmp_path, "because</think>Yes.", chat=WordChat(opens_thinking=True)) as (made, _):
        for streams in (False, True):
            _, _, raw = await post(made, PATHS["chat"], ask("chat", stream=streams))
            found = _chat(payloads(raw)) if streams else shown("chat", orjson.loads(raw))
            assert found == ("Yes.", [], "because")


async def test_the_anthropic_sequence(tmp_path: Path) -> None:
    async with local(tmp_path, "<think>a</think>b" + CALL[5:]) as (made, _):
        _, headers, raw = await post(made, PATHS["messages"], ask("messages", stream=True, **with_tool("messages")))
        events = payloads(raw)
        kinds = [e["type"] for e in events]
        assert kinds == [
            "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
            "content_block_start", "content_block_delta", "content_block_stop", "content_block_start", "content_block_delta",
            "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        assert events[0]["message"]["usage"]["input_tokens"] > 0 and events[3]["delta"]["type"] == "signature_delta"
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        assert events[-1]["reef"] == {"agent_record_id": headers["x-reef-agent-record-id"]}
        assert [line for line in raw.splitlines() if line.startswith(b"event:")] == [
            f"event: {kind}".encode() for kind in kinds
        ]


async def test_the_responses_sequence(tmp_path: Path) -> None:
    async with local(tmp_path, CALL) as (made, _):
        _, headers, raw = await post(made, PATHS["responses"], ask("responses", stream=True, **with_tool("responses")))
        events = payloads(raw)
        kinds = [e["type"].removeprefix("response.") for e in events]
        assert kinds == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        assert events[-1]["reef"] == {"agent_record_id": headers["x-reef-agent-record-id"]}
        assert events[-1]["response"]["output"] == [e["item"] for e in events if e["type"].endswith("output_item.done")]
        assert events[-1]["response"]["usage"]["total_tokens"] > 0


async def test_raw_completions_by_text_and_by_ids(tmp_path: Path) -> None:
    async with local(tmp_path, "<think>kept raw") as (made, engine):
        _, _headers, raw = await post(
            made, "/v1/completions", {"model": "m", "prompt": "once upon", "logprobs": 1, "echo": True}
        )
        choice = orjson.loads(raw)["choices"][0]
        assert choice["text"] == "once upon<think>kept raw" and choice["logprobs"]["tokens"] == [
            "<",
            "think",
            ">",
            "kept",
            " ",
            "raw",
        ]
        assert engine.asked[0].sampling.max_new_tokens == 16
        ids = engine.chat.encode("once upon")
        _, _, raw = await post(made, "/v1/completions", {"model": "m", "prompt": ids, "stream": True, "max_tokens": 3})
        events = payloads(raw)
        assert "".join(e["choices"][0]["text"] for e in events[:-1] if e["choices"]) == "<think>"
        assert events[-3]["choices"][0]["finish_reason"] == "length" and events[-1] == "[DONE]"
        assert list(engine.asked[1].input_ids) == ids


async def test_several_answers_share_one_receipt(tmp_path: Path) -> None:
    async with local(tmp_path) as (made, engine):
        engine.texts = ["first", "second", "third"]
        _, headers, raw = await post(made, PATHS["chat"], ask("chat", n=3, seed=10))
        assert [c["message"]["content"] for c in orjson.loads(raw)["choices"]] == engine.texts
        assert [r.sampling.seed for r in engine.asked] == [10, 11, 12]
        record = stored(made, headers["x-reef-agent-record-id"])
        assert record.response is not None and record.response["content"] == "first"
        assert [o["message"]["content"] for o in record.usage["other_choices"]] == ["second", "third"]
        _, _, raw = await post(made, PATHS["chat"], ask("chat", n=3, stream=True))
        texts = ["", "", ""]
        for chunk in payloads(raw)[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == engine.texts


async def test_one_failing_answer_aborts_the_others(tmp_path: Path) -> None:
    async with local(tmp_path) as (made, engine):
        engine.gap, engine.error, engine.error_after = 0.01, EngineError("the engine broke: server error"), 2
        status, _, _ = await post(made, PATHS["chat"], ask("chat", n=3))
        assert status == 502 and len(engine.aborted) == 3


async def test_logprobs_come_in_the_chat_shape(tmp_path: Path) -> None:
    async with local(tmp_path, "a b") as (made, _):
        _, _, raw = await post(made, PATHS["chat"], ask("chat", logprobs=True))
        content = orjson.loads(raw)["choices"][0]["logprobs"]["content"]
        assert [(c["token"], c["logprob"]) for c in content] == [("a", -0.25), (" ", -0.5), ("b", -0.75)]
        _, _, raw = await post(made, PATHS["chat"], ask("chat", logprobs=True, stream=True))
        choices = [c["choices"][0] for c in payloads(raw)[:-1] if c["choices"]]
        told = [(c["delta"].get("content"), c["logprobs"]["content"]) for c in choices if c["logprobs"]]
        assert [entry for _, entries in told for entry in entries] == content
        assert all("".join(entry["token"] for entry in entries) == text for text, entries in told), (
            "each chunk has its own tokens"
        )


async def test_logprobs_of_text_that_waited_ride_on_the_last_chunk(tmp_path: Path) -> None:
    text = 'Look. <tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    more = {"logprobs": True, "n": 2, **with_tool("chat")}
    async with local(tmp_path, text) as (made, engine):
        engine.texts = [text, "plain words"]
        _, _, raw = await post(made, PATHS["chat"], ask("chat", **more))
        whole = [choice["logprobs"]["content"] for choice in orjson.loads(raw)["choices"]]
        _, _, raw = await post(made, PATHS["chat"], ask("chat", stream=True, **more))
        told: list[list[Any]] = [[], []]
        for chunk in payloads(raw)[:-1]:
            for choice in chunk["choices"]:
                told[choice["index"]] += (choice["logprobs"] or {}).get("content", [])
        assert told == whole


async def test_logprobs_of_streamed_raw_completions_keep_their_offsets(tmp_path: Path) -> None:
    async with local(tmp_path, "once upon a time") as (made, _):
        body = {"model": "m", "prompt": "tell", "logprobs": 1}
        whole = orjson.loads((await post(made, "/v1/completions", body))[2])["choices"][0]["logprobs"]
        _, _, raw = await post(made, "/v1/completions", {**body, "stream": True})
        parts = [c["choices"][0]["logprobs"] for c in payloads(raw)[:-1] if c["choices"] and c["choices"][0]["logprobs"]]
        assert len(parts) > 1
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for part in parts for value in part[name]] == whole[name]


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 3}),
        ("tool_choice", {"tool_choice": "required", **with_tool("chat")}),
        ("image_url", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
        ("made_up", {"made_up": 1}),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, field: str, more: dict[str, Any]) -> None:
    async with local(tmp_path) as (made, engine):
        for streams in (False, True):
            status, _, raw = await post(made, PATHS["chat"], {**ask("chat", stream=streams), **more})
            error = orjson.loads(raw)["error"]
            assert status == 400 and error["code"] == "unsupported_field" and field in error["message"] + str(error["param"])
        assert engine.asked == [] and made.records() == 0


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "stream", "messages", "n", "stop", "tools", "logit_bias"])
async def test_wrong_types_are_named(tmp_path: Path, field: str) -> None:
    async with local(tmp_path) as (made, _):
        wrong: Any = {"logit_bias": {"x": 1}, "stop": 5, "tools": [{"type": "function"}]}.get(field, "wrong")
        status, _, raw = await post(made, PATHS["chat"], {**ask("chat"), field: wrong})
        error = orjson.loads(raw)["error"]
        assert status == 400 and error["code"] == "invalid_request" and error["param"] == field


@pytest.mark.parametrize(
    ("dialect", "phrase"),
    [
        ("chat", "maximum context length is 20 tokens"),
        ("messages", "prompt is too long: "),
        ("responses", "maximum context length is 20 tokens"),
    ],
)
async def test_overflow_uses_the_words_agents_know(tmp_path: Path, dialect: str, phrase: str) -> None:
    async with local(tmp_path, chat=WordChat(context_length=20)) as (made, engine):
        for streams in (False, True):
            status, _, raw = await post(made, PATHS[dialect], ask(dialect, "word " * 30, stream=streams))
            assert status == 400 and phrase in orjson.loads(raw)["error"]["message"]
        assert made.records() == 0 and engine.asked == []


async def test_an_overflow_the_engine_finds_is_worded_alike(tmp_path: Path) -> None:
    async with local(tmp_path) as (made, engine):
        engine.error = ContextOverflow("too many tokens for the cache")
        for streams in (False, True):
            status, _, raw = await post(made, PATHS["chat"], ask("chat", stream=streams))
            assert status == 400 and "maximum context length is" in orjson.loads(raw)["error"]["message"]


async def test_limits_are_trimmed_to_the_context(tmp_path: Path) -> None:
    async with local(tmp_path, chat=WordChat(context_length=100)) as (made, engine):
        for limit in (32000, 7, None):
            await post(made, PATHS["chat"], ask("chat", **({"max_tokens": limit} if limit else {})))
        room = 100 - len(engine.asked[0].input_ids)
        assert [r.sampling.max_new_tokens for r in engine.asked] == [room, 7, room]


async def test_sampling_reaches_the_engine_and_truncated_sampling_never_trains(tmp_path: Path) -> None:
    async with local(tmp_path) as (made, engine):
        more = {"temperature": 0.5, "top_p": 0.9, "stop": ["END"], "seed": 3, "presence_penalty": 0.25, "logit_bias": {"7": -1}}
        _, headers, _ = await post(made, PATHS["chat"], ask("chat", **more))
        sampling = engine.asked[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.stop, sampling.seed) == (0.5, 0.9, ("END",), 3)
        assert (sampling.presence_penalty, dict(sampling.logit_bias)) == (0.25, {7: -1.0})
        record = stored(made, headers["x-reef-agent-record-id"])
        assert record.usage["trainable"] is False and record.usage["untrainable"] == "truncated_sampling"
        assert record.tokens is not None and record.tokens.temperature == 0.5
        for coldest in (0, 7e-118):
            _, headers, _ = await post(made, PATHS["chat"], ask("chat", temperature=coldest))
            assert stored(made, headers["x-reef-agent-record-id"]).usage["untrainable"] == "greedy"
            assert engine.asked[-1].sampling.temperature == 0, "what cannot be divided by is greedy"
        _, headers, _ = await post(made, PATHS["chat"], ask("chat"), **{"x-reef-tag-trial": "t"})
        _, headers, _ = await post(made, PATHS["chat"], ask("chat"))
        rows = made.log.page("s1")
        assert [row.trainable_tokens > 0 for row in rows] == [False, False, False, False, True], (
            "what cannot train is not counted"
        )
        assert rows[-1].id == headers["x-reef-agent-record-id"] and all(row.output_tokens for row in rows)


@pytest.mark.parametrize(("dialect", "said"), [("chat", "length"), ("messages", "max_tokens"), ("responses", "incomplete")])
async def test_a_cut_answer_says_so(tmp_path: Path, dialect: str, said: str) -> None:
    async with local(tmp_path, "one two three four") as (made, _):
        name = {"chat": "max_completion_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}[dialect]
        for streams in (False, True):
            _, _, raw = await post(made, PATHS[dialect], {**ask(dialect, stream=streams), name: 3})
            assert f'"{said}"'.encode() in raw
        assert all(row.complete for row in made.log.page("s1"))


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_an_engine_that_breaks_midway_ends_the_stream_with_an_error(tmp_path: Path, dialect: str) -> None:
    async with local(tmp_path) as (made, engine):
        engine.error, engine.error_after, engine.gap = EngineError("the engine broke"), 2, 0.01
        status, headers, raw = await post(made, PATHS[dialect], ask(dialect, stream=True))
        last = payloads(raw)[-1]
        assert status == 200 and b'reef"' not in raw
        assert "error" in last or last["type"] == "response.failed"
        record = stored(made, headers["x-reef-agent-record-id"])
        assert not record.complete and (record.error or "").startswith("engine_error") and record.tokens is None
        assert record.response is not None and record.response["content"] == "Hello"


async def test_an_engine_that_aborts_gives_no_answer(tmp_path: Path) -> None:
    async with local(tmp_path) as (made, engine):
        engine.finish = "abort"
        assert (await post(made, PATHS["chat"], ask("chat")))[0] == 502
        _, _, raw = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert "error" in payloads(raw)[-1]
        assert [row.complete for row in made.log.page("s1")] == [False, False]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_engine_that_is_not_there_is_a_real_503(tmp_path: Path, streams: bool) -> None:
    async with local(tmp_path) as (made, engine):
        engine.error = EngineUnavailable("the engine is restarting")
        status, headers, _ = await post(made, PATHS["chat"], ask("chat", stream=streams))
        assert status == 503 and "retry-after" in headers and made.records() == 0


async def happens(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_aborts_the_engine(tmp_path: Path, streams: bool) -> None:
    async with local(tmp_path, "word " * 1000) as (made, engine):
        engine.gap = 0.02

        async def read() -> None:
            async with made.client.post(PATHS["chat"], json=ask("chat", stream=streams), headers=H) as answer:
                await answer.read()

        client = asyncio.create_task(read())
        await happens(lambda: bool(engine.asked))
        client.cancel()
        await happens(lambda: bool(made.records()))
        assert len(engine.aborted) == 1
        record = only(made)
        assert not record.complete and record.error == "client_disconnected"


async def test_waiting_for_the_first_token_is_not_silent(tmp_path: Path) -> None:
    async with local(tmp_path, options=GatewayOptions(keep_alive_s=0.1)) as (made, engine):
        engine.delay = 1.4
        _, _, raw = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert raw.count(b": keep-alive") >= 2 and only(made).complete


async def test_capture_off_serves_without_record(tmp_path: Path) -> None:
    async with local(tmp_path) as (made, _):
        for streams in (False, True):
            status, headers, raw = await post(made, PATHS["chat"], ask("chat", stream=streams), **{"x-reef-capture": "off"})
            assert status == 200 and b"reef" not in raw and "x-reef-agent-record-id" not in headers
        assert made.records() == 0


async def test_token_counts_and_models(tmp_path: Path) -> None:
    async with local(tmp_path) as (made, engine):
        _, _, raw = await post(made, "/v1/messages/count_tokens", ask("messages", "one two"))
        assert orjson.loads(raw)["input_tokens"] == len(engine.chat.render([{"role": "user", "content": "one two"}]))
        assert made.records() == 0
        assert (await made.get("/v1/models"))["data"] == [
            {"id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "reef"}
        ]
        assert (await made.get("/v1/models/tiny"))["id"] == "tiny"
        assert (await made.send("GET", "/v1/models/other"))[0] == 404


async def test_a_published_release_is_what_the_engine_is_asked_for(tmp_path: Path) -> None:
    async with local(tmp_path) as (made, _engine):
        first = await made.chat("s1")
        base = made.releases.head("s1")
        assert base is not None
        lora = await made.publishing.publish("s1", made.draft("a"), base.release_id)
        _, headers, _ = await post(made, PATHS["chat"], ask("chat", stream=True))
        assert headers["x-reef-release-id"] == lora.release_id and headers["x-reef-weight-version"] == f"s1@{lora.release_id}"
        assert stored(made, headers["x-reef-agent-record-id"]).weight_version == f"s1@{lora.release_id}"
        _, headers, _ = await post(made, PATHS["chat"], ask("chat"), **{"x-reef-release-id": base.release_id})
        assert headers["x-reef-weight-version"] == "base" and stored(made, first).weight_version == "base"


@pytest.mark.parametrize("value", [100.5, -101, 3.4028235677973366e38, 1e300])
async def test_a_bias_beyond_the_documented_range_is_refused(tmp_path: Path, value: float) -> None:
    """Near the greatest float the engine's log-probs would be no numbers."""
    async with local(tmp_path) as (made, engine):
        status, _, raw = await post(made, PATHS["chat"], {**ask("chat"), "logit_bias": {"0": value}})
        assert (status, orjson.loads(raw)["error"]["param"]) == (400, "logit_bias")
        assert engine.asked == [] and made.records() == 0


@pytest.mark.parametrize("count", [1, 2, 10, 11, 101])
def test_ending_one_answer_in_the_engine_ends_no_other(count: int) -> None:
    ids = engine_ids("0" * 32, count)
    assert len(set(ids)) == count
    assert not [(one, other) for one in ids for other in ids if one != other and other.startswith(one)]
