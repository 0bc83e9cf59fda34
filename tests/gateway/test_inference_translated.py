"""A client of one dialect before a provider of another: nothing said is lost, what cannot be said is refused by name."""

from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.gateway.inference_kit import API, PATHS, ask, only, payloads, post, relaying, stored, with_tool
from tests.gateway.test_inference_local import gathered, shown

PAIRS = [(client, provider) for client, provider in product(PATHS, PATHS) if client != provider]
CALLS = [("call_a", "bash", '{"command":"ls"}'), ("call_b", "bash", '{"command":"pwd"}')]
SAID = [("bash", {"command": "ls"}), ("bash", {"command": "pwd"})]


@pytest.mark.parametrize(("client", "provider"), PAIRS)
@pytest.mark.parametrize("streams", [False, True])
async def test_text_reasoning_calls_and_usage_arrive(tmp_path: Path, client: str, provider: str, streams: bool) -> None:
    async with relaying(tmp_path, API[provider]) as (made, up):
        up.reasoning = "Let me think."
        for calls, text in (((), "Grüße ✓"), (CALLS, "")):
            up.calls, up.text = calls, text
            body = ask(client, stream=streams, **with_tool(client))
            status, headers, raw = await post(made, PATHS[client], body)
            assert status == 200 and up.seen[-1].path == PATHS[provider]
            found = gathered(client, payloads(raw)) if streams else shown(client, orjson.loads(raw))
            assert found == (text, SAID if calls else [], "Let me think.")
            record = stored(made, headers["x-reef-agent-record-id"])
            assert record.complete and record.dialect == client
            assert record.usage["prompt_tokens"] == 100 and record.usage["cached_tokens"] == 10
            assert record.finish == ("tool_calls" if calls else "stop")
            assert headers["x-reef-agent-record-id"].encode() in raw


@pytest.mark.parametrize(("client", "provider"), PAIRS)
async def test_stop_reasons_are_translated(tmp_path: Path, client: str, provider: str) -> None:
    whole = {
        "chat": {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "length"}]},
        "messages": {"content": [{"type": "text", "text": "x"}], "stop_reason": "max_tokens"},
        "responses": {
            "output": [{"type": "message", "content": [{"type": "output_text", "text": "x"}]}],
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
        },
    }[provider]
    async with relaying(tmp_path, API[provider]) as (made, up):
        up.replies(200, whole)
        _, _, raw = await post(made, PATHS[client], ask(client))
        answer = orjson.loads(raw)
        said = {
            "chat": lambda: answer["choices"][0]["finish_reason"] == "length",
            "messages": lambda: answer["stop_reason"] == "max_tokens",
            "responses": lambda: answer["status"] == "incomplete",
        }
        assert said[client]() and only(made).finish == "length"


@pytest.mark.parametrize(("client", "provider"), PAIRS)
async def test_errors_take_the_clients_shape(tmp_path: Path, client: str, provider: str) -> None:
    async with relaying(tmp_path, API[provider]) as (made, up):
        up.replies(400, {"error": {"message": "prompt is too long: 210000 tokens > 200000 maximum", "type": "x"}})
        status, _, raw = await post(made, PATHS[client], ask(client))
        answer = orjson.loads(raw)
        assert status == 400 and "prompt is too long: 210000 tokens" in answer["error"]["message"]
        assert answer.get("type") == "error" if client == "messages" else answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("client", "provider"), PAIRS)
async def test_a_cut_stream_ends_in_the_clients_error(tmp_path: Path, client: str, provider: str) -> None:
    async with relaying(tmp_path, API[provider]) as (made, up):
        frames = {"chat": 2, "messages": 4, "responses": 4}[provider]
        inner = up._answer

        async def cut(request: Any, raw: bytes) -> Any:
            from tests.doubles import upstream as double

            wire = {"chat": double.Chat, "messages": double.Messages, "responses": double.Responses}[provider]
            return await double.stream(request, wire(up, orjson.loads(raw)).frames()[:frames])

        up.script = cut
        assert inner is not None
        status, _, raw = await post(made, PATHS[client], ask(client, stream=True))
        last = payloads(raw)[-1]
        assert status == 200 and ("error" in last or last.get("type") == "response.failed") and b"[DONE]" not in raw
        assert not only(made).complete


