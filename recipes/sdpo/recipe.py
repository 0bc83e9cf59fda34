"""SDPO (self-distillation policy optimization): a correct sibling's answer makes the model its own teacher.

Several answers to one task come as a group. For each of them the teacher reads the question with the first other answer that
was correct (and, where there is none, the report's feedback on the answer itself) and scores the answer's tokens. The tensor
half is `program.py`. Source: arXiv:2601.20802.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.types import Extras, Inference, Report, Sample
from reef_cli.learning.comparing import GroupedRecipe
from reef_cli.learning.contract import GroupSettings, RecipeSettings, Refusal, Signal, Tools
from reef_cli.learning.samples import (
    conversation,
    group_places,
    question_of,
    scored_sample,
    with_teacher_context,
    without_weight,
)
from reef_cli.learning.settings import check, check_weighted

SOLUTION = "Correct solution:\n\n{solution}"
FEEDBACK = "The following is feedback from your unsuccessful earlier attempt:\n\n{feedback}"
TASK = "Correctly solve the original question."
_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SDPOSettings(GroupSettings):
    """Settings of SDPO beside those of every recipe that compares groups."""

    batch_size: int = 256
    """Samples per training step: 32 tasks of 8 answers."""

    group_size: int = 8
    """Answers per task; a report names `metadata.group` and `metadata.rollout`."""

    policy_lr: float = 1e-4
    """Learning rate of the LoRA adapter; use about 1e-6 with `trainer.method: full`."""

    success: float = 0.5
    """Answers with at least this score are correct and may be shown to a sibling's teacher."""

    use_feedback: Literal["fallback", "always", "never"] = "fallback"
    """When the teacher reads a report's text feedback: without a correct sibling, always, or never."""

    teacher: str = "average"
    """Whose weights read the solution: `average` (a moving average of the policy), `base` or `self`."""

    teacher_rate: float = 0.05
    """How much of the policy the moving average takes over after each step (0.01 with rich feedback)."""

    alpha: float = 0.5
    """Which divergence: 0 is forward KL(teacher || policy), 1 reverse, between them Jensen-Shannon."""

    top_k: int = 100
    """Likeliest tokens of the policy it is computed on (20 with rich feedback); 0 takes the whole vocabulary."""

    tail: bool = True
    """One bin for all other tokens; off renormalises the listed ones."""

    hybrid: float = 0.0
    """Above 0: a policy gradient with A = hybrid * A_group + (1 - hybrid) * (log p_teacher - log p); 0.9 for small models."""

    max_teacher_tokens: int = 10240
    """Longer teacher contexts are left out: the sample stays in its batch and trains nothing."""

    off_policy: Mapping[str, Any] = field(default_factory=dict)
    """The shared block; `tis` cut at 2 unless it says otherwise."""

    def __post_init__(self) -> None:
        GroupSettings.__post_init__(self)
        check(self, positive=("policy_lr",), natural=("top_k",), shares=("teacher_rate", "alpha", "hybrid"))
        check_weighted(OffPolicy.of(self.off_policy, kind="tis"))


class SDPORecipe(GroupedRecipe):
    """Divergence from the model that has read a correct answer of the same group."""

    name: ClassVar[str] = "sdpo"
    title: ClassVar[str] = "Self-distillation policy optimization: a correct sibling makes the model its own teacher"
    signal: ClassVar[Signal] = Signal("scores of a group and text feedback, as context of a self-teacher", "a verifier")
    settings_type: ClassVar[type[RecipeSettings]] = SDPOSettings
    settings: SDPOSettings
    program_path: ClassVar[str] = "recipes.sdpo.program:SDPOProgram"
    for_program: ClassVar[tuple[str, ...]] = (
        "policy_lr", "teacher", "teacher_rate", "alpha", "top_k", "tail", "hybrid", "off_policy",
    )  # fmt: skip

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per scored receipt that names its group, or a stable reason why there is none."""
        places = group_places(report)
        if isinstance(places, Refusal):
            return places
        told = {} if not records else conversation(records[0])
        feedback = report.feedback if isinstance(report.feedback, str) else ""
        return scored_sample(
            report, records, step_of, max_temperature=self.max_temperature, extras={**places, **told, "feedback": feedback}
        )

    def assemble(self, samples: Sequence[Sample], tools: Tools) -> list[Sample]:
        """What each answer's teacher reads; answers with nothing to read get weight 0."""
        return [self._taught(sample, samples, tools) for sample in samples]

    def _taught(self, sample: Sample, samples: Sequence[Sample], tools: Tools) -> Sample:
        siblings = (other for other in samples if other.extras[Extras.GROUP] == sample.extras[Extras.GROUP])
        good = (other for other in siblings if other.id != sample.id and other.reward >= self.settings.success)
        solution = next((strip_thinking(other.extras[Extras.ANSWER]) for other in good), "")
        feedback = sample.extras["feedback"] if self._reads_feedback(sample, solution) else ""
        if not solution and not feedback:
            return without_weight(sample)
        text = context(question_of(sample), solution, feedback)
        return with_teacher_context(sample, text, tools, longest=self.settings.max_teacher_tokens)

    def _reads_feedback(self, sample: Sample, solution: str) -> bool:
        use = self.settings.use_feedback
        failed = sample.reward < self.settings.success
        return failed and (use == "always" or (use == "fallback" and not solution))


def context(question: str, solution: str, feedback: str) -> str:
    """The teacher's question."""
    parts = [question]
    if solution:
        parts.append(SOLUTION.format(solution=solution))
    if feedback:
        parts.append(FEEDBACK.format(feedback=feedback))
    return "\n\n".join([*parts, TASK])


def strip_thinking(answer: str) -> str:
    """An answer without its reasoning block."""
    return _THINKING.sub("", answer)
