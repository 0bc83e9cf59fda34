"""OPD (on-policy distillation): a teacher scores the tokens of the policy's own answers.

The teacher is the frozen base (with a hint the policy does not see), another model's folder, or an outside engine whose
log-probs come with the report. Continual OPD asks the policy first and the teacher only where a verifier failed the answer.
The tensor half is `program.py`. Sources: methods of Thinking Machines and slime; arXiv:2606.24143 on staleness.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.types import Extras, Inference, Report, Sample
from reef_cli.learning.contract import RecipeSettings, Refusal, Signal, Tools
from reef_cli.learning.samples import (
    WeightsRecipe,
    as_demonstration,
    conversation,
    question_of,
    traced_sample,
    with_teacher_context,
    without_weight,
)
from reef_cli.learning.settings import check, check_weighted

_LISTS = (Extras.TEACHER_LOGPROBS, Extras.TEACHER_TOP_IDS, Extras.TEACHER_TOP_LOGPROBS)


@dataclass(frozen=True, slots=True)
class OPDSettings(RecipeSettings):
    """Settings of on-policy distillation beside those of every recipe."""

    policy_lr: float = 2e-4
    """Learning rate of the LoRA adapter; use about 1e-6 with `trainer.method: full`."""

    teacher: str = "base"
    """`base` (the frozen base model), a folder of another model with the same tokenizer, or `recorded` (see the README)."""

    teacher_hint: str = ""
    """Text added to the last user message for the teacher alone: what the policy is to do without being told."""

    loss: Literal["sampled", "top_k", "full"] = "sampled"
    """Reverse KL by the sampled token, over the K likeliest tokens, or over the whole vocabulary."""

    top_k: int = 50
    """Tokens per position for the loss `top_k`, closed by one bin for all others."""

    support: Literal["student", "teacher"] = "teacher"
    """Whose likeliest tokens they are."""

    strength: float = 1.0
    """Loss `sampled`: A = reward_weight * score - strength * (log p - log p_teacher)."""

    reward_weight: float = 0.0
    """How much the report's score adds to that advantage."""

    continual: Literal["off", "answers", "logprobs"] = "off"
    """Only failed answers train: on the teacher's answer from the report, or on its normalised log-prob gap."""

    success: float = 0.5
    """Answers with at least this score did not fail."""

    gap_weight: float = 0.5
    """Continual `logprobs`: factor of the gap after its root mean square was made 1."""

    gap_clip: float = 1.0
    """Continual `logprobs`: bound of the normalised gap."""

    max_teacher_tokens: int = 8192
    """Longer teacher contexts are left out: the sample stays in its batch and trains nothing."""

    off_policy: Mapping[str, Any] = field(default_factory=dict)
    """The shared block; `tis` with its bounds unless it says otherwise."""

    def __post_init__(self) -> None:
        without_lists = self.teacher == "recorded" and self.loss == "full"
        wrong = ["loss"] if without_lists or (self.continual != "off" and self.loss != "sampled") else []
        check(self, positive=("policy_lr", "top_k", "gap_weight", "gap_clip"), wrong=wrong)
        off = OffPolicy.of(self.off_policy, kind="tis")
        if self.loss != "sampled":
            check_weighted(off)


class OPDRecipe(WeightsRecipe):
    """A teacher's log-probs on the policy's own tokens, as advantage or as divergence."""

    name: ClassVar[str] = "opd"
    title: ClassVar[str] = "On-policy distillation: a teacher scores the policy's own tokens"
    signal: ClassVar[Signal] = Signal("a teacher's token probabilities", "a frozen or outside model")
    settings_type: ClassVar[type[RecipeSettings]] = OPDSettings
    settings: OPDSettings
    program_path: ClassVar[str] = "recipes.opd.program:OPDProgram"
    for_program: ClassVar[tuple[str, ...]] = (
        "policy_lr", "teacher", "loss", "top_k", "support", "strength", "reward_weight", "continual", "gap_weight", "gap_clip",
        "off_policy",
    )  # fmt: skip

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per reported answer; a score is needed only where the settings use one."""
        s = self.settings
        if report.score is None and (s.reward_weight or s.continual != "off"):
            return Refusal("needs_score")
        score = 0.0 if report.score is None else report.score
        if not math.isfinite(score):
            return Refusal("score_not_finite")
        extras = {} if not records else conversation(records[0])
        if s.continual == "answers":
            extras[Extras.DEMONSTRATION] = report.metadata.get("teacher_answer")
        cost = report.metadata.get("teacher_cost", 0.0)
        extras["teacher_cost"] = float(cost) if isinstance(cost, int | float) else 0.0
        sample = traced_sample(report, records, step_of, reward=score, max_temperature=self.max_temperature, extras=extras)
        return self._recorded(report, sample) if s.teacher == "recorded" and isinstance(sample, Sample) else sample

    def assemble(self, samples: Sequence[Sample], tools: Tools) -> list[Sample]:
        """What the teacher reads, or answers; answers that did not fail train nothing where only failures do."""
        return [self._taught(sample, tools) for sample in samples]

    def _taught(self, sample: Sample, tools: Tools) -> Sample:
        s = self.settings
        if s.continual != "off" and sample.reward >= s.success:
            return without_weight(sample)
        if s.continual == "answers":
            text = sample.extras.get(Extras.DEMONSTRATION)
            if not isinstance(text, str):
                return without_weight(sample)
            return as_demonstration(sample, text, tools, longest=s.max_teacher_tokens)
        if not s.teacher_hint:
            return sample
        return with_teacher_context(sample, f"{question_of(sample)}\n\n{s.teacher_hint}", tools, longest=s.max_teacher_tokens)

    def _recorded(self, report: Report, sample: Sample) -> Sample | Refusal:
        """The outside teacher's lists in the extras; each needs one entry per output token."""
        needed = _LISTS[1:] if self.settings.loss == "top_k" else _LISTS[:1]
        found = {name: report.metadata.get(name) for name in needed}
        if any(not isinstance(value, list) for value in found.values()):
            return Refusal("needs_teacher_logprobs")
        if any(len(value or ()) != len(sample.tokens.output_ids) for value in found.values()):
            return Refusal("teacher_length_mismatch")
        return replace(sample, extras={**sample.extras, **found})
