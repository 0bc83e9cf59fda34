"""OPD's tensor half: a teacher's opinion of the policy's own tokens, as an advantage (`sampled`) or as a divergence.

The student's log-probs in the signal are those of the weights being trained, not of those that sampled: reverse KL does not
tolerate staleness. What remains of it is corrected by the `off_policy` block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.types import Extras
from reef_cli.trainer.batching import Batch, MicroBatch, in_context, teacher_contexts
from reef_cli.trainer.diagnostics import batch_metrics, mean
from reef_cli.trainer.distilling import Divergence, counted, distill_step, with_gap
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.losses import distill
from reef_cli.trainer.losses.policy import Terms, policy_terms
from reef_cli.trainer.model import TokenOutput
from reef_cli.trainer.program import Program, StepReport
from reef_cli.trainer.stepping import imitation_step, step
from reef_cli.trainer.teachers import Teacher, named


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What the recipe hands over; documented in `recipe.py`."""

    policy_lr: float
    teacher: str
    loss: str
    top_k: int
    support: str
    strength: float
    reward_weight: float
    continual: str
    gap_weight: float
    gap_clip: float
    off_policy: Mapping[str, Any]


class OPDProgram(Program):
    """One step per batch. It has no state: the teacher is frozen."""

    settings_type = ProgramSettings
    settings: ProgramSettings

    @property
    def off(self) -> OffPolicy:
        return OffPolicy.of(self.settings.off_policy, kind="tis")

    def reset(self, policy: Policy) -> None:  # noqa: ARG002  a frozen teacher starts from nothing
        self.teacher: Teacher | None = None if self.settings.teacher == "recorded" else named(self.settings.teacher)

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        report = self._learn(policy, batch)
        told: dict[str, float] = {}
        if self.settings.continual != "off":
            cost = sum(float(sample.extras.get("teacher_cost", 0.0)) for sample in batch.samples)
            told = {"escalated_share": mean([float(weight > 0) for weight in batch.weights]), "teacher_cost": cost}
        return StepReport(report.policy_updated, {**report.metrics, **told})

    def _learn(self, policy: Policy, batch: Batch) -> StepReport:
        s = self.settings
        if s.continual == "answers":
            return imitation_step(policy, batch)
        if s.loss == "sampled":
            return self._by_sampled_token(policy, batch)
        how = Divergence(alpha=1.0, top_k=s.top_k if s.loss == "top_k" else 0, support=s.support)
        return distill_step(policy, batch, self.off, how, self.teacher)

    def _by_sampled_token(self, policy: Policy, batch: Batch) -> StepReport:
        counts = counted(batch)
        if counts == 0:
            shown = {**batch_metrics(batch), "published": False, "skipped": "nothing_to_distil"}
            return StepReport(False, shown)
        theirs = {id(micro): self._teacher_logprobs(policy, batch, micro) for micro in batch.micros}
        gaps: list[Tensor] = []

        def terms(micro: MicroBatch, out: TokenOutput) -> Terms:
            taught = theirs[id(micro)]
            gap = (taught - out.logprob.detach()) * (batch.per_token(micro, batch.weights) > 0)
            gaps.append(gap.sum().double())
            return policy_terms(
                self.off, out.logprob, micro.rollout_logprobs, self._advantages(batch, micro, out, taught), micro.row
            )

        report = step(policy, batch, self.off, terms, weights=batch.weights, divisor=counts)
        return with_gap(report, policy.sum(torch.stack(gaps).sum()), counts)

    def _advantages(self, batch: Batch, micro: MicroBatch, out: TokenOutput, taught: Tensor) -> Tensor:
        s = self.settings
        if s.continual == "logprobs":
            parts = zip(micro.split(taught).values(), micro.split(micro.rollout_logprobs).values(), strict=True)
            found = [distill.normalised_gap(theirs, mine, s.gap_weight, s.gap_clip) for theirs, mine in parts]
            return torch.cat(found) if found else taught
        reward = batch.per_token(micro, [sample.reward * s.reward_weight for sample in batch.samples])
        return distill.opd_advantages(reward, out.logprob, taught, s.strength)

    def _teacher_logprobs(self, policy: Policy, batch: Batch, micro: MicroBatch) -> Tensor:
        if self.teacher is None:
            return batch.token_extras(micro, Extras.TEACHER_LOGPROBS)
        return policy.score(in_context(batch, micro, teacher_contexts(batch)), self.teacher).logprob
