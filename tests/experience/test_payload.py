"""Exchanges come back exactly: any body, any messages, any token trace."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.core.errors import InvalidRequest
from reef_cli.core.types import Inference, TokenSpan, TokenTrace
from reef_cli.experience.codec import from_document, to_document
from reef_cli.experience.model import Instruction
from reef_cli.experience.payload import decode, encode

text = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(st.dictionaries(text, values, max_size=3), max_size=4)
floats = st.floats(max_value=0.0, allow_nan=False) | st.floats(width=32, max_value=0.0, allow_nan=False)


@st.composite
def traces(draw: st.DrawFn) -> TokenTrace:
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
    return TokenTrace(
        prompt_ids=draw(ids),
        output_ids=draw(ids),
        logprobs=tuple(draw(st.lists(floats, max_size=6))),
        loss_mask=tuple(draw(st.lists(st.integers(0, 1), max_size=6))),
        spans=(TokenSpan(draw(text), 0, 3),),
        temperature=draw(st.floats(0, 2)),
        finish=draw(text),
    )


@st.composite
def exchanges(draw: st.DrawFn) -> Inference:
    said = draw(messages)
    spelled = draw(
        st.sampled_from(
            [
                orjson.dumps({"model": "m", "messages": said, "stream": True}),
                json.dumps({"messages": said, "tools": [{"messages": []}]}).encode(),
                orjson.dumps({"metadata": {"messages": said}, "messages": []}),
                orjson.dumps({"messages": said}) + orjson.dumps({"messages": []}),
                b'{"messages": ' + orjson.dumps(said),
                b'{"messages":[],"messages":' + orjson.dumps(said) + b"}",
            ]
        )
        | st.binary(max_size=60)
    )
    answer = draw(st.none() | st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | text}))
    return Inference(
        id="r1",
        scenario="s1",
        created_at=draw(st.floats(0, 1e10)),
        dialect=draw(st.sampled_from(["chat", "completions", "messages", "responses"])),
        model=draw(text),
        request=spelled,
        messages=said,
        response=answer,
        finish=draw(st.none() | text),
        tokens=draw(st.none() | traces()),
        raw_text=draw(st.none() | text | st.just((answer or {}).get("content"))),
        release_id=draw(st.none() | text),
        weight_version=draw(st.none() | text),
        session=draw(st.none() | text),
        tags=draw(st.dictionaries(text, text, max_size=2)),
        usage=draw(st.dictionaries(text, numbers, max_size=2)),
        timings=draw(st.dictionaries(text, st.floats(0, 100), max_size=2)),
        stream=draw(st.booleans()),
        complete=draw(st.booleans()),
        error=draw(st.none() | text),
    )


@given(exchanges())
def test_an_exchange_comes_back_exactly(record: Inference) -> None:
    stored = encode(record)
    back = decode(
        record.id, "s1", record.created_at, stored.meta, stored.body, stored.talk, stored.ids, stored.logprobs, stored.mask
    )
    assert back == record
    assert back.request == record.request


@given(exchanges())
def test_a_document_comes_back_exactly_and_keeps_the_digest(record: Inference) -> None:
    document = orjson.loads(orjson.dumps(to_document(record)))
    if not record.model:
        with pytest.raises(InvalidRequest):
            from_document(document)
        return
    back = from_document(document)
    assert back == record
    assert encode(back).digest == encode(record).digest


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"session": {}}, "session"),
        ({"session": ["a"]}, "session"),
        ({"metadata": "x"}, "metadata"),
        ({"metadata": {"a": [float("inf")]}}, "finite"),
        ({"text": ""}, "text"),
        ({"text": {}}, "text"),
    ],
)
def test_an_instruction_that_is_not_as_documented_is_named(wrong: dict[str, Any], why: str) -> None:
    sound = {"kind": "train", "id": "t:1", "created_at": 1.0, "text": "shorter", "session": None, "metadata": None}
    back = from_document(sound, "s1")
    assert isinstance(back, Instruction) and (back.session, back.metadata) == (None, {})
    with pytest.raises(InvalidRequest, match=why):
        from_document({**sound, **wrong}, "s1")


def test_messages_of_a_compact_chat_body_are_not_stored_twice() -> None:
    said = [{"role": "user", "content": "x" * 5000}]
    record = Inference("r", "s1", 0.0, "chat", "m", orjson.dumps({"messages": said}), said, None)
    assert encode(record).talk == b""
    spaced = Inference("r", "s1", 0.0, "chat", "m", json.dumps({"messages": said}).encode(), said, None)
    assert encode(spaced).talk == b""


def test_single_precision_log_probs_take_four_bytes_and_others_stay_exact() -> None:
    def stored(*values: float) -> int:
        tokens = TokenTrace((), (1,) * len(values), values, (1,) * len(values), ())
        return len(encode(Inference("r", "s1", 0.0, "chat", "m", b"{}", [], None, tokens=tokens)).logprobs)

    assert stored(-0.5, -2.0) == 8
    assert stored(-0.1, -2.0) == 16


@pytest.mark.parametrize(
    "field", [{"tags": {"a": object()}}, {"response": {"content": "\ud800"}}, {"tokens": TokenTrace((2**40,), (), (), (), ())}]
)
def test_what_cannot_be_kept_exactly_is_refused(field: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"request": b"{}", "messages": [], "response": None, **field}
    with pytest.raises(InvalidRequest):
        encode(Inference("r", "s1", 0.0, "chat", "m", **fields))


def test_key_order_does_not_make_other_content() -> None:
    body = orjson.dumps({"messages": [{"role": "user", "content": "x"}]})
    first = Inference("r", "s1", 0.0, "chat", "m", body, [{"role": "user", "content": "x"}], None)
    turned = Inference("r", "s1", 0.0, "chat", "m", body, [{"content": "x", "role": "user"}], None)
    assert encode(first).digest == encode(turned).digest
    other = Inference("r", "s1", 0.0, "chat", "m", body, [{"role": "user", "content": "y"}], None)
    assert encode(first).digest != encode(other).digest
