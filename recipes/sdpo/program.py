"""SDPO's tensor half: the shared distillation step, or with `hybrid` a policy gradient whose advantage mixes in the teacher."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from reef_cli.trainer.batching import Batch, MicroBatch, in_context, teacher_contexts
from reef_cli.trainer.distilling import DistillProgram, DistillSettings
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.groups import by_group, group_metrics
from reef_cli.trainer.losses.advantages import grpo_advantages
from reef_cli.trainer.losses.policy import Terms, policy_terms
from reef_cli.trainer.model import TokenOutput
from reef_cli.trainer.program import StepReport
from reef_cli.trainer.stepping import step


@dataclass(frozen=True, slots=True)
class ProgramSettings(DistillSettings):
    """What the recipe hands over; documented in `recipe.py`."""

    hybrid: float = 0.0


class SDPOProgram(DistillProgram):
    """mean over tokens of min(r, 2) * D(policy, teacher); the teacher follows the policy as a moving average."""

    settings_type: ClassVar[type[DistillSettings]] = ProgramSettings

    def learn(self, policy: Policy, batch: Batch) -> StepReport:
        assert isinstance(self.settings, ProgramSettings)
        share = self.settings.hybrid
        report = self._mixed(policy, batch, share) if share > 0 else super().learn(policy, batch)
        taught = sum(weight > 0 for weight in batch.weights)
        return StepReport(report.policy_updated, {**report.metrics, **group_metrics(batch), "taught_samples": taught})

    def _mixed(self, policy: Policy, batch: Batch, share: float) -> StepReport:
        """Samples without a teacher's context still learn from their group."""
        group = by_group(batch, lambda rewards: grpo_advantages(torch.tensor(rewards, dtype=torch.float64)).tolist())
        contexts = teacher_contexts(batch)
        theirs = {id(micro): policy.score(in_context(batch, micro, contexts), self.teacher).logprob for micro in batch.micros}

        def terms(micro: MicroBatch, out: TokenOutput) -> Terms:
            gap = (theirs[id(micro)] - out.logprob.detach()) * batch.per_token(micro, batch.weights)
            advantage = hybrid_advantage(batch.per_token(micro, group), gap, share)
            return policy_terms(self.off, out.logprob, micro.rollout_logprobs, advantage, micro.row)

        return step(policy, batch, self.off, terms)


def hybrid_advantage(group: torch.Tensor, teacher: torch.Tensor, share: float) -> torch.Tensor:
    """share * A_group + (1 - share) * A_teacher."""
    return share * group + (1 - share) * teacher
