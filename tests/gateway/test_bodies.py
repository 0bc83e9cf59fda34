"""Reading bodies: strict JSON, bounded sizes, no echo of what was sent."""

import gzip
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.core.errors import BodyTooLarge, InvalidRequest, UsageError
from reef_cli.gateway import bodies


@pytest.mark.parametrize(
    "raw", [b'{"s": NaN}', b'{"s": -Infinity}', b'{"s": Infinity}', b'{"s": 1e999}', b'{"s": -1e999}', b"[nan]"]
)
def test_numbers_must_be_finite(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="finite"):
        bodies.parse_json(raw)


@pytest.mark.parametrize(
    "raw", [b"", b"  ", b'{"a": [', b"{'a': 1}", b'"\\ud800"', b"\xff", b"[" * 5000, b"\xef\xbb\xbf{}", b"{}{}"]
)
def test_broken_json(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        bodies.parse_json(raw)


@pytest.mark.parametrize(
    ("raw", "kind"), [(b"[]", "array"), (b"null", "null"), (b"true", "boolean"), (b"1", "number"), (b'"x"', "string")]
)
def test_the_body_must_be_an_object(raw: bytes, kind: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object") as caught:
        bodies.parse_object(raw)
    assert kind in caught.value.hint


def test_errors_never_repeat_the_body() -> None:
    with pytest.raises(InvalidRequest) as caught:
        bodies.parse_json(b'{"password": "hunter2" oops}')
    assert "hunter2" not in str(caught.value.payload())


@given(st.binary(max_size=200))
def test_any_bytes_are_json_or_refused(raw: bytes) -> None:
    with suppress(InvalidRequest):
        bodies.parse_json(raw)


@given(st.binary(max_size=500), st.sampled_from(["gzip", "x-gzip", "deflate"]))
def test_compressed_bodies_come_back(raw: bytes, encoding: str) -> None:
    packed = zlib.compress(raw) if encoding == "deflate" else gzip.compress(raw)
    assert bodies.decompress(packed, encoding, 1000) == raw


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        (b"junk", "gzip"),
        (b"", "gzip"),
        (gzip.compress(b"x", mtime=0)[:-4], "gzip"),
        (gzip.compress(b"x", mtime=0) + b"y", "gzip"),
        (b"x", "br"),
        (b"x", "zstd"),
        (b"x", "gzip, gzip"),
    ],
)
def test_what_cannot_be_undone_is_refused(packed: bytes, encoding: str) -> None:
    with pytest.raises(InvalidRequest):
        bodies.decompress(packed, encoding, 1000)


def test_a_small_body_cannot_become_a_large_one() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    assert len(bomb) < 100_000
    with pytest.raises(BodyTooLarge):
        bodies.decompress(bomb, "gzip", 1024 * 1024)


def test_fields() -> None:
    assert bodies.text_field({"a": " x "}, "a") == "x"
    assert bodies.text_field({"a": None}, "a") is None
    for body in ({"a": 1}, {"a": ""}, {"a": " "}, {"a": "x" * 257}, {"a": []}):
        with pytest.raises(InvalidRequest):
            bodies.text_field(body, "a")
    with pytest.raises(InvalidRequest, match="missing"):
        bodies.text_field({}, "a", required=True)
    assert bodies.object_field({}, "a") == {}
    with pytest.raises(InvalidRequest):
        bodies.object_field({"a": []}, "a")
    with pytest.raises(UsageError, match="scroe"):
        bodies.only({"scroe": 1}, ("score",))
