"""Samples become tensors: micro-batches in which every action token is addressed once, right-padded or packed.

Only action tokens (loss mask 1) get log-probs and values, so observation tokens cost a forward pass but no vocabulary work.
All per-token tensors are flat `[N]` over the micro-batch's action tokens, sample by sample. Samples are sorted by length to
waste little padding, or packed behind each other into rows of at most `pack_tokens`, which wastes none: positions begin anew
with each sample, and attention stays within it. Micro-batches are dealt to the ranks; every rank gets the same number (some
may be empty), because the collectives of ZeRO need it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from reef_cli.core.types import Extras, Sample


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. `[B, T]` tokens; flat `[N]` fields per action token.

    `rows` are the samples' positions in the batch. Action token n belongs to sample `rows[row[n]]`, of which it is output token
    `offset[n]`; in the tensor it is predicted at `(line[n], column[n])`, the place of the token before it.
    `positions` `[1, T]` are those of packed samples within themselves; None where each sample has a row of its own.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    attention_mask: Tensor
    row: Tensor
    column: Tensor
    offset: Tensor
    targets: Tensor
    rollout_logprobs: Tensor
    temperature: Tensor
    line: Tensor
    positions: Tensor | None = None

    def __len__(self) -> int:
        return int(self.targets.numel())

    @property
    def place(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """What a model needs to find the action tokens: ids, attention, line, column, positions."""
        return self.input_ids, self.attention_mask, self.line, self.column, self.positions

    def split(self, values: Tensor) -> dict[int, Tensor]:
        """Flat `[N]` values cut by sample: batch position -> values of its action tokens."""
        if not self.rows:
            return {}
        counts: list[int] = torch.bincount(self.row, minlength=len(self.rows)).tolist()
        return dict(zip(self.rows, torch.split(values, counts), strict=True))


@dataclass(frozen=True, slots=True)
class Batch:
    """All samples of a step, and this rank's micro-batches. `tokens` counts action tokens over all ranks.

    `base_step` is the chain step of the weights being trained; a sample's lag is `base_step - sample.step`.
    """

    samples: tuple[Sample, ...]
    micros: tuple[MicroBatch, ...]
    tokens: int
    base_step: int = 0

    def lag(self, position: int) -> int:
        """Publications between the weights that made a sample and the ones being trained."""
        return max(0, self.base_step - self.samples[position].step)

    @property
    def weights(self) -> list[float]:
        """The share with which each sample counts, from its extras."""
        return [float(sample.extras.get(Extras.WEIGHT, 1.0)) for sample in self.samples]

    def per_token(self, micro: MicroBatch, values: Sequence[float]) -> Tensor:
        """One value per sample of the batch, spread over the micro-batch's action tokens `[N]`."""
        mine = torch.tensor([values[position] for position in micro.rows], dtype=torch.float32, device=micro.row.device)
        return mine[micro.row] if micro.rows else mine

    def token_extras(self, micro: MicroBatch, name: str, default: float = 0.0) -> Tensor:
        """An entry of the samples' extras with one number per output token, at the action tokens `[N]` (else `default`)."""
        rows = [self.samples[position].extras.get(name) for position in micro.rows]
        found = [
            default if rows[row] is None else rows[row][offset]
            for row, offset in zip(micro.row.tolist(), micro.offset.tolist(), strict=True)
        ]
        return torch.tensor(found, dtype=torch.float32, device=micro.row.device)


def build(
    samples: Sequence[Sample],
    micro_batch: int,
    *,
    base_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    pad_id: int = 0,
    pack_tokens: int | None = None,
) -> Batch:
    """The batch of one step as rank `rank` of `world_size` sees it; packed where `pack_tokens` is given."""
    order = sorted(range(len(samples)), key=lambda i: (_length(samples[i]), i))
    groups = (
        [order[i : i + micro_batch] for i in range(0, len(order), micro_batch)]
        if pack_tokens is None
        else _packs(order, [_length(sample) for sample in samples], pack_tokens)
    )
    rounds = ceil(len(groups) / world_size)
    mine = [groups[i] if i < len(groups) else [] for i in range(rank, rounds * world_size, world_size)]
    # An empty turn still runs one row, so that every rank enters every collective; it has no action tokens.
    packed = pack_tokens is not None
    micros = tuple(_micro(samples, rows or order[:1], bool(rows), device, pad_id, packed=packed) for rows in mine)
    tokens = sum(1 for sample in samples for _ in _actions(sample))
    return Batch(tuple(samples), micros, tokens, base_step)


