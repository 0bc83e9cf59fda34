"""Byte-exact deltas: a text stored as what differs from another one. Pure functions.

An agent resends its whole transcript every turn, so each body is its predecessor with something inserted: a common
prefix, new bytes, a common suffix (tools and settings behind the messages). Comparing costs one pass of `memcmp`; nothing is
parsed, so any bytes in any dialect come back exactly, whitespace, key order and all.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

_BLOCK = 64
_STEPS = (1 << 14, 1 << 10, _BLOCK)
MIN_SAVING = 256
"""A delta must save this many bytes to be worth keeping its base alive."""


class Delta(NamedTuple):
    """`base[:head] + data + base[len(base) - tail:]`, `size` bytes in all."""

    head: int
    tail: int
    data: bytes
    size: int


def common_prefix(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix."""
    limit = min(len(a), len(b))
    low = 0
    for step in _STEPS:
        while low < limit and a[low : low + step] == b[low : low + step]:
            low += step
    if low >= limit:
        return limit
    size = min(_BLOCK, limit - low)
    return low + size - _from_first_difference(a[low : low + size], b[low : low + size], "big")


def common_suffix(a: bytes, b: bytes, limit: int) -> int:
    """Length of the longest common suffix of at most `limit` bytes."""
    low, end_a, end_b = 0, len(a), len(b)
    for step in _STEPS:
        while low < limit and a[max(end_a - low - step, 0) : end_a - low] == b[max(end_b - low - step, 0) : end_b - low]:
            low += step
    if low >= limit:
        return limit
    size = min(_BLOCK, limit - low)
    mine, theirs = a[end_a - low - size : end_a - low], b[end_b - low - size : end_b - low]
    return low + size - _from_first_difference(mine, theirs, "little")


def _from_first_difference(a: bytes, b: bytes, order: Literal["big", "little"]) -> int:
    """How many of the (equally many) bytes come from the first that differs on; as numbers, since one XOR compares them all."""
    return ((int.from_bytes(a, order) ^ int.from_bytes(b, order)).bit_length() + 7) // 8


def encode(text: bytes, base: bytes) -> Delta:
    """`text` as a delta against `base`; with an empty base the delta is the whole text."""
    if not base or not text:
        return Delta(0, 0, text, len(text))
    if text == base:
        return Delta(len(text), 0, b"", len(text))
    head = common_prefix(text, base)
    tail = common_suffix(text, base, min(len(text), len(base)) - head)
    return Delta(head, tail, text[head : len(text) - tail], len(text))


def resolve(chain: Mapping[int, tuple[int | None, Delta]], seq: int) -> bytes:
    """The text of `seq` out of `chain`: sequence -> (base sequence, delta), which must hold every ancestor needed.

    Works on ranges, oldest pieces last, so that each byte is copied once however long the chain is.
    """
    pieces: list[bytes] = []
    todo: list[tuple[int, int, int]] = [(seq, 0, chain[seq][1].size)]
    while todo:
        node, start, end = todo.pop()
        if start >= end:
            continue
        base, delta = chain[node]
        cut = delta.size - delta.tail
        if start < min(end, delta.head) or max(start, cut) < end:
            if base is None:
                raise ValueError(f"payload {node} refers to a base it does not name")
            base_size = chain[base][1].size
            shift = base_size - delta.size
            # Pushed in reverse, so that pieces come out from left to right.
            todo.append((base, max(start, cut) + shift, end + shift))
            todo.append((node, max(start, delta.head), min(end, cut)))
            todo.append((base, start, min(end, delta.head)))
        else:
            pieces.append(delta.data[start - delta.head : end - delta.head])
    return b"".join(pieces)
