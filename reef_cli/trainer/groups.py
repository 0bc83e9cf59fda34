"""Rewards compared within groups: samples with the same `group` in their extras answer the same task.

`GroupProgram` is the whole step of recipes that compare: each answer's reward against its group's, in the policy loss of the
`off_policy` block.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.types import Extras, Sample
from reef_cli.trainer.batching import Batch
from reef_cli.trainer.diagnostics import batch_metrics, mean
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.losses import advantages as adv
from reef_cli.trainer.program import Program, StepReport
from reef_cli.trainer.stepping import by_sequence, policy_gradient_step

ADVANTAGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "grpo": adv.grpo_advantages,
    "dr_grpo": adv.dr_grpo_advantages,
    "rloo": adv.rloo_advantages,
}


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


@dataclass(frozen=True, slots=True)
class GroupProgramSettings:
    """What a recipe of this family hands over."""

    policy_lr: float
    advantage: str
    aggregate: str
    off_policy: Mapping[str, Any]


class GroupProgram(Program):
    """One step per batch of whole groups. It has no state."""

    settings_type: ClassVar[type[GroupProgramSettings]] = GroupProgramSettings
    settings: GroupProgramSettings

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        values = by_group(batch, self._advantages)
        groups = group_metrics(batch)
        if not any(values):
            return StepReport(False, {**batch_metrics(batch), **groups, "published": False, "skipped": "no_group_differs"})
        weights = by_sequence(batch) if self.settings.aggregate == "sequence" else None
        advantages = [batch.per_token(micro, values) for micro in batch.micros]
        report = policy_gradient_step(policy, batch, OffPolicy.of(self.settings.off_policy), advantages, weights=weights)
        return StepReport(report.policy_updated, {**report.metrics, **groups})

    def _advantages(self, rewards: list[float]) -> Sequence[float]:
        found: list[float] = ADVANTAGES[self.settings.advantage](torch.tensor(rewards, dtype=torch.float64)).tolist()
        return found
