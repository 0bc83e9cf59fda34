"""Bytes and pieces in any arrangement: frames, members put into JSON, encoders and readers against each other."""

import random
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.engines.chat_parse import parse
from reef_cli.gateway import dialects, sse
from reef_cli.gateway.backends.live import LiveText
from reef_cli.gateway.dialects import ask_chat, ask_messages, ask_responses
from reef_cli.gateway.dialects.canonical import Answered, ChatRequest, Envelope, Options, Piece, Usage, pieces_of, tool_call
from reef_cli.gateway.splice import add_member, replace_member

READERS: Any = {"chat": ask_chat.Reader, "messages": ask_messages.Reader, "responses": ask_responses.Reader}
READ: Any = {"chat": ask_chat.read, "messages": ask_messages.read, "responses": ask_responses.read}
NEWLINES = [b"\n", b"\r\n", b"\r"]
ENVELOPE = Envelope("id1", "m", 1, "receipt1", "req")

frame = st.builds(
    lambda kind, lines, end: b"".join(
        [*([b"event: " + kind + end] if kind else []), *(b"data: " + line + end for line in lines), end]
    ),
    st.sampled_from([b"", b"ping", b"message_stop"]),
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")), min_size=1, max_size=3),
    st.sampled_from(NEWLINES),
)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(frame, max_size=6), st.lists(st.integers(0, 500), max_size=10), st.binary(max_size=5))
def test_frames_put_together_are_the_stream(whole: list[bytes], cuts: list[int], tail: bytes) -> None:
    data = b"".join(whole) + tail
    splitter = sse.Splitter()
    assert b"".join(splitter.feed(part) for part in cut(data, cuts)) + splitter.rest == data
    assert b"".join(sse.frames(data)) == data


@given(st.lists(frame, min_size=1, max_size=6), st.lists(st.integers(0, 500), max_size=10))
def test_events_do_not_depend_on_where_bytes_were_cut(whole: list[bytes], cuts: list[int]) -> None:
    data = b"".join(whole)
    splitter = sse.Splitter()
    found = [event for part in cut(data, cuts) for event in sse.events(splitter.feed(part))]
    assert found == list(sse.events(data)) == [event for one in whole if (event := sse.read(one))]
    assert not splitter.rest.strip(b"\r\n")


@pytest.mark.parametrize("newline", NEWLINES)
def test_reading_frames(newline: bytes) -> None:
    data = b": note\n\nevent: x\ndata: 1\ndata:2\nid: 7\n\ndata\n\nretry: 5\n\n".replace(b"\n", newline)
    assert list(sse.events(data)) == [("x", b"1\n2"), ("", b"")]
    assert sse.newline(b"data: 1" + newline + newline) == newline


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["model", "messages", "n", "a b"]), json_values, min_size=1), st.integers(0, 2), st.data()
)
def test_members_are_replaced_and_added_in_place(value: dict[str, Any], indent: int, draws: st.DataObject) -> None:
    raw = orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else None)
    name = draws.draw(st.sampled_from(sorted(value)))
    assert orjson.loads(replace_member(raw, name, b'"new"')) == {**value, name: "new"}
    assert orjson.loads(add_member(raw, "extra", b"[1]")) == {**value, "extra": [1]}
    assert orjson.loads(sse.add_member(b"data: " + raw, "reef", 1)[6:]) == {**value, "reef": 1}
    with pytest.raises(KeyError):
        replace_member(raw, "absent", b"1")


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
calls = st.lists(st.tuples(st.sampled_from(["bash", "read"]), st.dictionaries(texts, texts, max_size=2)), max_size=3)


def answer_of(text: str, reasoning: str, called: list[tuple[str, dict[str, str]]]) -> Answered:
    made = [tool_call(f"call_{i}", name, orjson.dumps(value).decode()) for i, (name, value) in enumerate(called)]
    finish: Any = "tool_calls" if made else "stop"
    content = text if text or not made else None
    return Answered(content, finish, made, reasoning or None, usage=Usage(12, 7, 3))


