"""Event streams by the letter of the standard, whatever the framing."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.control.sse import Event, parse_events
from reef_cli.core.errors import UpstreamError


def read(raw: bytes) -> list[Event]:
    return list(parse_events(io.BytesIO(raw)))


def test_fields_comments_and_defaults() -> None:
    raw = b"id: 0\n: connected\n\nevent: job\nid: 1\ndata: a\ndata: b\n\n: ping\n\ndata:c\nretry: 5\nunknown\n\n"
    assert read(raw) == [Event("job", "a\nb", "1"), Event("message", "c", "1")]


def test_crlf_and_an_unfinished_last_event() -> None:
    assert read(b"data: x\r\n\r\ndata: lost\r\n") == [Event("message", "x", None)]


def test_an_id_with_nul_is_ignored_and_an_empty_one_resets() -> None:
    assert [event.cursor for event in read(b"id: 1\ndata: a\n\nid: 2\0\ndata: b\n\nid\ndata: c\n\n")] == ["1", "1", None]


def test_an_endless_line_is_refused() -> None:
    with pytest.raises(UpstreamError):
        read(b"data: " + b"x" * (4 * 1024 * 1024))


@given(
    st.lists(
        st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1),
        min_size=1,
        max_size=5,
    )
)
def test_data_comes_back_as_it_was_sent(lines: list[str]) -> None:
    raw = "".join(f"data: {line}\n" for line in lines) + "\n"
    assert [event.data for event in read(raw.encode())] == ["\n".join(lines)]
