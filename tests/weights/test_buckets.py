"""Packing is lossless, bounded and aligned, whatever the types and order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.weights.buckets import Bucket, dtype_name, dtype_of, empty, pack, unpack

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8, torch.float64]
tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=0, max_size=3)), min_size=0, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(spec=tensors, limit=st.integers(1, 400))
def test_unpacking_gives_back_what_was_packed(spec, limit: int) -> None:
    torch.manual_seed(0)
    named = [(f"t{i}", (torch.randn(shape) * 100).to(dtype)) for i, (dtype, shape) in enumerate(spec)]
    buckets = list(pack(iter(named), limit))
    back = [pair for bucket in buckets for pair in unpack(bucket)]
    assert [name for name, _ in back] == [name for name, _ in named]
    for (_, got), (_, sent) in zip(back, named, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)
    assert all(bucket.nbytes <= limit or len(bucket.names) == 1 for bucket in buckets)


def test_a_strided_tensor_is_packed_by_value() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    (bucket,) = pack([("t", tensor)])
    assert torch.equal(dict(unpack(bucket))["t"], tensor)


def test_a_misaligned_successor_opens_a_new_bucket() -> None:
    buckets = list(pack([("a", torch.ones(3, dtype=torch.uint8)), ("b", torch.ones(2))]))
    assert [bucket.names for bucket in buckets] == [("a",), ("b",)]


def test_the_layout_is_plain_concatenation() -> None:
    a, b = torch.arange(4, dtype=torch.int32), torch.arange(3, dtype=torch.bfloat16)
    (bucket,) = pack([("a", a), ("b", b)])
    assert bytes(bucket.flat.tolist()) == a.numpy().tobytes() + b.view(torch.int16).numpy().tobytes()


def test_an_empty_bucket_is_filled_by_the_receiver() -> None:
    (sent,) = pack([("a", torch.randn(2, 3)), ("b", torch.randn(5).bfloat16())])
    got = empty(sent.names, sent.dtypes, sent.shapes)
    got.flat.copy_(sent.flat)
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(unpack(got), unpack(sent), strict=True))


def test_lies_about_size_and_type_are_refused() -> None:
    with pytest.raises(UnsupportedArtifact, match="cannot hold"):
        list(unpack(Bucket(("a",), ("float32",), ((3,),), torch.empty(8, dtype=torch.uint8))))
    with pytest.raises(UnsupportedArtifact, match="Unknown tensor type"):
        empty(["a"], ["nn"], [[1]])
    with pytest.raises(UnsupportedArtifact, match="differ in number"):
        empty(["a"], ["float32"], [])
    with pytest.raises(UnsupportedArtifact, match="no multiple"):
        list(unpack(Bucket(("a", "b"), ("uint8", "float32"), ((2,), (1,)), torch.empty(6, dtype=torch.uint8))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_type_names_round_trip(dtype: torch.dtype) -> None:
    assert dtype_of(dtype_name(dtype)) == dtype == dtype_of(str(dtype))