def shredded(pieces: list[Piece], seed: int) -> list[Piece]:
    """The same answer in smaller pieces, parallel calls' arguments interleaved."""
    dice = random.Random(seed)
    small: list[Piece] = []
    for piece in pieces:
        if piece.kind == "call":
            small.append(piece)
            continue
        text = piece.text
        while text:
            size = dice.randint(1, 4)
            small.append(Piece(piece.kind, text[:size], piece.number, choice=piece.choice))
            text = text[size:]
    first = next((at for at, piece in enumerate(small) if piece.kind == "call"), len(small))
    lanes: dict[int, list[Piece]] = {}
    for piece in small[first:]:
        lanes.setdefault(piece.number, []).append(piece)
    mixed = small[:first]
    while lanes:
        # Calls open in their order; their arguments may come in any.
        unopened = [lane for lane in lanes if lanes[lane][0].kind == "call"]
        lane = dice.choice([lane for lane in sorted(lanes) if lane not in unopened[1:]])
        mixed.append(lanes[lane].pop(0))
        if not lanes[lane]:
            del lanes[lane]
    return mixed


@pytest.mark.parametrize("dialect", list(READERS))
@given(text=texts, reasoning=texts, called=calls, seed=st.integers(0, 999))
def test_a_written_stream_reads_back_as_the_whole_answer(
    dialect: Any, text: str, reasoning: str, called: list[tuple[str, dict[str, str]]], seed: int
) -> None:
    answer = answer_of(text, reasoning, called)
    request = ChatRequest(dialect, "m", [], options=Options(), stream=True, include_usage=True)
    encoder = dialects.encoder(ENVELOPE, request)
    written = encoder.begin() + b"".join(encoder.push(piece) for piece in shredded(pieces_of(answer), seed))
    written += encoder.keepalive() + encoder.finish([answer])
    reader = READERS[dialect]()
    for event in sse.events(written):
        reader.feed(event)
    assert reader.done and reader.finished and reader.error is None
    streamed = reader.answers()[0]
    whole = READ[dialect](orjson.loads(orjson.dumps(dialects.encode(ENVELOPE, request, [answer]))))[0]
    for found in (streamed, whole):
        assert (found.content or "", found.reasoning, found.finish, found.usage) == (
            answer.content or "",
            answer.reasoning,
            answer.finish,
            answer.usage,
        )
        assert [same(call) for call in found.tool_calls] == [same(call) for call in answer.tool_calls]
    assert b"receipt1" in written


def same(call: Any) -> tuple[str, str, Any]:
    return call["id"], call["function"]["name"], orjson.loads(call["function"]["arguments"])


parts = st.sampled_from(["word", " ", "\n", "<", "<th", "<think>", "</think>", "<tool", "{", "3 < 4", "é"])
CODER = "<function=bash>\n<parameter=a>\n<think>\n</parameter>\n</function>"
CALL = '<tool_call>{"name": "bash", "arguments": {"a": "<think>"}}</tool_call>'


@given(
    before=st.lists(parts, max_size=8).map("".join).filter(lambda t: "<think>" not in t and "</think>" not in t),
    reasoning=st.none() | st.lists(parts, max_size=4).map("".join).filter(lambda t: "think>" not in t),
    call=st.sampled_from(["", CALL, CODER, f"\n{CALL}\n{CALL}tail\n", '[TOOL_CALLS] [{"name": "bash", "arguments": {}}]']),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_live_text_equals_the_parsers_reading(before: str, reasoning: str | None, call: str, cuts: list[int]) -> None:
    raw = ("" if reasoning is None else f"<think>{reasoning}</think>") + before + call
    tool: Any = {"type": "function", "function": {"name": "bash"}}
    parsed = parse(raw, [tool])
    answer = Answered(parsed.content, "stop", parsed.tool_calls, parsed.reasoning)
    live = LiveText(lambda text: parse(text, [tool]), tools=True)
    pieces: list[Piece] = []
    edges = [0, *sorted(c % (len(raw) + 1) for c in cuts), len(raw)]
    for start, end in pairwise(edges):
        pieces.extend(live.feed(raw[start:end]))
    pieces.extend(live.rest(answer))
    assert "".join(p.text for p in pieces if p.kind == "text") == (parsed.content or "")
    assert "".join(p.text for p in pieces if p.kind == "reasoning") == (parsed.reasoning or "")
    assert len([p for p in pieces if p.kind == "call"]) == len(parsed.tool_calls)
    assert live.raw == raw
