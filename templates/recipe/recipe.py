"""unnamed: one sentence about the method. This half decides which reports train; the tensor half is `program.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from reef_cli.core.types import Inference, Report, Sample
from reef_cli.learning.contract import Acquisition, RecipeSettings, Refusal, Signal
from reef_cli.learning.samples import WeightsRecipe, scored_sample


@dataclass(frozen=True, slots=True)
class UnnamedSettings(RecipeSettings):
    """Settings of unnamed beside those of every recipe; the text under each one is its documentation."""

    policy_lr: float = 2e-4
    """Learning rate of the LoRA adapter."""

    baseline: float = 0.5
    """Answers scored above it become likelier, those below it less likely."""


class UnnamedRecipe(WeightsRecipe):
    """One sentence about what a step does."""

    name: ClassVar[str] = "unnamed"
    title: ClassVar[str] = "What it does, in one line"
    signal: ClassVar[Signal] = Signal("one score per answer", "the application")
    acquisition: ClassVar[Acquisition] = Acquisition.REACTIVE
    settings_type: ClassVar[type[RecipeSettings]] = UnnamedSettings
    program_path: ClassVar[str] = "recipes.unnamed.program:UnnamedProgram"
    for_program: ClassVar[tuple[str, ...]] = ("policy_lr", "baseline")  # the settings the program gets

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """A sample from one report, or a Refusal with a stable reason. Change here which reports train."""
        return scored_sample(report, records, step_of, max_temperature=self.max_temperature)
