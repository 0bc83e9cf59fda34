"""Recipes that search while they learn: a step is a grid of groups of tries, and trains whole or not at all.

A report names its try's place in `metadata`: `run` (optional), `step`, `group`, `rollout`. Groups are comparison sets; the grid
of a step is one group of the batch builder. The tensor half these recipes share is `reef_cli.trainer.entropic`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from reef_cli.core.errors import ConfigError
from reef_cli.core.types import Extras, Inference, Report, Sample
from reef_cli.learning.contract import Acquisition, Group, GroupSettings, Refusal
from reef_cli.learning.samples import WeightsRecipe, scored_sample
from reef_cli.learning.settings import check

GRID = "grid"
"""The entry of `Sample.extras` that names the step a try belongs to."""


@dataclass(frozen=True, slots=True)
class GridSettings(GroupSettings):
    """Settings of recipes with entropic advantages over grids."""

    batch_size: int = 512
    """Tries per training step, all groups together."""

    group_size: int = 64
    """Tries per group: answers to one parent. A report names its place in `metadata`: `step`, `group`, `rollout`."""

    max_staleness: int = 0
    """A grid trains on exactly the weights that made it; importance ratios are not clipped."""

    lr: float = 4e-5
    """Learning rate of the LoRA adapter."""

    kl_coefficient: float = 0.1
    """Weight of the distance to the frozen base model, given as a per-token advantage; 0 switches it off."""

    divergence: float = 0.6931471805599453
    """Distance in nats between the reweighted tries of a group and uniform ones, which sets the group's temperature."""

    beta: float | None = None
    """A fixed inverse temperature instead of the adaptive one."""

    weight_cap: float | None = None
    """Largest weight of one try; needed for groups of two, where the better one's weight is unbounded."""

    min_ess: float = 0.3
    """Smallest effective sample size, as a share of the tokens, for which the policy is updated."""

    def __post_init__(self) -> None:
        GroupSettings.__post_init__(self)
        given = [name for name in ("beta", "weight_cap") if getattr(self, name) is not None]
        check(self, positive=("lr", "divergence", *given), natural=("kl_coefficient",))
        if self.group_size < 2 or (self.group_size == 2 and self.weight_cap is None):
            raise ConfigError(
                f"a group_size of {self.group_size} compares too little",
                why="the leave-one-out weight of the better of two tries has no bound",
                hint="group_size: 4 or more, or set weight_cap",
            )


class GridRecipe(WeightsRecipe):
    """What such recipes share; one of them adds its name, its title and its settings."""

    acquisition: ClassVar[Acquisition] = Acquisition.PROACTIVE
    program_path: ClassVar[str] = "reef_cli.trainer.entropic:EntropicProgram"
    for_program: ClassVar[tuple[str, ...]] = ("lr", "kl_coefficient", "divergence", "beta", "weight_cap", "min_ess")
    settings: GridSettings

    @property
    def groups(self) -> int:
        """Groups per step."""
        return self.settings.batch_size // self.settings.group_size

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per scored try that says where in its step's grid it stands."""
        place = [report.metadata.get(name) for name in ("step", "group", "rollout")]
        numbers = [value for value in place if isinstance(value, int) and not isinstance(value, bool)]
        if len(numbers) != len(place):
            return Refusal("needs_step_group_rollout")
        step, group, rollout = numbers
        if step < 0 or not 0 <= group < self.groups or not 0 <= rollout < self.settings.group_size:
            return Refusal("outside_the_grid")
        grid = f"{report.metadata.get('run', '')}/{step}"
        extras = {Extras.GROUP: f"{grid}/{group}", Extras.ROLLOUT: str(rollout), GRID: grid}
        return scored_sample(report, records, step_of, max_temperature=self.max_temperature, extras=extras)

    def group(self, sample: Sample) -> Group:
        """A step trains whole: its grid is one group, and the batch holds exactly it."""
        member = f"{sample.extras[Extras.GROUP]}/{sample.extras[Extras.ROLLOUT]}"
        return Group(sample.extras[GRID], self.settings.batch_size, member)
