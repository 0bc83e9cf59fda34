"""KV slots and the attention over them, batch-invariant by construction.

A step runs the model over one flat row of tokens: first one token for every decoding slot, then pieces of prompts. The
attention function registered here writes the new keys and values into their slots and attends each query within its slot.

Why it is invariant: the CPU flash kernel's bits depend on the KV length it is called with and on having fewer than four query
rows per head, but not on batch or row count (measured over 4 to 63 rows, head sizes 16 to 128). So a query at position p is
always attended with `ceil((p + 1) / 64) * 64` keys (the rest masked) and in a tile of 4 to 63 rows, whether it is decoded,
prefilled in one chunk or in many. Linear layers are made row-invariant by `linear`. A flat row of one token is doubled; its
twin writes into a spare slot.

Slots live in anonymous private memory that the system commits page by page, so room for the longest context costs nothing
until it is used, and unwritten keys are zeros.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

NAME = "reef_slots"
CLASS = 64
"""KV lengths are multiples of this many tokens."""
_MAX_ROWS = 48
"""Query rows of a tile; the kernel packs (and changes bits) from 64 on."""
_MIN_ROWS = 4


def padded(length: int) -> int:
    """The KV length with which a query at position `length - 1` is attended."""
    return -(-length // CLASS) * CLASS


class Slots:
    """Keys and values of every slot: per layer two tensors `[slots + 1, kv_heads, capacity, head_dim]`, the last one spare."""

    def __init__(self, layers: int, slots: int, heads: int, capacity: int, dim: int, dtype: torch.dtype) -> None:
        self.count = slots
        self.capacity = padded(capacity)
        self._maps: list[mmap.mmap] = []
        shape = (slots + 1, heads, self.capacity, dim)
        self.keys = [self._memory(shape, dtype) for _ in range(layers)]
        self.values = [self._memory(shape, dtype) for _ in range(layers)]

    def _memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._maps.append(region)
        return torch.frombuffer(region, dtype=dtype).view(shape)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot into another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def release(self) -> None:
        """Give the memory of all slots back to the system; every slot then reads as zeros."""
        for region in self._maps:
            region.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one slot in a step: positions `[start, end)` at offset `row` of the flat row."""

    slot: int
    start: int
    end: int
    row: int


@dataclass(slots=True)
class Plan:
    """Where every flat token of a step goes: `slots` and `positions` per token, decode runs and prefill pieces."""

    slots: Tensor
    positions: Tensor
    decodes: list["Run"]
    pieces: list["Tile"]
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """Decoding rows `[row, row + count)` in neighbouring slots from `slot` on, all attended over `length` keys."""

    row: int
    slot: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Prompt tokens of one slot that share a KV length."""

    row: int
    slot: int
    start: int
    count: int
    length: int


def plan(decodes: Sequence[tuple[int, int]], pieces: Sequence[Piece]) -> Plan:
    """Lay out a step: `decodes` are (slot, position) sorted by slot and come first in the flat row; then the pieces.

    A single token gets a twin, so that `len(slots) >= 2`.
    """
    slots = [slot for slot, _ in decodes]
    positions = [position for _, position in decodes]
    for piece in pieces:
        slots.extend([piece.slot] * (piece.end - piece.start))
        positions.extend(range(piece.start, piece.end))
    if len(slots) == 1:
        slots.append(-1)
        positions.append(0)
    return Plan(torch.tensor(slots), torch.tensor(positions), _runs(decodes), _tiles(pieces))


def _runs(decodes: Sequence[tuple[int, int]]) -> list[Run]:
    runs: list[Run] = []
    for row, (slot, position) in enumerate(decodes):
        length = padded(position + 1)
        last = runs[-1] if runs else None
        if last and last.slot + last.count == slot and last.length == length:
            runs[-1] = Run(last.row, last.slot, last.count + 1, length)
        else:
            runs.append(Run(row, slot, 1, length))
    return runs


def _tiles(pieces: Sequence[Piece]) -> list[Tile]:
    tiles: list[Tile] = []
    for piece in pieces:
        start = piece.start
        while start < piece.end:
            length = padded(start + 1)
            end = min(length, piece.end)
            tiles.append(Tile(piece.row + start - piece.start, piece.slot, start, end - start, length))
            start = end
    return tiles


class SlotAttention:
    """The attention function of the model, bound to slots and to the plan of the step under way."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.plan: Plan | None = None

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """`query [1, heads, tokens, dim]`, `key`/`value [1, kv_heads, tokens, dim]` -> `[1, tokens, heads, dim]`.

        The model's own mask is None for an attention it does not know; the plan says who sees what.
        """
        if options.get("softcap") is not None or options.get("s_aux") is not None:
            raise NotImplementedError("attention with soft-capping or sinks is not supported by the embedded engine")
        current = self.plan
        assert current is not None
        keys, values = self.slots.keys[module.layer_idx], self.slots.values[module.layer_idx]
        keys[current.slots, :, current.positions] = key[0].transpose(0, 1)
        values[current.slots, :, current.positions] = value[0].transpose(0, 1)
        heads, kv_heads = query.shape[1], key.shape[1]
        flat = query[0].transpose(0, 1)
        out = torch.zeros_like(flat)
        scale, window = options.get("scaling"), options.get("sliding_window")
        for run in current.decodes:
            rows = slice(run.row, run.row + run.count)
            part = slice(run.slot, run.slot + run.count)
            mask = _decode_mask(current, run, flat.dtype, window)
            out[rows] = _decode(flat[rows], keys[part, :, : run.length], values[part, :, : run.length], mask, scale)
        for tile in current.pieces:
            rows = slice(tile.row, tile.row + tile.count)
            group = heads // kv_heads
            mask = _prefill_mask(current, tile, group, flat.dtype, window)
            part = slice(tile.slot, tile.slot + 1)
            out[rows] = _prefill(flat[rows], keys[part, :, : tile.length], values[part, :, : tile.length], mask, scale)
        return out.unsqueeze(0), None


