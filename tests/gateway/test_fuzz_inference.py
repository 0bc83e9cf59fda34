"""Anything at all, sent to every dialect before every kind of engine: answered or refused by name, recorded or not stored.

The engines behind it are doubles that always answer sensibly, so every 5xx would be the gateway's own.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.fakes import AUTH, House
from tests.gateway.fuzzing import FUZZ, Bodies, Calm, Headers, Tally, clean, mutants, sound
from tests.gateway.inference_kit import captures, local, relaying

CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
FUNCTION = {"name": "bash", "description": "Runs.", "parameters": {"type": "object"}, "strict": False}
USER = {
    "role": "user",
    "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
}
OPTIONS = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["x"], "stream": True, "metadata": {"user_id": "u"}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "be brief"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "n": 2,
    "logprobs": True,
    "logit_bias": {"5": -1},
    "max_completion_tokens": 9,
    "stream_options": {"include_usage": True},
    **OPTIONS,
}
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "bash", "input": {"a": 1}},
            ],
        },
        {"role": "system", "content": "note"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]}]},
    ],
    "tools": [{"name": "bash", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "temperature": 0.5,
    "top_k": 4,
    "stop_sequences": ["x"],
    "stream": True,
    "metadata": {"user_id": "{}"},
}
RESPONSES = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}], "encrypted_content": "e"},
        {"type": "function_call", "call_id": "c1", "namespace": "n", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]},
    ],
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "max_output_tokens": 9,
    "store": False,
    "stream": True,
    "prompt_cache_key": "k",
    "tool_choice": "auto",
}
RAW = {"model": "m", "prompt": "once", "max_tokens": 5, "logprobs": 1, "echo": False, "n": 2, **OPTIONS}
SMALL = [capture for capture in captures() if len(json.dumps(capture.body)) < 20_000]
GOOD = (
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", RAW),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/responses", RESPONSES),
    *((capture.path, capture.body) for capture in SMALL),
)
PATHS = sorted({path for path, _ in GOOD})
KINDS = ("local", "openai", "anthropic", "responses")
ENDS = {
    "/v1/chat/completions": ("data: [DONE]", 'data: {"error"'),
    "/v1/completions": ("data: [DONE]", 'data: {"error"'),
    "/v1/messages": ("event: message_stop", "event: error"),
    "/v1/responses": ("event: response.completed", "event: response.incomplete", "event: response.failed"),
}
Send = Callable[[str, str, dict[str, str], bytes], tuple[int, str, str]]


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory, tally: Tally) -> Iterator[tuple[dict[str, House], Send]]:
    """A gateway before each kind of engine, and a blocking way to send to one."""
    calm = Calm()
    logging.getLogger().addHandler(calm)
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()

    async def start() -> dict[str, House]:
        made: dict[str, House] = {}
        for kind in KINDS:
            home = tmp_path_factory.mktemp(kind)
            opened = local(home, "Two words.") if kind == "local" else relaying(home, kind)
            made[kind] = (await stack.enter_async_context(opened))[0]  # type: ignore[arg-type]
            await made[kind].create("s1")
        return made

    async def ask(kind: str, path: str, headers: dict[str, str], data: bytes) -> tuple[int, str, str]:
        async with houses[kind].client.post(path, headers={**AUTH, **headers}, data=data) as answer:
            text = await answer.text()
            tally.add(f"inference {kind}", answer.status)
            return answer.status, answer.content_type, text

    houses = loop.run_until_complete(start())

    def send(kind: str, path: str, headers: dict[str, str], data: bytes) -> tuple[int, str, str]:
        found = loop.run_until_complete(ask(kind, path, headers, data))
        calm.check()
        return found

    yield houses, send
    loop.run_until_complete(stack.aclose())
    loop.close()
    logging.getLogger().removeHandler(calm)
    calm.check()


def stored(made: House) -> int:
    with made.log.read() as connection:
        return int(connection.execute("SELECT count(*) FROM records").fetchone()[0])


def judge(made: House, path: str, before: int, answer: tuple[int, str, str]) -> None:
    status, kind, text = answer
    if status == 200 and kind == "text/event-stream":
        assert any(end in text for end in ENDS[path.partition("?")[0]]), text[-500:]
        assert "Traceback" not in text
    else:
        sound(status, text)
    if status >= 400:
        assert stored(made) == before, "what is refused is not stored"
    elif "count_tokens" not in path:
        assert stored(made) == before + 1, "what is answered is stored once"


@FUZZ
@given(st.sampled_from(KINDS), mutants(GOOD, most=3))
def test_nearly_good_requests(gateways: tuple[dict[str, House], Send], kind: str, mutant: tuple[str, dict[str, Any]]) -> None:
    houses, send = gateways
    path, body = mutant
    before = stored(houses[kind])
    judge(houses[kind], path, before, send(kind, path, {"x-reef-scenario": "s1"}, json.dumps(body).encode()))


@FUZZ
@given(st.sampled_from(KINDS), st.sampled_from(PATHS), Headers, Bodies)
def test_any_bytes_and_headers(
    gateways: tuple[dict[str, House], Send], kind: str, path: str, headers: dict[str, str], body: bytes
) -> None:
    houses, send = gateways
    before = stored(houses[kind])
    status, content, text = send(kind, path, clean(headers) | {"x-reef-capture": "on"}, body)
    judge(houses[kind], path, before, (status, content, text))
