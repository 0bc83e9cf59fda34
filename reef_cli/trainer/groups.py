"""Rewards compared within groups: samples with the same `group` in their extras answer the same task."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from reef_cli.core.types import Extras, Sample
from reef_cli.trainer.batching import Batch
from reef_cli.trainer.diagnostics import mean


def positions(samples: Sequence[Sample]) -> list[list[int]]:
    """Batch positions by group, in order of first members; a sample without a group is its own."""
    found: dict[str, list[int]] = defaultdict(list)
    for position, sample in enumerate(samples):
        key = sample.extras.get(Extras.GROUP)
        found[f"alone {position}" if key is None else f"group {key}"].append(position)
    return list(found.values())


def by_group(batch: Batch, advantages: Callable[[list[float]], Sequence[float]]) -> list[float]:
    """One advantage per sample: `advantages` of each group's rewards, put back in the batch's order."""
    values = [0.0] * len(batch.samples)
    for group in positions(batch.samples):
        found = advantages([batch.samples[position].reward for position in group])
        for position, value in zip(group, found, strict=True):
            values[position] = float(value)
    return values


def group_metrics(batch: Batch) -> dict[str, Any]:
    """How many groups there are and which share has nothing to compare, all rewards being equal."""
    groups = positions(batch.samples)
    flat = [len({batch.samples[position].reward for position in group}) < 2 for group in groups]
    return {"groups": len(groups), "flat_groups": mean([float(one) for one in flat])}