def _decode(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    copies = -(-_MIN_ROWS // group)
    tiled = query.view(rows, kv_heads, 1, group, dim).expand(-1, -1, copies, -1, -1).reshape(rows, kv_heads, -1, dim)
    out = scaled_dot_product_attention(tiled, keys, values, attn_mask=mask, scale=scale)
    return out[:, :, :group].reshape(rows, heads, -1)


def _prefill(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    tile = _tile(group)
    count = -(-tokens // tile)
    padding = count * tile - tokens
    full = pad(query, (0, 0, 0, 0, 0, padding)) if padding else query
    tiled = full.view(count, tile, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(count, kv_heads, group * tile, dim)
    out = scaled_dot_product_attention(
        tiled, keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1), attn_mask=mask, scale=scale
    )
    laid = out.view(count, kv_heads, group, tile, -1).permute(0, 3, 1, 2, 4).reshape(count * tile, heads, -1)
    return laid[:tokens]


def _tile(group: int) -> int:
    return max(-(-_MIN_ROWS // group), _MAX_ROWS // group)


def _decode_mask(current: Plan, run: Run, dtype: torch.dtype, window: int | None) -> Tensor:
    key = (run.row, -1, window)
    if key not in current.masks:
        positions = current.positions[run.row : run.row + run.count]
        current.masks[key] = _mask(positions, run.length, dtype, window)[:, None, None, :]
    return current.masks[key]


def _prefill_mask(current: Plan, tile: Tile, group: int, dtype: torch.dtype, window: int | None) -> Tensor:
    key = (tile.row, tile.start, window)
    if key not in current.masks:
        size = _tile(group)
        count = -(-tile.count // size)
        positions = torch.arange(tile.start, tile.start + count * size)
        mask = _mask(positions.clamp(max=tile.length - 1), tile.length, dtype, window)
        current.masks[key] = mask.view(count, 1, size, tile.length).repeat(1, 1, group, 1)
    return current.masks[key]


def _mask(positions: Tensor, length: int, dtype: torch.dtype, window: int | None) -> Tensor:
    """Additive causal mask `[len(positions), length]`, limited to the last `window` keys where the layer slides."""
    keys = torch.arange(length)
    hidden = keys[None, :] > positions[:, None]
    if window is not None:
        hidden |= keys[None, :] <= positions[:, None] - window
    return torch.zeros(len(positions), length, dtype=dtype).masked_fill(hidden, float("-inf"))
