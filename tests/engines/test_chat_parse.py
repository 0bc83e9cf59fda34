"""Reading a model's text: reasoning, tool calls of every family, and leaving alone what is neither."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.engines.chat_parse import BARE, FAMILIES, parse
from reef_cli.gateway.backends.live import CALL_OPENERS, LiveText
from reef_cli.gateway.dialects.canonical import Answered

DEEPSEEK, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
K2 = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
X = '{"path": "x"}'
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "read"}},
    {"type": "function", "function": {"name": "write", "parameters": NUMBER}},
]


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
        '[TOOL_CALLS]read[CALL_ID]a1B2c3D4e[ARGS]{"path": "x"}</s>',
        f"<function=read>{X}</function>",
        "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "<tool_call>read<arg_key>path</arg_key><arg_value>x</arg_value></tool_call>",
        DEEPSEEK + V3.format("read", X) + DEEPSEEK_END,
        "\n" + DEEPSEEK + V3.format("read", X).removesuffix("<｜tool▁call▁end｜>"),
        DEEPSEEK + V31.format("read", X) + DEEPSEEK_END,
        V31.format("read", X),
        KIMI + K2.format("read", 0, X) + KIMI_END,
        f"{KIMI}\n<|tool_call_begin|>\nread:0<|tool_call_argument_begin|>\n{X}\n<|tool_call_end|>\n{KIMI_END}",
        "<|tool_call_section_begin|>" + K2.format("read", 3, X),
        '[read(path="x")]',
        "<|python_start|>[read(path='x')]<|python_end|>",
        "<|channel|>commentary to=functions.read <|constrain|>json<|message|>" + X + "<|call|>",
        "<|start|>assistant to=functions.read<|channel|>commentary json<|message|>" + X,
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
        '[TOOL_CALLS]read[ARGS]{}[TOOL_CALLS]write[ARGS]{"a": 1}</s>',
        DEEPSEEK + V3.format("read", "{}") + "\n" + V3.format("write", '{"a": 1}') + DEEPSEEK_END,
        DEEPSEEK + V31.format("read", "{}") + V31.format("write", '{"a": 1}') + DEEPSEEK_END,
        KIMI + K2.format("read", 0, "{}") + K2.format("write", 1, '{"a": 1}') + KIMI_END,
        "<tool_call>read\n</tool_call>\n<tool_call>write\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "[read(), write(a=1)]",
        '<function=read>{}</function><function=write>{"a": 1}</function>',
        COMMENTARY.format("read", "{}") + "<|call|><|start|>assistant" + COMMENTARY.format("write", '{"a": 1}') + "<|call|>",
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
        "[TOOL_CALLS]read[ARGS]{broken",
        DEEPSEEK + V3.format("read", '{"path": ') + DEEPSEEK_END,
        DEEPSEEK + V31.format("read", "path=x") + DEEPSEEK_END,
        DEEPSEEK + "<｜tool▁call▁begin｜>read",
        KIMI + K2.format("read", 0, '{"path": ') + KIMI_END,
        KIMI + "<|tool_call_begin|>functions.read:0",
        "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>x",
        "<tool_call>somebody\n<arg_key>path</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "<function=read>{broken</function>",
        '[read("x")]',
        "[read(path=open('x'))]",
        "[somebody(path='x')]",
        "[read(path='x'), 7]",
        "[read(path='x')",
        "[read(**{'path': 'x'})]",
        "[read(path=1e999)]",
        "[read(path=b'x')]",
        "[" * 3000,
        COMMENTARY.format("read", '{"path": '),
        COMMENTARY.format("somebody", X),
        "<|channel|>analysis",
        "<|start|>assistant",
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
    marks = [marker for markers, _ in FAMILIES for marker in (*markers, *BARE)]
    if not any(mark in text for mark in ("<think>", "</think>", "<|channel|>", "<|start|>", *marks)):
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


FORMATS = [
    "<tool_call>" + json.dumps({"name": "read", "arguments": {"path": "x"}}) + "</tool_call>",
    "[TOOL_CALLS]read[ARGS]" + X,
    '[TOOL_CALLS][{"name": "read", "arguments": {"path": "x"}}]',
    DEEPSEEK + V3.format("read", X) + DEEPSEEK_END,
    DEEPSEEK + V31.format("read", X) + DEEPSEEK_END,
    KIMI + K2.format("read", 0, X) + KIMI_END,
    "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "<function=read>" + X + "</function>",
]


@pytest.mark.parametrize("call", FORMATS)
def test_what_stands_around_a_call_stays(call: str) -> None:
    for before, after in (("", "\nThat was it."), ("I will look.\n", ""), ("First ", " then more")):
        parsed = parse(before + call + after, TOOLS)
        assert parsed.content == (before + after).strip("\n") and len(parsed.tool_calls) == 1
    assert parse("<think>hm</think>" + call, TOOLS).reasoning == "hm"


@pytest.mark.parametrize("call", FORMATS)
def test_a_call_beside_one_that_cannot_be_read_is_read_and_the_other_stays(call: str) -> None:
    broken = call.replace('"path"', '"path').replace("<arg_key>", "<arg_kay>")
    parsed = parse(broken + call, TOOLS)
    if parsed.tool_calls:
        assert len(parsed.tool_calls) == 1 and parsed.content is not None and "pat" in parsed.content
    else:
        assert parsed.content == broken + call


@pytest.mark.parametrize("call", FORMATS[:6])
def test_markers_inside_arguments_are_their_text(call: str) -> None:
    inner = "a <tool_call> b </tool_call> ``` <｜tool▁call▁end｜> <|tool_call_end|> [TOOL_CALLS] {}"
    assert calls(call.replace('"x"', json.dumps(inner))) == [("read", {"path": inner})]


def test_python_values() -> None:
    text = "[write(a=[1, (2.5, -3)], b={'k': None, \"l\": true}, c='it\\'s', d=False, e=null)]"
    assert calls(text) == [("write", {"a": [1, [2.5, -3]], "b": {"k": None, "l": True}, "c": "it's", "d": False, "e": None})]


def test_values_in_tags_have_the_types_their_schema_says() -> None:
    pairs = (("path", "12"), ("text", "a\n <b>"), ("line", "12"), ("all", "true"))
    written = "\n".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in pairs)
    parsed = parse(f"<tool_call>edit\n{written}\n</tool_call>", EDIT)
    given = {"path": "12", "text": "a\n <b>", "line": 12, "all": True}
    assert [json.loads(call["function"]["arguments"]) for call in parsed.tool_calls] == [given]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "count"),
    [
        (ANALYSIS.format("Let me think.") + "<|channel|>final<|message|>Four.", "Let me think.", "Four.", 0),
        ("<|channel|>final<|message|>Four.<|return|>", None, "Four.", 0),
        ("<|channel|>analysis<|message|>never closed", "never closed", None, 0),
        (ANALYSIS.format("I read.") + COMMENTARY.format("read", X) + "<|call|>", "I read.", None, 1),
        (ANALYSIS.format("a") + ANALYSIS.format("b") + "<|channel|>final<|message|>c", "a\n\nb", "c", 0),
        (PREAMBLE + COMMENTARY.format("read", X), None, "I will look.", 1),
        (ANALYSIS.format("a") + COMMENTARY.format("read", "{"), "a", "<|start|>assistant" + COMMENTARY.format("read", "{"), 0),
    ],
)  # fmt: skip
def test_channels(text: str, reasoning: str | None, content: str | None, count: int) -> None:
    parsed = parse(text, TOOLS)
    assert (parsed.reasoning, parsed.content, len(parsed.tool_calls)) == (reasoning, content, count)


def test_every_marker_is_waited_for_in_streams() -> None:
    assert {marker for markers, _ in FAMILIES for marker in (*markers, *BARE)} == set(CALL_OPENERS)


SPOKEN = [
    *FORMATS,
    *(f"I will look.\n{call}\nDone" for call in FORMATS),
    *(f"<think>hm</think>\n{call}" for call in FORMATS),
    "[read(path='x')]",
    "plain <| text <｜ here [TOOL",
    ANALYSIS.format("Let me think.\nWell. ") + "<|channel|>final<|message|>Four.\n\nOr five.",
    ANALYSIS.format("I read.") + COMMENTARY.format("read", X) + "<|call|>",
    ANALYSIS.format("a") + ANALYSIS.format("b") + "<|channel|>final<|message|>c",
    "<|channel|>final<|message|>Four < five, <b>bold</b> <|end|>",
    PREAMBLE + COMMENTARY.format("read", X),
    ANALYSIS.format("a") + COMMENTARY.format("read", "{"),
]


def streams_alike(text: str, size: int) -> None:
    """A stream of such pieces says what the whole text says."""
    whole = parse(text, TOOLS)
    live = LiveText(lambda read: parse(read, TOOLS), tools=True)
    pieces = [piece for at in range(0, len(text), size) for piece in live.feed(text[at : at + size])]
    pieces += live.rest(Answered(whole.content, "stop", whole.tool_calls, whole.reasoning))
    said = {kind: "".join(piece.text for piece in pieces if piece.kind == kind) for kind in ("text", "reasoning", "arguments")}
    assert (said["text"], said["reasoning"]) == (whole.content or "", whole.reasoning or "")
    assert said["arguments"] == "".join(call["function"]["arguments"] for call in whole.tool_calls)


@pytest.mark.parametrize("text", SPOKEN)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_stream_says_what_the_whole_text_says(text: str, size: int) -> None:
    streams_alike(text, size)


SCRAPS = ("", "\n", " ", "{", "<", ">", "<|end|>", "<tool_call>", "<think>", "[TOOL_CALLS]", "<|start|>", "</tool_call>", "x")
CUTS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 12), st.sampled_from(SCRAPS)), min_size=1, max_size=3)


@given(st.sampled_from(SPOKEN), CUTS, st.sampled_from([1, 2, 5, 50]))
def test_damaged_texts_stream_alike_too(text: str, cuts: list[tuple[int, int, str]], size: int) -> None:
    for at, length, scrap in cuts:
        text = text[:at] + scrap + text[at + length :]
    if "</think>" not in text or text.lstrip().startswith("<think>"):  # else what is out turns out to be reasoning
        streams_alike(text, size)


def test_when_what_is_out_turns_out_to_be_reasoning_the_rest_still_comes() -> None:
    text = "I look.\n<tool_call>hm</think>Four."
    live = LiveText(lambda read: parse(read, TOOLS), tools=True)
    pieces = [*live.feed(text), *live.rest(Answered("Four.", "stop", (), "I look.\n<tool_call>hm"))]
    assert "".join(piece.text for piece in pieces) == text


REPEATED = [
    *("<tool_call>", "<tool_call>{", "<tool_call>read<arg_key>", "<function=x>", "<function=read><parameter=a>", "[read(a="),
    *("[TOOL_CALLS]a", "<｜tool▁call▁begin｜>a<｜tool▁sep｜>", "<|tool_call_begin|>a<|tool_call_argument_begin|>", '{"name":'),
    *("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>commentary to=functions.x", "<|message|>", "</function>"),
]


@pytest.mark.parametrize("text", REPEATED)
def test_a_model_that_repeats_itself_is_read_in_no_time(text: str) -> None:
    for long in (text * 5000, text + " " * 100_000, text + "\n" * 100_000 + text):
        begun = time.process_time()
        parse(long, TOOLS)
        assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("size", [1, 5])
def test_channels_stream_as_they_come(size: int) -> None:
    live = LiveText(lambda read: parse(read, TOOLS), tools=True)
    thought = "<|channel|>analysis<|message|>Let me"
    said = "<|end|><|start|>assistant<|channel|>final<|message|>Four and"
    seen = []
    for text in (thought, said):
        pieces = [piece for at in range(0, len(text), size) for piece in live.feed(text[at : at + size])]
        seen.append("".join(piece.text for piece in pieces))
    assert seen == ["Let me", "Four and"]