def teacher_contexts(batch: Batch) -> dict[int, Sequence[int]]:
    """The prompts that samples bring for their teacher, by batch position; for `in_context`."""
    found = ((i, sample.extras.get(Extras.TEACHER_PROMPT_IDS)) for i, sample in enumerate(batch.samples))
    return {position: prompt for position, prompt in found if prompt is not None}


def in_context(batch: Batch, micro: MicroBatch, prompts: Mapping[int, Sequence[int]], pad_id: int = 0) -> MicroBatch:
    """The same answers after other prompts (by batch position; absent: the sample's own), token for token aligned with `micro`.

    What a teacher that knows more reads. Its values `[N]` stand beside the student's without any re-ordering.
    """
    if not micro.rows:
        return micro
    read = [
        replace(sample, tokens=replace(sample.tokens, prompt_ids=tuple(prompts.get(i, sample.tokens.prompt_ids))))
        for i, sample in ((i, batch.samples[i]) for i in micro.rows)
    ]
    packed = micro.positions is not None
    other = _micro(read, range(len(read)), True, micro.input_ids.device, pad_id, packed=packed)
    return replace(other, rows=micro.rows)


def _actions(sample: Sample) -> Iterator[int]:
    """Output positions that train. The first token of an empty prompt is predicted by nothing and cannot."""
    nothing_before = not sample.tokens.prompt_ids
    return (i for i, action in enumerate(sample.tokens.loss_mask) if action and not (nothing_before and i == 0))


def _length(sample: Sample) -> int:
    return len(sample.tokens.prompt_ids) + len(sample.tokens.output_ids)


def _packs(order: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """First fit, longest first: every sample in one pack, no pack over `limit` tokens but those of one longer sample."""
    packs: list[list[int]] = []
    room: list[int] = []
    for position in reversed(order):
        length = lengths[position]
        pack = next((i for i, free in enumerate(room) if free >= length), None)
        if pack is None:
            packs.append([])
            room.append(limit)
            pack = len(packs) - 1
        packs[pack].append(position)
        room[pack] -= length
    return packs


def _micro(
    samples: Sequence[Sample],
    rows: Sequence[int],
    active: bool,
    device: torch.device | str,
    pad_id: int,
    *,
    packed: bool,
) -> MicroBatch:
    lengths = [_length(samples[i]) for i in rows]
    shape = (1, sum(lengths)) if packed else (len(rows), max(lengths))
    ids = torch.full(shape, pad_id, dtype=torch.long)
    attention = torch.zeros(shape, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    flat: list[tuple[int, int, int, int, int, float, float]] = []
    begin = 0
    for row, position in enumerate(rows):
        tokens = samples[position].tokens
        sequence = (*tokens.prompt_ids, *tokens.output_ids)
        line, place = (0, slice(begin, begin + len(sequence))) if packed else (row, slice(0, len(sequence)))
        ids[line, place] = torch.tensor(sequence, dtype=torch.long)
        attention[line, place] = 1
        positions[line, place] = torch.arange(len(sequence))
        before = place.start + len(tokens.prompt_ids) - 1
        for offset in _actions(samples[position]) if active else ():
            token, logprob = tokens.output_ids[offset], tokens.logprobs[offset]
            flat.append((row, line, before + offset, offset, token, logprob, tokens.temperature))
        begin += len(sequence)
    columns = list(zip(*flat, strict=True)) or [()] * 7
    row_, line_, column, offset_, targets = (torch.tensor(each, dtype=torch.long, device=device) for each in columns[:5])
    logprobs, temperature = (torch.tensor(each, dtype=torch.float32, device=device) for each in columns[5:])
    return MicroBatch(
        rows=tuple(rows) if active else (),
        input_ids=ids.to(device),
        attention_mask=attention.to(device),
        row=row_,
        column=column,
        offset=offset_,
        targets=targets,
        rollout_logprobs=logprobs,
        temperature=temperature,
        line=line_,
        positions=positions.to(device) if packed else None,
    )
