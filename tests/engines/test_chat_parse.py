"""Reading a model's text: reasoning, tool calls of four families, and leaving alone what is neither."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.engines.chat_parse import parse

TOOLS = [{"type": "function", "function": {"name": "read"}}, {"type": "function", "function": {"name": "write"}}]


def calls(text: str) -> list[tuple[str, object]]:
    found = parse(text, TOOLS).tool_calls
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in found)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("plain", None, "plain"),
        ("", None, ""),
        ("<think>\nhm\n</think>\n\nanswer", "hm", "answer"),
        ("hm\n</think>\nanswer", "hm", "answer"),
        ("<think>never closed", "never closed", None),
        ("<think></think>answer", "", "answer"),
        ("a < b and <thinking>", None, "a < b and <thinking>"),
    ],
)
def test_reasoning(text: str, reasoning: str | None, content: str | None) -> None:
    parsed = parse(text, ())
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "read", "arguments": {"path": "x"}}\n</tool_call>',
        '<tool_call>{"name": "read", "arguments": {"path": "x"}}',
        '<tool_call>{"function": {"name": "read", "arguments": {"path": "x"}}}</tool_call>',
        '[TOOL_CALLS] [{"name": "read", "arguments": {"path": "x"}}]',
        '[TOOL_CALLS][{"name": "read", "arguments": {"path": "x"}, "id": "abc"}]</s>',
        '[TOOL_CALLS]read{"path": "x"}',
        '[TOOL_CALLS]read[ARGS]{"path": "x"}',
        '{"name": "read", "parameters": {"path": "x"}}',
        '<|python_tag|>{"name": "read", "parameters": {"path": "x"}}',
        '[{"name": "read", "arguments": "{\\"path\\": \\"x\\"}"}]',
    ],
)
def test_one_call_in_every_family(text: str) -> None:
    assert calls(text) == [("read", {"path": "x"})]
    assert parse(text, TOOLS).content is None


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "read", "arguments": {}}</tool_call>\n<tool_call>{"name": "write", "arguments": {"a": 1}}',
        '[TOOL_CALLS] [{"name": "read", "arguments": {}}, {"name": "write", "arguments": {"a": 1}}]',
        '[TOOL_CALLS]read{}[TOOL_CALLS]write{"a": 1}',
        '{"name": "read", "parameters": {}}; {"name": "write", "parameters": {"a": 1}}',
    ],
)
def test_several_calls_keep_their_order(text: str) -> None:
    assert calls(text) == [("read", {}), ("write", {"a": 1})]


def test_a_call_may_write_about_calls() -> None:
    inner = {"text": "write <tool_call>{}</tool_call> there"}
    assert calls(f"<tool_call>{json.dumps({'name': 'write', 'arguments': inner})}</tool_call>") == [("write", inner)]


def test_text_and_reasoning_around_calls_stay() -> None:
    parsed = parse('<think>first</think>I will look.\n<tool_call>{"name": "read", "arguments": {}}</tool_call>', TOOLS)
    assert parsed.reasoning == "first" and parsed.content == "I will look." and len(parsed.tool_calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"nome": "read"}</tool_call>',
        '{"name": "somebody", "parameters": {}}',
        '{"answer": 42}',
        '{"name": "read", "parameters": {}} trailing words',
        "[TOOL_CALLS] nothing",
        "[1, 2, 3]",
        "{broken",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    parsed = parse(text, TOOLS)
    assert parsed.content == text and not parsed.tool_calls


def test_without_tools_markup_is_left_to_the_client() -> None:
    text = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
    assert parse(text, ()).content == text


@given(st.text(max_size=80))
def test_parsing_never_fails_and_plain_text_is_untouched(text: str) -> None:
    parsed = parse(text, TOOLS)
    if not any(mark in text for mark in ("<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "{", "[")):
        assert parsed.content == text


@given(
    st.dictionaries(st.text(max_size=8), st.one_of(st.text(max_size=20), st.integers(), st.lists(st.booleans())), max_size=4)
)
def test_arguments_survive_exactly(arguments: dict) -> None:
    assert calls(f"<tool_call>{json.dumps({'name': 'read', 'arguments': arguments})}</tool_call>") == [("read", arguments)]
