"""SDFT (self-distillation fine-tuning): the model, shown a demonstration, teaches itself without it.

A report brings the demonstration as `metadata.teacher_context`; the teacher reads it after the question and scores the answer
the policy gave on its own, so the policy stays near its own distribution where imitation would pull it to the demonstration's
words. The tensor half is `program.py`. Source: arXiv:2601.19897.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.types import Extras, Inference, Report, Sample
from reef_cli.learning.contract import RecipeSettings, Refusal, Signal, Tools
from reef_cli.learning.samples import WeightsRecipe, conversation, question_of, traced_sample, with_teacher_context
from reef_cli.learning.settings import check, check_weighted

CONTEXT = (
    "{question}\n\nThis is an example of a good answer to the question:\n\n{demonstration}\n\n"
    "Now answer the question yourself, in the same spirit."
)
PLACES = ("{question}", "{demonstration}")
_PLACE = re.compile("|".join(map(re.escape, PLACES)))


@dataclass(frozen=True, slots=True)
class SDFTSettings(RecipeSettings):
    """Settings of SDFT beside those of every recipe."""

    policy_lr: float = 2e-4
    """Learning rate of the LoRA adapter; use about 1e-6 with `trainer.method: full`."""

    teacher: str = "average"
    """Whose weights read the demonstration: `average` (a moving average of the policy), `base` or `self`."""

    teacher_rate: float = 0.01
    """How much of the policy the moving average takes over after each step; 0 keeps it where it started."""

    alpha: float = 0.0
    """Which divergence: 0 is forward KL(teacher || policy), 1 reverse, between them Jensen-Shannon."""

    top_k: int = 0
    """Likeliest tokens of the policy it is computed on; 0 takes the whole vocabulary."""

    tail: bool = True
    """With `top_k`: one bin for all other tokens; off renormalises the listed ones."""

    skip_tokens: int = 3
    """First tokens of each answer that do not train: there the teacher tends to talk about its example."""

    context: str = CONTEXT
    """What the teacher reads, with `{question}` and `{demonstration}` in it once each; small models need it plain."""

    max_teacher_tokens: int = 18432
    """Longer teacher contexts are left out: the sample stays in its batch and trains nothing."""

    off_policy: Mapping[str, Any] = field(default_factory=dict)
    """The shared block; `tis` cut at 2 unless it says otherwise."""

    def __post_init__(self) -> None:
        told = all(self.context.count(name) == 1 for name in PLACES)
        check(
            self,
            positive=("policy_lr",),
            natural=("top_k",),
            shares=("teacher_rate", "alpha"),
            wrong=() if told else ("context",),
        )
        check_weighted(OffPolicy.of(self.off_policy, kind="tis"))


class SDFTRecipe(WeightsRecipe):
    """Divergence from the model that has read the demonstration."""

    name: ClassVar[str] = "sdft"
    title: ClassVar[str] = "Self-distillation fine-tuning: the model that has seen a demonstration teaches the one that has not"
    signal: ClassVar[Signal] = Signal("demonstrations, as context of a self-teacher", "people or a better model, in reports")
    settings_type: ClassVar[type[RecipeSettings]] = SDFTSettings
    settings: SDFTSettings
    program_path: ClassVar[str] = "recipes.sdft.program:SDFTProgram"
    for_program: ClassVar[tuple[str, ...]] = (
        "policy_lr", "teacher", "teacher_rate", "alpha", "top_k", "tail", "skip_tokens", "off_policy",
    )  # fmt: skip

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per answer that comes with a demonstration; a score is not needed."""
        context = report.metadata.get("teacher_context")
        if not isinstance(context, str) or not context:
            return Refusal("needs_teacher_context")
        score = 0.0 if report.score is None else report.score
        if not math.isfinite(score):
            return Refusal("score_not_finite")
        told = {} if not records else {**conversation(records[0]), Extras.DEMONSTRATION: context}
        return traced_sample(report, records, step_of, reward=score, max_temperature=self.max_temperature, extras=told)

    def assemble(self, samples: Sequence[Sample], tools: Tools) -> list[Sample]:
        """What the teacher reads."""
        return [self._taught(sample, tools) for sample in samples]

    def _taught(self, sample: Sample, tools: Tools) -> Sample:
        told = dict(zip(PLACES, (question_of(sample), sample.extras[Extras.DEMONSTRATION]), strict=True))
        text = _PLACE.sub(lambda place: str(told[place[0]]), self.settings.context)
        return with_teacher_context(sample, text, tools, longest=self.settings.max_teacher_tokens)
