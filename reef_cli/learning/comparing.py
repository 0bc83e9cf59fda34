"""What recipes share whose policy gradient compares the answers of a group: their settings and how batches take groups.

The tensor half is `reef_cli.trainer.groups`, for recipes that hand over `FOR_PROGRAM` and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.types import Extras, Sample
from reef_cli.learning.contract import Acquisition, Group, GroupSettings
from reef_cli.learning.samples import WeightsRecipe
from reef_cli.learning.settings import check

FOR_PROGRAM = ("policy_lr", "advantage", "aggregate", "off_policy")


@dataclass(frozen=True, slots=True)
class ComparedSettings(GroupSettings):
    """Settings of a policy gradient on rewards that are compared within groups."""

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
        check(self, positive=("policy_lr",), wrong=["group_size"] if self.group_size < 2 else [])
        OffPolicy.of(self.off_policy)


class GroupedRecipe(WeightsRecipe):
    """A recipe whose reports name groups of `group_size` answers each."""

    acquisition: ClassVar[Acquisition] = Acquisition.PROACTIVE
    settings: GroupSettings

    def group(self, sample: Sample) -> Group:
        """Batches take whole groups."""
        return Group(sample.extras[Extras.GROUP], self.settings.group_size, sample.extras[Extras.ROLLOUT])
