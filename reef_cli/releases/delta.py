"""The difference between two files of weights, as a file: exclusive-or with a base, byte planes apart, deflated.

A learning step changes few bits of a weight, so most of the exclusive-or is zero, above all in the high bytes; with the planes
apart deflate finds that. Works on any bytes and gives exactly the target back; it is small for weights of one shape. Both files
stream; memory stays at one chunk. Layout: a line of JSON, then for each chunk its planes, each as `length (u32) data`.
Does not know objects or stores.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import BinaryIO

from reef_cli.core.errors import StorageError

VERSION = 1
# Small enough that the interpreter is never held for a millisecond, large enough that the frames cost nothing.
CHUNK = 256 * 1024
_LEVEL = 1
_HEAD_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Delta:
    """The first line of a delta: what it makes from what. `skip` are bytes of base and target that have no counterpart."""

    base: str
    base_size: int
    size: int
    skip: tuple[int, int]
    width: int


def encode(base: BinaryIO, target: BinaryIO, out: BinaryIO, facts: Delta) -> None:
    """Write the delta from `base` to `target`."""
    out.write(json.dumps({"delta": VERSION, **asdict(facts)}).encode() + b"\n")
    base.seek(facts.skip[0])
    target.seek(0)
    _frame(out, target.read(facts.skip[1]))
    while part := target.read(CHUNK):
        mixed = _mixed(part, base.read(len(part)))
        for plane in range(facts.width):
            _frame(out, mixed[plane :: facts.width])


def read_facts(file: BinaryIO) -> Delta:
    """The facts of a delta; `StorageError` when it is none. Leaves the file behind its first line."""
    line = file.readline(4096)
    try:
        raw = json.loads(line)
        if raw.pop("delta") != VERSION:
            raise ValueError("another version")
        return Delta(**{**raw, "skip": tuple(raw["skip"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError("a stored delta is unreadable", why=str(error), hint="run `reef release verify`") from error


def decode(base: BinaryIO, delta: BinaryIO) -> Iterator[bytes]:
    """The target's bytes, in pieces. `StorageError` when the delta is damaged; the digest is the caller's business."""
    facts = read_facts(delta)
    base.seek(facts.skip[0])
    try:
        head = _unframe(delta)
        yield head
        left = facts.size - len(head)
        while left > 0:
            length = min(CHUNK, left)
            mixed = bytearray(length)
            for plane in range(facts.width):
                mixed[plane :: facts.width] = _unframe(delta)
            yield _mixed(bytes(mixed), base.read(length))
            left -= length
    except (zlib.error, struct.error, ValueError) as error:
        raise StorageError("a stored delta is damaged", why=str(error), hint="run `reef release verify`") from error


def alignment(base: BinaryIO, target: BinaryIO) -> tuple[tuple[int, int], int]:
    """How to lay two files over each other: their safetensors headers apart, and the width of their numbers."""
    heads = [_safetensors_head(file) for file in (base, target)]
    if heads[0] is None or heads[1] is None:
        return (0, 0), 1
    return (heads[0][0], heads[1][0]), heads[1][1]


def _safetensors_head(file: BinaryIO) -> tuple[int, int] | None:
    """Length of the header and width in bytes of most numbers."""
    file.seek(0)
    start = file.read(8)
    if len(start) < 8:
        return None
    (length,) = struct.unpack("<Q", start)
    if length > _HEAD_LIMIT:
        return None
    try:
        header = json.loads(file.read(length))
        sizes: dict[int, int] = {}
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                width = 4 if tensor["dtype"].endswith("32") else 2 if tensor["dtype"].endswith("16") else 1
                sizes[width] = sizes.get(width, 0) + end - begin
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return 8 + length, max(sizes, key=lambda width: sizes[width], default=1)


def _mixed(part: bytes, base: bytes) -> bytes:
    """Exclusive-or; where the base has ended, the part itself."""
    base = base[: len(part)].ljust(len(part), b"\0")
    return (int.from_bytes(part, "little") ^ int.from_bytes(base, "little")).to_bytes(len(part), "little")


def _frame(out: BinaryIO, data: bytes) -> None:
    packed = zlib.compress(data, _LEVEL)
    out.write(struct.pack("<I", len(packed)) + packed)


def _unframe(file: BinaryIO) -> bytes:
    (length,) = struct.unpack("<I", file.read(4))
    return zlib.decompress(file.read(length))
