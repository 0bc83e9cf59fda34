"""Reading a model's text: reasoning, tool calls of five families, and leaving alone what is neither."""

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


CODER = """<tool_call>
<function=edit>
<parameter=path>
a b.py
</parameter>
<parameter=text>
if x < 3:
    print("</p>")
</parameter>
<parameter=line>
12
</parameter>
<parameter=all>
True
</parameter>
</function>
</tool_call>"""
SCHEMA = {"path": {"type": "string"}, "text": {}, "line": {"type": "integer"}, "all": {"type": "boolean"}}
EDIT = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": SCHEMA}}}]


@pytest.mark.parametrize("text", [CODER, CODER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")])
def test_parameters_written_as_text_have_the_types_their_schema_says(text: str) -> None:
    parsed = parse(f"I edit it.\n{text}\n{text}", EDIT)
    given = {"path": "a b.py", "text": 'if x < 3:\n    print("</p>")', "line": 12, "all": True}
    assert [json.loads(call["function"]["arguments"]) for call in parsed.tool_calls] == [given, given]
    assert parsed.content == "I edit it."


@pytest.mark.parametrize(
    "text",
    [
        CODER.replace("=edit>", "=unknown>"),
        "<function=edit>loose words</function>",
        "<function=edit><parameter=line>12</parameter>",
    ],
)
def test_functions_that_cannot_be_read_stay_text(text: str) -> None:
    parsed = parse(text, EDIT)
    assert (parsed.content, parsed.tool_calls) == (text, ())


def test_markup_inside_a_json_call_is_its_text() -> None:
    inner = json.dumps({"name": "read", "arguments": {"path": "<function=read></function>"}})
    for text in (f"<tool_call>{inner}</tool_call>", inner, f"[TOOL_CALLS][{inner}]"):
        assert calls(text) == [("read", {"path": "<function=read></function>"})]
