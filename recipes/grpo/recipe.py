"""GRPO (group relative policy optimization): several answers to one task, compared with each other; the control arm.

This half decides which reports train: a finite score, one receipt, and a group. The tensor half is a shared part
(`reef_cli.trainer.groups`).
Sources: arXiv:2402.03300 (GRPO), 2503.20783 (Dr. GRPO), 2402.14740 (RLOO), 2607.07508 (the mask of `off_policy`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from reef_cli.core.types import Inference, Report, Sample
from reef_cli.learning.comparing import FOR_PROGRAM, ComparedSettings, GroupedRecipe
from reef_cli.learning.contract import RecipeSettings, Refusal, Signal
from reef_cli.learning.samples import group_places, scored_sample


@dataclass(frozen=True, slots=True)
class GRPOSettings(ComparedSettings):
    """Those of every recipe that compares groups; GRPO has no others."""


class GRPORecipe(GroupedRecipe):
    """Group-normalised rewards as advantages, a hard two-sided mask against stale tokens."""

    name: ClassVar[str] = "grpo"
    title: ClassVar[str] = "Group relative policy optimization: compare several scored answers to one task"
    signal: ClassVar[Signal] = Signal("scores of a group of answers", "the application or a verifier")
    settings_type: ClassVar[type[RecipeSettings]] = GRPOSettings
    settings: GRPOSettings
    program_path: ClassVar[str] = "reef_cli.trainer.groups:GroupProgram"
    for_program: ClassVar[tuple[str, ...]] = FOR_PROGRAM

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per scored answer or episode that names its group, or a stable reason why there is none."""
        places = group_places(report)
        if isinstance(places, Refusal):
            return places
        return scored_sample(report, records, step_of, max_temperature=self.max_temperature, extras=places, turns=True)
