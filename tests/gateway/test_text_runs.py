"""Streams read without their wrapping say exactly what they say when every frame is parsed."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.gateway import sse
from reef_cli.gateway.dialects.ask_chat import Reader
from reef_cli.gateway.dialects.text_runs import text_run

DONE = b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None, choice: int = 0, **more: Any) -> dict[str, Any]:
    choices = [{"index": choice, "delta": delta, "finish_reason": finish}]
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}


def text(content: str, **more: Any) -> dict[str, Any]:
    return chunk({"content": content}, **more)


def framed(chunks: Sequence[dict[str, Any]], *, spaces: bool = False) -> bytes:
    separators = (", ", ": ") if spaces else (",", ":")
    return b"".join(b"data: " + json.dumps(one, separators=separators).encode() + b"\n\n" for one in chunks)


def both(data: bytes) -> tuple[Reader, Reader]:
    """The stream read at once, and event by event."""
    quick, slow = Reader(), Reader()
    assert quick.feed_plain(data)
    for event in sse.events(data):
        slow.feed(event)
    return quick, slow


def facts(reader: Reader) -> tuple[Any, ...]:
    return reader.answers(), reader.done, reader.head, reader.usage, reader.told_usage, reader.finished, str(reader.error)


def run_of(data: bytes) -> Any:
    return text_run(data, data.removesuffix(DONE)[6:-2].split(b"\n\ndata: "))


TYPICAL = [chunk({"role": "assistant", "content": ""}), *(text(f"word{i} ") for i in range(50)), chunk({}, "stop")]


@pytest.mark.parametrize("spaces", [False, True])
def test_a_typical_stream_is_one_run(spaces: bool) -> None:
    data = framed(TYPICAL, spaces=spaces) + DONE
    run = run_of(data)
    assert (run.start, run.stop, run.choice) == (1, 51, 0)
    assert run.text == "".join(f"word{i} " for i in range(50))
    quick, slow = both(data)
    assert facts(quick) == facts(slow)
    assert quick.answers()[0].content == run.text


def test_escapes_of_a_text_are_decoded() -> None:
    data = framed([TYPICAL[0], *(text(f"é\n\t\\{i}") for i in range(20)), TYPICAL[-1]]) + DONE
    assert run_of(data) is None, "the middle frame has a backslash: no template"
    texts = [text("a"), *(text("\n\u00e9") for _ in range(9)), *(text("plain") for _ in range(10))]
    data = framed([TYPICAL[0], *texts, TYPICAL[-1]]) + DONE
    assert run_of(data).text == "a" + "\né" * 9 + "plain" * 10


@pytest.mark.parametrize(
    "odd",
    [
        text('"quoted"'),
        text("back\\slash\\"),
        text("x", usage={"prompt_tokens": 1, "completion_tokens": 2}),
        text("other choice", choice=1),
        chunk({"content": "with reason"}, "length"),
        chunk({"reasoning_content": "hm"}),
        chunk({"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f", "arguments": "{}"}}]}),
        {"error": {"message": "broken"}},
        {"choices": []},
        {},
    ],
)
@pytest.mark.parametrize("at", [0, 1, 12, 24, 25, 26, 49, 50, 51])
def test_an_odd_frame_anywhere_changes_nothing(odd: dict[str, Any], at: int) -> None:
    frames = [*TYPICAL[:at], odd, *TYPICAL[at:]]
    for data in (framed(frames), framed(frames) + DONE):
        quick, slow = both(data)
        assert facts(quick) == facts(slow)


def test_the_last_words_may_come_with_the_finish() -> None:
    data = framed([*TYPICAL[:-1], chunk({"content": "end"}, "stop")]) + DONE
    assert run_of(data).stop == 51
    quick, slow = both(data)
    assert facts(quick) == facts(slow)
    assert quick.answers()[0].finish == "stop"


def test_texts_that_would_swallow_each_other_are_left_to_the_parser() -> None:
    """A frame cut by a broken provider: its backslash must not join it to the next."""
    frames = [b"data: " + json.dumps(one, separators=(",", ":")).encode() + b"\n\n" for one in TYPICAL]
    frames[10] = frames[10].replace(b"word9 ", b"word9\\")
    assert run_of(b"".join(frames)) is None


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


@given(st.lists(deltas, min_size=1, max_size=40), st.booleans(), st.booleans(), st.booleans())
def test_any_stream_reads_the_same_both_ways(chunks: list[dict[str, Any]], spaces: bool, done: bool, plain: bool) -> None:
    if plain:  # mostly text, so that runs are found
        chunks = [one for one in chunks for _ in range(3)]
    data = framed([TYPICAL[0], *chunks], spaces=spaces) + (DONE if done else b"")
    quick, slow = both(data)
    assert facts(quick) == facts(slow)
