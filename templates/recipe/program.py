"""The tensor half of unnamed: a policy gradient with a fixed baseline, in the shared off-policy correction."""

from dataclasses import dataclass

from reef_cli.config.off_policy import OffPolicy
from reef_cli.trainer.batching import Batch
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.program import OptimizerSettings, Program, StepReport
from reef_cli.trainer.stepping import policy_gradient_step


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What the recipe hands over."""

    policy_lr: float
    baseline: float


class UnnamedProgram(Program):
    """One step per batch."""

    settings_type = ProgramSettings
    settings: ProgramSettings

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(lr=self.settings.policy_lr)

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        # Change here what a step computes: one advantage per sample, spread over its tokens.
        values = [sample.reward - self.settings.baseline for sample in batch.samples]
        advantages = [batch.per_token(micro, values) for micro in batch.micros]
        return policy_gradient_step(policy, batch, OffPolicy(kind="dis"), advantages)
