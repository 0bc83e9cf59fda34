"""SFT (supervised fine-tuning): imitate demonstrations and corrections that come back with reports.

A report names what the answer should have been (`metadata.demonstration`, or `feedback: {"correction": text}`); with
`imitate_above`, answers scored that well are their own demonstrations. The tensor half is `program.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from reef_cli.core.types import Extras, Inference, Report, Sample
from reef_cli.learning.contract import RecipeSettings, Refusal, Signal, Tools
from reef_cli.learning.samples import WeightsRecipe, as_demonstration, conversation, traced_sample
from reef_cli.learning.settings import check


@dataclass(frozen=True, slots=True)
class SFTSettings(RecipeSettings):
    """Settings of SFT beside those of every recipe."""

    max_staleness: int = 1000
    """A demonstration does not age with the policy that was corrected; this only bounds how long one may wait."""

    policy_lr: float = 2e-4
    """Learning rate of the LoRA adapter; use about 1e-5 with `trainer.method: full`."""

    imitate_above: float | None = None
    """Answers with at least this score and no demonstration are imitated themselves; null switches that off."""

    max_tokens: int = 8192
    """Longer conversations stay in their batch and train nothing."""

    def __post_init__(self) -> None:
        check(self, positive=("policy_lr",))


class SFTRecipe(WeightsRecipe):
    """Negative log-likelihood of demonstrated answers."""

    name: ClassVar[str] = "sft"
    title: ClassVar[str] = "Supervised fine-tuning: imitate demonstrations and corrections"
    signal: ClassVar[Signal] = Signal("demonstrations", "people or a better model, in reports")
    settings_type: ClassVar[type[RecipeSettings]] = SFTSettings
    settings: SFTSettings
    program_path: ClassVar[str] = "recipes.sft.program:SFTProgram"
    for_program: ClassVar[tuple[str, ...]] = ("policy_lr",)

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per demonstration, or per answer that is good enough to be one."""
        text = demonstration(report)
        score = 0.0 if report.score is None else report.score
        if not math.isfinite(score):
            return Refusal("score_not_finite")
        bar = self.settings.imitate_above
        if text is None and (bar is None or report.score is None or score < bar):
            return Refusal("needs_demonstration")
        told = {} if text is None or not records else {**conversation(records[0]), Extras.DEMONSTRATION: text}
        return traced_sample(report, records, step_of, reward=score, max_temperature=self.max_temperature, extras=told)

    def assemble(self, samples: Sequence[Sample], tools: Tools) -> list[Sample]:
        """Demonstrations in place of the answers they correct."""
        return [self._taught(sample, tools) for sample in samples]

    def _taught(self, sample: Sample, tools: Tools) -> Sample:
        text = sample.extras.get(Extras.DEMONSTRATION)
        return sample if text is None else as_demonstration(sample, text, tools, longest=self.settings.max_tokens)


def demonstration(report: Report) -> str | None:
    """The text a report says should have been the answer."""
    text = report.metadata.get("demonstration")
    if text is None and isinstance(report.feedback, Mapping):
        text = report.feedback.get("correction")
    return text if isinstance(text, str) and text else None