@pytest.mark.parametrize(
    ("client", "provider", "more", "field"),
    [
        ("chat", "messages", {"seed": 1}, "seed"),
        ("chat", "messages", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", "messages", {"n": 2}, "n"),
        ("chat", "responses", {"stop": ["x"]}, "stop"),
        ("chat", "messages", {"audio": {"voice": "x"}}, "audio"),
        ("responses", "chat", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("messages", "chat", {"container": "c"}, "container"),
        ("messages", "responses", {"stop_sequences": ["x"]}, "stop"),
    ],
)
async def test_what_has_no_counterpart_is_refused_by_name(
    tmp_path: Path, client: str, provider: str, more: dict[str, Any], field: str
) -> None:
    async with relaying(tmp_path, API[provider]) as (made, up):
        status, _, raw = await post(made, PATHS[client], ask(client, **more))
        assert status == 400 and field in orjson.loads(raw)["error"]["message"] and up.seen == [] and made.records() == 0


async def test_what_agents_send_harmlessly_is_mapped_or_left_out(tmp_path: Path) -> None:
    async with relaying(tmp_path, "openai") as (made, up):
        body = {
            **ask("messages", thinking={"type": "adaptive"}, context_management={"edits": []}, metadata={"user_id": "u"}),
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"type": "web_search_20250305", "name": "web_search"}, *with_tool("messages")["tools"]],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "stop_sequences": ["END"],
        }
        assert (await post(made, PATHS["messages"], body))[0] == 200
        sent = up.seen[0].body
        assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
        assert [tool["function"]["name"] for tool in sent["tools"]] == ["bash"]
        assert sent["tool_choice"] == "required" and sent["parallel_tool_calls"] is False and sent["stop"] == ["END"]
        assert sent["max_completion_tokens"] == 64 and not {"thinking", "context_management", "metadata"} & set(sent)


async def test_anthropic_thinking_goes_back_signed_and_only_signed(tmp_path: Path) -> None:
    async with relaying(tmp_path, "anthropic") as (made, up):
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "reasoning_content": "signed", "reasoning_signature": "c2ln"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d", "reasoning_content": "unsigned"},
            {"role": "user", "content": "e"},
        ]
        assert (await post(made, PATHS["chat"], {"model": "m", "messages": turns}))[0] == 200
        sent = up.seen[0].body
        assert sent["messages"][1]["content"][0] == {"type": "thinking", "thinking": "signed", "signature": "c2ln"}
        assert sent["messages"][3]["content"] == [{"type": "text", "text": "d"}] and sent["max_tokens"] > 0


async def test_the_clients_own_headers_stay_behind_when_dialects_differ(tmp_path: Path) -> None:
    async with relaying(tmp_path, "openai") as (made, up):
        await post(made, PATHS["messages"], ask("messages"), **{"anthropic-beta": "x", "anthropic-version": "2023-06-01"})
        names = {name.lower() for name in up.seen[0].headers}
        assert not any(name.startswith(("anthropic", "x-reef")) for name in names)


async def test_raw_completions_need_their_own_dialect(tmp_path: Path) -> None:
    async with relaying(tmp_path, "openai") as (made, up):
        status, headers, raw = await post(made, "/v1/completions", {"model": "m", "prompt": "once"})
        assert status == 200 and orjson.loads(raw)["choices"][0]["text"] == up.text
        assert stored(made, headers["x-reef-agent-record-id"]).response == {"role": "assistant", "content": up.text}
        _, headers, raw = await post(made, "/v1/completions", {"model": "m", "prompt": "once", "stream": True})
        assert payloads(raw)[-2]["reef"]["agent_record_id"] == headers["x-reef-agent-record-id"]
        assert stored(made, headers["x-reef-agent-record-id"]).response == {"role": "assistant", "content": up.text}
    async with relaying(tmp_path / "b", "anthropic") as (made, up):
        assert (await post(made, "/v1/completions", {"model": "m", "prompt": "once"}))[0] == 400 and up.seen == []
