"""GRPO (group relative policy optimization): several answers to one task, compared with each other; the control arm.

This half decides which reports train: a finite score, one receipt, and a group. The tensor half is a shared part
(`reef_cli.trainer.groups`).
Sources: arXiv:2402.03300 (GRPO), 2503.20783 (Dr. GRPO), 2402.14740 (RLOO), 2607.07508 (the mask of `off_policy`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.errors import ConfigError
from reef_cli.core.types import Extras, Inference, Report, Sample
from reef_cli.learning.contract import Acquisition, Group, GroupSettings, RecipeSettings, Refusal, Signal
from reef_cli.learning.samples import WeightsRecipe, group_places, scored_sample
from reef_cli.learning.settings import check


@dataclass(frozen=True, slots=True)
class GRPOSettings(GroupSettings):
    """Settings of GRPO beside those of every recipe that compares groups."""

    policy_lr: float = 2e-4
    """Learning rate of the LoRA adapter; use about 1e-6 with `trainer.method: full`."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Reward minus the group's mean over its standard deviation, without the division, or minus the mean of the others."""

    aggregate: Literal["token", "sequence"] = "token"
    """Whether every token counts the same, or every answer."""

    off_policy: Mapping[str, Any] = field(default_factory=dict)
    """The shared block; `dis` with its bounds unless it says otherwise."""

    def __post_init__(self) -> None:
        GroupSettings.__post_init__(self)
        if self.group_size < 2:
            raise ConfigError("GRPO needs groups of two or more", hint="group_size: 4")
        check(self, positive=("policy_lr",))
        OffPolicy.of(self.off_policy)


class GRPORecipe(WeightsRecipe):
    """Group-normalised rewards as advantages, a hard two-sided mask against stale tokens."""

    name: ClassVar[str] = "grpo"
    title: ClassVar[str] = "Group relative policy optimization: compare several scored answers to one task"
    signal: ClassVar[Signal] = Signal("scores of a group of answers", "the application or a verifier")
    acquisition: ClassVar[Acquisition] = Acquisition.PROACTIVE
    settings_type: ClassVar[type[RecipeSettings]] = GRPOSettings
    settings: GRPOSettings
    program_path: ClassVar[str] = "reef_cli.trainer.groups:GroupProgram"
    for_program: ClassVar[tuple[str, ...]] = ("policy_lr", "advantage", "aggregate", "off_policy")

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per scored answer or episode that names its group, or a stable reason why there is none."""
        places = group_places(report)
        if isinstance(places, Refusal):
            return places
        return scored_sample(report, records, step_of, max_temperature=self.max_temperature, extras=places, turns=True)

    def group(self, sample: Sample) -> Group:
        """Batches take whole groups."""
        return Group(sample.extras[Extras.GROUP], self.settings.group_size, sample.extras[Extras.ROLLOUT])
