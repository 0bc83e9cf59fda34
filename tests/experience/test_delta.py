"""Deltas: byte-exact whatever the texts, and small where texts share."""

from hypothesis import given
from hypothesis import strategies as st

from reef_cli.experience.delta import Delta, common_prefix, common_suffix, encode, resolve

short = st.binary(max_size=40) | st.text("ab", max_size=60).map(str.encode)


@given(short, short)
def test_prefix_and_suffix_are_the_longest(a: bytes, b: bytes) -> None:
    head = common_prefix(a, b)
    assert a[:head] == b[:head]
    assert head == min(len(a), len(b)) or a[head] != b[head]
    limit = min(len(a), len(b)) - head
    tail = common_suffix(a, b, limit)
    assert a[len(a) - tail :] == b[len(b) - tail :]
    assert tail == limit or a[len(a) - tail - 1] != b[len(b) - tail - 1]


def test_long_texts_are_compared_across_strides() -> None:
    base = bytes(range(256)) * 1000
    for cut in (0, 1, 16383, 16384, 16385, 100_000, len(base)):
        text = base[:cut] + b"\xff\x00new\x00\xff" + base[cut:]
        delta = encode(text, base)
        assert len(delta.data) <= 16
        assert base[: delta.head] + delta.data + base[len(base) - delta.tail :] == text


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int | None, bytes]]:
    """Texts that are edits of earlier ones, in any shape of tree."""
    texts: list[tuple[int | None, bytes]] = []
    for index in range(draw(st.integers(1, 8))):
        base = draw(st.none() | st.integers(0, index - 1)) if index else None
        if base is None:
            texts.append((None, draw(short)))
            continue
        old = texts[base][1]
        start = draw(st.integers(0, len(old)))
        end = draw(st.integers(start, len(old)))
        texts.append((base, old[:start] + draw(short) + old[end:]))
    return texts


@given(histories())
def test_every_text_of_a_history_comes_back(history: list[tuple[int | None, bytes]]) -> None:
    chain: dict[int, tuple[int | None, Delta]] = {}
    for index, (base, text) in enumerate(history):
        chain[index] = (base, encode(text, b"" if base is None else history[base][1]))
    for index, (_, text) in enumerate(history):
        assert resolve(chain, index) == text
