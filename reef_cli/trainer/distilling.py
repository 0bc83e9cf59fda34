"""A step towards a teacher's distributions at the policy's own tokens: what SDPO, SDFT and top-K distillation share.

    L = mean over tokens of  f(r) * D(student, teacher)      r = p now / p sampled, f the `off_policy` kind's (detached)

D is over the whole vocabulary or over the K likeliest ids of the student or the teacher. The teacher reads the context in each
sample's `teacher_prompt_ids`, else the student's own; samples of weight 0 and an answer's first `skip` tokens do not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.types import Extras
from reef_cli.trainer.batching import Batch, MicroBatch, in_context, teacher_contexts
from reef_cli.trainer.diagnostics import batch_metrics
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.losses import distill, importance
from reef_cli.trainer.losses.policy import Terms, ratio_weight
from reef_cli.trainer.model import TokenOutput
from reef_cli.trainer.program import Program, StepReport
from reef_cli.trainer.stepping import step
from reef_cli.trainer.teachers import Teacher, named


@dataclass(frozen=True, slots=True)
class Divergence:
    """Which divergence: `alpha` 0 forward KL, 1 reverse, between them Jensen-Shannon; `top_k` 0 takes the whole vocabulary."""

    alpha: float = 1.0
    top_k: int = 0
    support: str = "student"
    tail: bool = True
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a teacher says about one micro-batch: listed log-probs, or hidden states; and its log-prob of the sampled token."""

    counts: Tensor
    sampled: Tensor | None
    ids: Tensor | None = None
    logprobs: Tensor | None = None
    hidden: Tensor | None = None


def distill_step(policy: Policy, batch: Batch, off: OffPolicy, how: Divergence, teacher: Teacher | None) -> StepReport:
    """One update. Without a `teacher` its lists are recorded in the samples' extras. A batch without weight is skipped."""
    counts = counted(batch, how.skip)
    if counts == 0:
        shown = {**batch_metrics(batch), "published": False, "skipped": "nothing_to_distil"}
        return StepReport(False, shown)
    lessons = {id(micro): lesson(policy, batch, micro, how, teacher) for micro in batch.micros}
    gaps: list[Tensor] = []

    def ids(micro: MicroBatch) -> Tensor:
        listed = lessons[id(micro)].ids
        own = micro.targets.unsqueeze(-1)
        return own if listed is None else torch.cat([own, listed], -1)

    def terms(micro: MicroBatch, out: TokenOutput) -> Terms:
        taught = lessons[id(micro)]
        weight = ratio_weight(off, importance.ratio(out.logprob, micro.rollout_logprobs))
        if taught.sampled is not None:
            gaps.append(((taught.sampled - out.logprob.detach()) * (taught.counts > 0)).sum().double())
        return Terms(_distance(policy, micro, out, taught, how, teacher) * weight * taught.counts, weight == 0)

    report = step(policy, batch, off, terms, divisor=counts, ids=ids)
    total = policy.sum(torch.stack(gaps).sum()) if gaps else None
    return with_gap(report, total, counts)


def with_gap(report: StepReport, total: Tensor | None, counts: float) -> StepReport:
    """The report with `teacher_gap`: mean log p_teacher - log p_student of the sampled tokens, and the tokens that counted."""
    gap = {} if total is None else {"teacher_gap": float(total) / max(1.0, counts)}
    return StepReport(report.policy_updated, {**report.metrics, **gap, "distilled_tokens": int(counts)})


def counted(batch: Batch, skip: int = 0) -> float:
    """Tokens that count over all ranks: those of samples with weight, after the first `skip` of each answer."""
    return float(
        sum(
            sum(sample.tokens.loss_mask[skip:])
            for sample, weight in zip(batch.samples, batch.weights, strict=True)
            if weight > 0
        )
    )


def lesson(policy: Policy, batch: Batch, micro: MicroBatch, how: Divergence, teacher: Teacher | None) -> Lesson:
    """Ask the teacher about a micro-batch, before the step."""
    counts = batch.per_token(micro, batch.weights) * (micro.offset >= how.skip)
    if teacher is None:
        ids = listed_extras(batch, micro, Extras.TEACHER_TOP_IDS).long()
        return Lesson(counts, None, ids, listed_extras(batch, micro, Extras.TEACHER_TOP_LOGPROBS))
    read = in_context(batch, micro, teacher_contexts(batch))
    if how.top_k == 0:
        out = policy.score(read, teacher)
        return Lesson(counts, out.logprob, hidden=out.hidden)
    ids, _ = policy.top(micro, how.top_k) if how.support == "student" else policy.top(read, how.top_k, teacher)
    logprobs = policy.score(read, teacher, torch.cat([micro.targets.unsqueeze(-1), ids], -1)).logprobs
    return Lesson(counts, logprobs[:, 0], ids, logprobs[:, 1:])


def listed_extras(batch: Batch, micro: MicroBatch, name: str) -> Tensor:
    """An entry of the samples' extras with a list per output token, at the action tokens `[N, K]`."""
    rows = [batch.samples[position].extras.get(name) for position in micro.rows]
    width = max((len(row[0]) for row in rows if row), default=1)
    found = [
        rows[row][offset] if rows[row] else [0.0] * width
        for row, offset in zip(micro.row.tolist(), micro.offset.tolist(), strict=True)
    ]
    return torch.tensor(found, dtype=torch.float32, device=micro.row.device).reshape(len(found), width)


def _distance(
    policy: Policy, micro: MicroBatch, out: TokenOutput, taught: Lesson, how: Divergence, teacher: Teacher | None
) -> Tensor:
    if taught.hidden is None:
        assert taught.logprobs is not None
        return distill.listed_divergence(out.logprobs[:, 1:], taught.logprobs, how.alpha, tail=how.tail)
    theirs = None if teacher is None else teacher.head(policy)
    return distill.linear_divergence(out.hidden, taught.hidden, policy.head, micro.temperature, how.alpha, teacher_head=theirs)


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """What a recipe of this family hands over."""

    policy_lr: float
    teacher: str
    teacher_rate: float
    alpha: float
    top_k: int
    tail: bool
    off_policy: Mapping[str, Any]
    skip_tokens: int = 0


class DistillProgram(Program):
    """One distillation step per batch. Its state is the teacher's."""

    settings_type: ClassVar[type[DistillSettings]] = DistillSettings
    settings: DistillSettings
    support = "student"

    @property
    def off(self) -> OffPolicy:
        return OffPolicy.of(self.settings.off_policy, kind="tis")

    def reset(self, policy: Policy) -> None:
        self.teacher = named(self.settings.teacher, self.settings.teacher_rate)
        self.teacher.reset(policy)

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        report = self.learn(policy, batch)
        if report.policy_updated:
            self.teacher.follow(policy)
        return report

    def learn(self, policy: Policy, batch: Batch) -> StepReport:
        """The step itself, before the teacher follows."""
        s = self.settings
        how = Divergence(s.alpha, s.top_k, self.support, s.tail, s.skip_tokens)
        return distill_step(policy, batch, self.off, how, self.teacher)

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.teacher.load_state_dict(state["teacher"])
