"""The official OpenAI and Anthropic clients through a real socket: whole and streamed, with tools, before every backend."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.fakes import TOKEN, House
from tests.gateway.inference_kit import API, local, relaying, stored, with_tool

CALL = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
USER: Any = [{"role": "user", "content": "run it"}]
BACKENDS = ["local", "chat", "messages", "responses"]


@asynccontextmanager
async def backed(home: Path, kind: str, calls: bool = False) -> AsyncIterator[House]:
    """A gateway over any backend that answers `Hello.` or calls the tool."""
    if kind == "local":
        async with local(home, CALL if calls else "Hello.") as (made, _):
            yield made
        return
    async with relaying(home, API[kind]) as (made, up):
        up.text, up.calls = ("", [("call_1", "bash", '{"command":"ls"}')]) if calls else ("Hello.", ())
        yield made


def openai_client(made: House) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=str(made.client.make_url("/v1")), api_key=TOKEN, default_headers={"x-reef-scenario": "s1"}, max_retries=0
    )


def anthropic_client(made: House) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=str(made.client.make_url("/")), api_key=TOKEN, default_headers={"x-reef-scenario": "s1"}, max_retries=0
    )


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("calls", [False, True])
async def test_openai_chat(tmp_path: Path, kind: str, calls: bool) -> None:
    async with backed(tmp_path, kind, calls) as made, openai_client(made) as client:
        tools: Any = with_tool("chat")
        answer = await client.chat.completions.create(model="m", messages=USER, **tools)
        check_chat(answer.choices[0].message, calls)
        async with client.chat.completions.stream(
            model="m", messages=USER, stream_options={"include_usage": True}, **tools
        ) as stream:
            receipts = [
                e.chunk.model_extra["reef"] async for e in stream if e.type == "chunk" and "reef" in (e.chunk.model_extra or {})
            ]
            final = await stream.get_final_completion()
        check_chat(final.choices[0].message, calls)
        assert final.choices[0].finish_reason == ("tool_calls" if calls else "stop") and final.usage is not None
        assert len(receipts) == 1 and stored(made, receipts[0]["agent_record_id"]).complete


def check_chat(message: Any, calls: bool) -> None:
    if calls:
        assert [(c.function.name, c.function.arguments.replace(" ", "")) for c in message.tool_calls] == [
            ("bash", '{"command":"ls"}')
        ]
    else:
        assert message.content == "Hello." and not message.tool_calls


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("calls", [False, True])
async def test_openai_responses(tmp_path: Path, kind: str, calls: bool) -> None:
    async with backed(tmp_path, kind, calls) as made, openai_client(made) as client:
        tools: Any = with_tool("responses")
        whole = await client.responses.create(model="m", input="run it", **tools)
        async with client.responses.stream(model="m", input="run it", **tools) as stream:
            kinds = [e.type async for e in stream]
            final = await stream.get_final_response()
        for answer in (whole, final):
            assert answer.status == "completed"
            if calls:
                assert [(i.name, i.arguments.replace(" ", "")) for i in answer.output if i.type == "function_call"] == [
                    ("bash", '{"command":"ls"}')
                ]
            else:
                assert answer.output_text == "Hello."
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("calls", [False, True])
async def test_anthropic_messages(tmp_path: Path, kind: str, calls: bool) -> None:
    async with backed(tmp_path, kind, calls) as made, anthropic_client(made) as client:
        tools: Any = with_tool("messages")
        whole = await client.messages.create(model="m", max_tokens=99, messages=USER, **tools)
        async with client.messages.stream(model="m", max_tokens=99, messages=USER, **tools) as stream:
            final = await stream.get_final_message()
        for answer in (whole, final):
            blocks = [
                (b.name, b.input) if b.type == "tool_use" else b.text for b in answer.content if b.type in ("text", "tool_use")
            ]
            assert blocks == ([("bash", {"command": "ls"})] if calls else ["Hello."])
            assert answer.stop_reason == ("tool_use" if calls else "end_turn") and answer.usage.output_tokens > 0
        assert (await client.messages.count_tokens(model="m", messages=USER)).input_tokens > 0


@pytest.mark.parametrize("kind", ["local", "chat"])
async def test_openai_completions_and_models(tmp_path: Path, kind: str) -> None:
    async with backed(tmp_path, kind) as made, openai_client(made) as client:
        assert (await client.completions.create(model="m", prompt="once")).choices[0].text == "Hello."
        text = ""
        async for chunk in await client.completions.create(model="m", prompt="once", stream=True):
            text += "".join(choice.text for choice in chunk.choices)
        assert text == "Hello."
        assert [model.id async for model in client.models.list()] == ["tiny" if kind == "local" else "stub-model"]
    async with backed(tmp_path / "b", "local") as made, anthropic_client(made) as other:
        assert [model.id async for model in other.models.list()] == ["tiny"]


async def test_errors_become_the_clients_own(tmp_path: Path) -> None:
    async with backed(tmp_path, "local") as made:
        async with openai_client(made) as client:
            with pytest.raises(openai.BadRequestError, match="response_format"):
                await client.chat.completions.create(model="m", messages=USER, response_format={"type": "json_object"})
        async with anthropic_client(made) as other:
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                choice: Any = {"tool_choice": {"type": "any"}, **with_tool("messages")}
                await other.messages.create(model="m", max_tokens=9, messages=USER, **choice)
