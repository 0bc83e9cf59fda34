"""GRPO's tensor half: each answer's reward against its group's, in the policy loss of the `off_policy` block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reef_cli.config.off_policy import OffPolicy
from reef_cli.trainer.batching import Batch
from reef_cli.trainer.diagnostics import batch_metrics
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.groups import by_group, group_metrics
from reef_cli.trainer.losses import advantages as adv
from reef_cli.trainer.program import OptimizerSettings, Program, StepReport
from reef_cli.trainer.stepping import by_sequence, policy_gradient_step

ADVANTAGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "grpo": adv.grpo_advantages,
    "dr_grpo": adv.dr_grpo_advantages,
    "rloo": adv.rloo_advantages,
}


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What the recipe hands over; documented in `recipe.py`."""

    policy_lr: float
    advantage: str
    aggregate: str
    off_policy: Mapping[str, Any]


class GRPOProgram(Program):
    """One step per batch of whole groups. It has no state."""

    settings_type = ProgramSettings
    settings: ProgramSettings

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(lr=self.settings.policy_lr)

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
