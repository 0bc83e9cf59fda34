"""What a translation cannot carry is refused by the client's own name for it, or, for mere hints, told in the answer."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from reef_cli.core.errors import InvalidRequest
from reef_cli.gateway import dialects
from tests.gateway.inference_kit import API, PATHS, ask, local, only, payloads, post, relaying, stored, with_tool

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
LEFT_OUT = "x-reef-left-out"


@pytest.mark.parametrize("streams", [False, True])
async def test_hints_without_effect_are_told_in_the_head_and_kept_in_the_record(tmp_path: Path, streams: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2048}
    body = ask("messages", stream=streams, thinking=thinking, output_config={"effort": "high"}, metadata={"user_id": "u"})
    body["tools"] = [{"type": "web_search_20250305", "name": "web_search"}, *with_tool("messages")["tools"]]
    async with relaying(tmp_path, "openai") as (made, _):
        status, headers, _ = await post(made, PATHS["messages"], body)
        told = headers[LEFT_OUT].split(", ")
        assert status == 200 and sorted(told) == ["metadata", "output_config.effort", "thinking", "tools.web_search_20250305"]
        assert stored(made, headers["x-reef-agent-record-id"]).usage["left_out"] == told
    async with local(tmp_path / "l") as (made, _):
        _, headers, _ = await post(made, PATHS["messages"], body)
        assert headers[LEFT_OUT].split(", ") == told


@pytest.mark.parametrize(
    ("client", "provider", "more", "told"),
    [
        ("chat", "messages", {"reasoning_effort": "high", "store": False, "verbosity": "low"}, "verbosity, reasoning_effort"),
        ("responses", "messages", {"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.summary, reasoning.effort"),
        ("responses", "chat", {"reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content"]}, None),
        (
            "responses",
            "chat",
            {"text": {"verbosity": "low"}, "tools": [{"type": "web_search"}]},
            "text.verbosity, tools.web_search",
        ),
        ("chat", "chat", {"verbosity": "low"}, None),
        ("chat", "responses", {"user": "ä\r\nx-evil: 1"}, "user"),
        ("chat", "responses", {"tools": [{"type": "ä\r\nx"}]}, "tools.???x"),
    ],
)
async def test_what_was_left_out_is_named_and_nothing_else(
    tmp_path: Path, client: str, provider: str, more: dict[str, Any], told: str | None
) -> None:
    async with relaying(tmp_path, API[provider]) as (made, up):
        status, headers, raw = await post(made, PATHS[client], ask(client) | more)
        assert status == 200 and headers.get(LEFT_OUT) == told, raw
        assert ("left_out" in only(made).usage) == (told is not None)
        if client == "responses" and "reasoning" in more and provider == "chat":
            assert up.seen[-1].body["reasoning_effort"] == "high"


@pytest.mark.parametrize("streams", [False, True])
async def test_on_a_local_engine_an_effort_is_told_to_have_none(tmp_path: Path, streams: bool) -> None:
    async with local(tmp_path) as (made, _):
        _, headers, _ = await post(made, PATHS["chat"], ask("chat", stream=streams, reasoning_effort="high"))
        assert headers[LEFT_OUT] == "reasoning_effort"


async def test_a_schema_for_the_answer_is_translated_or_refused_in_the_clients_words(tmp_path: Path) -> None:
    asked = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    async with relaying(tmp_path, "openai") as (made, up):
        assert (await post(made, PATHS["messages"], ask("messages", **asked)))[0] == 200
        form = up.seen[-1].body["response_format"]
        assert form["type"] == "json_schema" and form["json_schema"]["schema"] == SCHEMA and form["json_schema"]["strict"]
        odd = ask("messages", output_config={"format": {"type": "xml"}})
        status, _, raw = await post(made, PATHS["messages"], odd)
        assert status == 400 and b"output_config.format" in raw
    async with relaying(tmp_path / "r", "responses") as (made, up):
        assert (await post(made, PATHS["messages"], ask("messages", **asked)))[0] == 200
        assert up.seen[-1].body["text"]["format"]["schema"] == SCHEMA
    async with relaying(tmp_path / "a", "anthropic") as (made, up):
        form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
        status, _, raw = await post(made, PATHS["responses"], ask("responses") | {"text": {"format": form}})
        assert status == 400 and b"text.format" in raw and up.seen == []
    async with local(tmp_path / "l") as (made, _):
        status, _, raw = await post(made, PATHS["messages"], ask("messages", **asked))
        assert status == 400 and b"output_config.format" in raw and made.records() == 0


TURNS = {
    "function_call": {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    "audio": {"role": "assistant", "content": None, "audio": {"id": "a"}},
}


@pytest.mark.parametrize(
    ("client", "provider", "more", "field"),
    [
        ("chat", "messages", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ("chat", "responses", {"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ("chat", "messages", {"messages": [TURNS["function_call"]]}, "messages[0].function_call"),
        ("chat", "responses", {"messages": [TURNS["audio"]]}, "messages[0].audio"),
        ("responses", "chat", {"top_logprobs": 3}, "top_logprobs"),
        ("responses", "chat", {"include": ["message.output_text.logprobs"]}, "include"),
        ("responses", "messages", {"top_logprobs": 3}, "top_logprobs"),
        ("messages", "responses", {"stop_sequences": ["x"]}, "stop_sequences"),
    ],
)
async def test_what_would_be_lost_is_refused_by_the_clients_name(
    tmp_path: Path, client: str, provider: str, more: dict[str, Any], field: str
) -> None:
    async with relaying(tmp_path, API[provider]) as (made, up):
        status, _, raw = await post(made, PATHS[client], ask(client) | more | with_tool(client))
        error = orjson.loads(raw)["error"]
        assert status == 400 and f"`{field}`" in error["message"] and up.seen == [] and made.records() == 0
        assert client == "messages" or error["param"] == field


async def test_a_local_engine_names_the_message_whose_content_it_cannot_take(tmp_path: Path) -> None:
    from reef_cli.core.errors import UnsupportedField
    from reef_cli.engines.chat_messages import canonical

    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(UnsupportedField, match=r"messages\[1\]") as refused:
        canonical([{"role": "system", "content": "x"}, {"role": "user", "content": [picture]}])
    assert refused.value.details["param"] == "messages[1]"


@pytest.mark.parametrize("provider", ["chat", "responses"])
@pytest.mark.parametrize(
    ("said", "sent"), [("no such file", "Error: no such file"), ("<tool_use_error>x", "<tool_use_error>x")]
)
async def test_a_failed_tool_is_still_a_failed_tool(tmp_path: Path, provider: str, said: str, sent: str) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "bash", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": said, "is_error": True}
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    async with relaying(tmp_path, API[provider]) as (made, up):
        assert (await post(made, PATHS["messages"], ask("messages") | {"messages": turns} | with_tool("messages")))[0] == 200
        last = (up.seen[-1].body.get("messages") or up.seen[-1].body["input"])[-1]
        assert (last.get("content") or last["output"]) == sent
        assert only(made).messages[-1]["is_error"] is True


CHOICES: list[dict[str, Any]] = [
    {"content": None, "refusal": "I cannot do that."},
    {"content": [{"type": "text", "text": "I cannot "}, {"type": "text", "text": "do that."}]},
    {
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
            {"type": "text", "text": "I cannot do that."},
        ]
    },
]


@pytest.mark.parametrize("said", CHOICES)
@pytest.mark.parametrize("client", ["messages", "responses"])
async def test_refusals_and_content_in_parts_reach_the_client(tmp_path: Path, client: str, said: dict[str, Any]) -> None:
    async with relaying(tmp_path, "openai") as (made, up):
        up.replies(200, {"choices": [{"index": 0, "message": {"role": "assistant", **said}, "finish_reason": "stop"}]})
        status, headers, raw = await post(made, PATHS[client], ask(client))
        assert status == 200 and b"I cannot do that." in raw and (b"Hm." in raw) == ("Hm." in str(said))
        record = stored(made, headers["x-reef-agent-record-id"])
        assert record.response is not None and record.response["content"] == "I cannot do that."


@pytest.mark.parametrize("said", CHOICES)
async def test_they_do_in_streams_too(tmp_path: Path, said: dict[str, Any]) -> None:
    from tests.doubles import upstream as double

    async with relaying(tmp_path, "openai") as (made, up):

        async def parts(request: Any, raw: bytes) -> Any:
            chunks: list[dict[str, Any]] = [{"index": 0, "delta": said}, {"index": 0, "delta": {}, "finish_reason": "stop"}]
            frames = [b"data: " + orjson.dumps({"id": "x", "choices": [chunk]}) + b"\n\n" for chunk in chunks]
            return await double.stream(request, [*frames, b"data: [DONE]\n\n"])

        up.script = parts
        _, _, raw = await post(made, PATHS["messages"], ask("messages", stream=True))
        deltas = [event["delta"] for event in payloads(raw) if event["type"] == "content_block_delta"]
        assert "".join(delta.get("text", "") for delta in deltas) == "I cannot do that."
        assert "".join(delta.get("thinking", "") for delta in deltas) == ("Hm." if "Hm." in str(said) else "")


async def test_reasoning_that_is_signed_but_unsaid_goes_back_to_its_provider(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_signature": "c2ln"},
        {"role": "user", "content": "c"},
    ]
    async with relaying(tmp_path, "anthropic") as (made, up):
        assert (await post(made, PATHS["chat"], {"model": "m", "messages": turns}))[0] == 200
        block = up.seen[0].body["messages"][1]["content"][0]
        assert block == {"type": "thinking", "thinking": "", "signature": "c2ln"}


@pytest.mark.parametrize("include", [1.5, "message.output_text.logprobs", {"a": 1}, [1], True])
def test_an_include_that_is_no_list_of_names_is_refused_by_name(include: Any) -> None:
    with pytest.raises(InvalidRequest, match="`include` must be an array of strings") as caught:
        dialects.parse("responses", {"model": "m", "input": "hi", "include": include})
    assert caught.value.details["param"] == "include"
