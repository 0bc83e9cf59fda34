"""Samples become tensors: right-padded micro-batches in which every action token is addressed once.

Only action tokens (loss mask 1) get log-probs and values, so observation tokens cost a forward pass but no vocabulary work.
All per-token tensors are flat `[N]` over the micro-batch's action tokens, row by row. Rows are sorted by length to waste little
padding, then dealt to the ranks; every rank gets the same number of micro-batches (some may be empty), because the
collectives of ZeRO need it.
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

    `rows` are the samples' positions in the batch. Action token n sits in row `row[n]`, is predicted at column `column[n]`
    (the token before it) and is output token `offset[n]` of its sample.
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

    def __len__(self) -> int:
        return int(self.targets.numel())

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
) -> Batch:
    """The batch of one step as rank `rank` of `world_size` sees it."""
    order = sorted(range(len(samples)), key=lambda i: (_length(samples[i]), i))
    groups = [order[i : i + micro_batch] for i in range(0, len(order), micro_batch)]
    rounds = ceil(len(groups) / world_size)
    mine = [groups[i] if i < len(groups) else [] for i in range(rank, rounds * world_size, world_size)]
    # An empty turn still runs one row, so that every rank enters every collective; it has no action tokens.
    micros = tuple(_micro(samples, rows or order[:1], bool(rows), device, pad_id) for rows in mine)
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
    other = _micro(read, range(len(read)), True, micro.input_ids.device, pad_id)
    return replace(other, rows=micro.rows)


def _actions(sample: Sample) -> Iterator[int]:
    """Output positions that train. The first token of an empty prompt is predicted by nothing and cannot."""
    nothing_before = not sample.tokens.prompt_ids
    return (i for i, action in enumerate(sample.tokens.loss_mask) if action and not (nothing_before and i == 0))


def _length(sample: Sample) -> int:
    return len(sample.tokens.prompt_ids) + len(sample.tokens.output_ids)


def _micro(samples: Sequence[Sample], rows: Sequence[int], active: bool, device: torch.device | str, pad_id: int) -> MicroBatch:
    width = max(_length(samples[i]) for i in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    attention = torch.zeros((len(rows), width), dtype=torch.long)
    flat: list[tuple[int, int, int, int, float, float]] = []
    for row, position in enumerate(rows):
        tokens = samples[position].tokens
        sequence = (*tokens.prompt_ids, *tokens.output_ids)
        ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
        attention[row, : len(sequence)] = 1
        start = len(tokens.prompt_ids)
        for offset in _actions(samples[position]) if active else ():
            token, logprob = tokens.output_ids[offset], tokens.logprobs[offset]
            flat.append((row, start + offset - 1, offset, token, logprob, tokens.temperature))
    columns = list(zip(*flat, strict=True)) or [()] * 6
    long = [torch.tensor(column, dtype=torch.long, device=device) for column in columns[:4]]
    real = [torch.tensor(column, dtype=torch.float32, device=device) for column in columns[4:]]
    return MicroBatch(tuple(rows) if active else (), ids.to(device), attention.to(device), *long, *real)
