"""Condensed streams say exactly what they say frame by frame."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.gateway import sse
from reef_cli.gateway.condense import condense
from reef_cli.gateway.dialects.ask_chat import Reader as ChatReader
from reef_cli.gateway.dialects.ask_messages import Reader as MessagesReader

DONE = b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None, choice: int = 0, **more: Any) -> dict[str, Any]:
    choices = [{"index": choice, "delta": delta, "finish_reason": finish}]
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}


def text(content: str, **more: Any) -> dict[str, Any]:
    return chunk({"content": content}, **more)


def framed(chunks: Sequence[dict[str, Any]], *, spaces: bool = False, named: bool = False) -> bytes:
    separators = (", ", ": ") if spaces else (",", ":")
    found = [(one.get("type", ""), json.dumps(one, separators=separators).encode()) for one in chunks]
    return b"".join((f"event: {kind}\n".encode() if named else b"") + b"data: " + data + b"\n\n" for kind, data in found)


def read(data: bytes, reader: Any) -> tuple[Any, ...]:
    for event in sse.events(data):
        reader.feed(event)
    head, told = getattr(reader, "head", None), getattr(reader, "told_usage", None)
    return reader.answers(), reader.done, head and head.get("id"), reader.usage, told, reader.finished, str(reader.error)


def same(data: bytes, kind: type[ChatReader] | type[MessagesReader] = ChatReader) -> bytes:
    """What both ways say is the same; the condensed stream."""
    short = condense(data, kind.only_text)
    assert read(short, kind()) == read(data, kind())
    if kind is ChatReader:
        reader = ChatReader()
        assert reader.feed_plain(short)
        assert read(b"", reader) == read(data, ChatReader())
    return short


def count(data: bytes) -> int:
    return len(list(sse.frames(data)))


WORDS = [text(f"word{i} ") for i in range(50)]
TYPICAL = [chunk({"role": "assistant", "content": ""}), *WORDS, chunk({}, "stop")]


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_typical_stream_becomes_four_frames(spaces: bool, named: bool) -> None:
    data = framed(TYPICAL, spaces=spaces, named=named) + DONE
    if named:
        assert count(condense(data, ChatReader.only_text)) == 4
    else:
        assert count(same(data)) == 4


def test_texts_with_escapes_and_quotes_are_joined_too() -> None:
    texts = ['say "', 'hi"', "\n\té", "\\", '\\"', "😀", "", "last"] * 5
    data = framed([TYPICAL[0], *map(text, texts), TYPICAL[-1]]) + DONE
    assert count(same(data)) == 4
    assert read(data, ChatReader())[0][0].content == "".join(texts)


def test_members_that_say_nothing_do_not_hinder() -> None:
    empty = {"role": "assistant", "reasoning_content": None, "tool_calls": None}
    frames = [chunk({**empty, "content": f"w{i}"}, logprobs=None) for i in range(30)]
    assert count(same(framed([TYPICAL[0], *frames, TYPICAL[-1]]) + DONE)) == 4


def test_completions() -> None:
    head = {"id": "c", "object": "text_completion"}
    frames = [{**head, "choices": [{"index": 0, "text": f" w{i}", "logprobs": None}]} for i in range(30)]
    end = {**head, "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    assert count(same(framed([*frames, end]) + DONE)) == 4, "first, the others, end, done"


def delta(kind: str, name: str, value: str, index: int) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: value}}


def test_a_message_with_thinking_text_and_a_tool_call() -> None:
    pieces = ['{"path": "', "a", "b", "c", 'd"', ', "lines": ', "[1, ", "2, ", "3", "]", "}"]
    frames: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 5, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        *(delta("thinking_delta", "thinking", f"hm{i} ", 0) for i in range(20)),
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        *(delta("text_delta", "text", f"word{i} ", 1) for i in range(50)),
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}}},
        *(delta("input_json_delta", "partial_json", piece, 2) for piece in pieces),
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 99}},
        {"type": "message_stop"},
    ]
    short = same(framed(frames, named=True), MessagesReader)
    assert count(short) < 25, "each of the three runs became one frame or a few"


ODD = [
    text("x", usage={"prompt_tokens": 1, "completion_tokens": 2}),
    text("other choice", choice=1),
    chunk({"content": "with reason"}, "length"),
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "both", "reasoning_content": "hm"}),
    chunk({"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f", "arguments": "{}"}}]}),
    {"error": {"message": "broken"}},
    {"content": "elsewhere", "choices": [{"index": 0, "delta": {"content": "here"}}]},
    {"choices": []},
    {},
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("at", [0, 1, 12, 24, 25, 26, 27, 49, 50, 51])
def test_an_odd_frame_anywhere_changes_nothing(odd: dict[str, Any], at: int) -> None:
    frames = [*TYPICAL[:at], odd, *TYPICAL[at:]]
    for data in (framed(frames), framed(frames) + DONE):
        same(data)


@pytest.mark.parametrize("odd", ODD)
def test_frames_that_are_all_odd_are_not_joined(odd: dict[str, Any]) -> None:
    data = framed([TYPICAL[0], *[odd] * 30, TYPICAL[-1]]) + DONE
    if odd != ODD[1]:  # text of another choice is text
        assert condense(data, ChatReader.only_text) == data


def test_the_last_words_may_come_with_the_finish() -> None:
    data = framed([*TYPICAL[:-1], chunk({"content": "end"}, "stop")]) + DONE
    assert count(same(data)) == 4


@pytest.mark.parametrize("broken", [b"word9\\", b"word9\\x", b'word9"', b"word9\x01", b"word9\xff", b"word9\\ud83d"])
def test_a_text_that_is_no_json_is_left_to_the_reader(broken: bytes) -> None:
    """Its backslash or quote must not swallow or split its neighbours."""
    data = framed(TYPICAL).replace(b"word9 ", broken)
    assert read(condense(data, ChatReader.only_text), ChatReader()) == read(data, ChatReader())


words = st.text(st.sampled_from('ab "\\\n\té😀{},:[]data'), max_size=6)
deltas = st.one_of(
    words.map(text),
    words.map(text),
    words.map(text),
    words.map(lambda value: text(value, choice=1)),
    words.map(lambda value: chunk({"content": value, "role": "assistant"})),
    words.map(lambda value: chunk({"content": value}, "stop")),
    st.just(chunk({}, "stop", usage={"prompt_tokens": 3, "completion_tokens": 4})),
)
runs = st.lists(st.one_of(deltas.map(lambda one: [one]), st.lists(words.map(text), min_size=8, max_size=20)), max_size=12)


@given(runs, st.booleans(), st.booleans())
def test_any_stream_says_the_same_both_ways(chunks: list[list[dict[str, Any]]], spaces: bool, done: bool) -> None:
    same(framed([TYPICAL[0], *(one for some in chunks for one in some)], spaces=spaces) + (DONE if done else b""))
