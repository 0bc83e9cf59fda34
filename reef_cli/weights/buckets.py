"""Many named tensors as few flat byte tensors: SGLang's `flattened_bucket` layout.

A bucket is the concatenation of every tensor's bytes, in order and without padding; each tensor starts at a multiple of its
item size, which `pack` ensures by opening a new bucket where a smaller type would break that. Names, dtypes and shapes travel
beside the bytes (as JSON). `pack` is lazy: at most one bucket of extra memory is alive at a time.
Does not know how buckets are sent.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from reef_cli.core.errors import UnsupportedArtifact

DEFAULT_LIMIT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors `names[i]` of `dtypes[i]` (`"bfloat16"`) and `shapes[i]`, their bytes in `flat` (1-D uint8)."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor

    @property
    def nbytes(self) -> int:
        return self.flat.numel()


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `"bfloat16"`, the spelling of the wire."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The reverse of `dtype_name`; raises `UnsupportedArtifact` for anything that is no torch type."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedArtifact(f"Unknown tensor type {name!r}", hint='use names such as "bfloat16"')
    return found


def empty(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], device: str = "cpu") -> Bucket:
    """A bucket with room for these tensors, for a receiver to fill."""
    if not (len(names) == len(dtypes) == len(shapes)):
        raise UnsupportedArtifact("A bucket's names, dtypes and shapes differ in number")
    size = sum(_nbytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True))
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    return Bucket(tuple(names), tuple(dtypes), tuple(tuple(shape) for shape in shapes), flat)


def pack(named: Iterable[tuple[str, Tensor]], limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Iterator[Bucket]:
    """Buckets of at most `limit_bytes` (a larger tensor gets one of its own), in the given order."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        nbytes = tensor.numel() * tensor.element_size()
        if held and (size + nbytes > limit_bytes or size % tensor.element_size()):
            yield _join(held)
            held, size = [], 0
        held.append((name, tensor))
        size += nbytes
    if held:
        yield _join(held)


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket as views of its bytes; raises `UnsupportedArtifact` when sizes do not add up."""
    sizes = [_nbytes(dtype, shape) for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True)]
    if sum(sizes) != bucket.nbytes:
        raise UnsupportedArtifact(f"A bucket of {bucket.nbytes} bytes cannot hold {sum(sizes)} bytes of tensors")
    offset = 0
    for name, dtype, shape, size in zip(bucket.names, bucket.dtypes, bucket.shapes, sizes, strict=True):
        kind = dtype_of(dtype)
        if offset % kind.itemsize:
            raise UnsupportedArtifact(f"Tensor {name!r} starts at byte {offset}, no multiple of its item size {kind.itemsize}")
        yield name, bucket.flat[offset : offset + size].view(kind).view(shape)
        offset += size


def _join(held: Sequence[tuple[str, Tensor]]) -> Bucket:
    flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in held])
    return Bucket(
        tuple(name for name, _ in held),
        tuple(dtype_name(tensor.dtype) for _, tensor in held),
        tuple(tuple(tensor.shape) for _, tensor in held),
        flat,
    )


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * dtype_of(dtype).itemsize
