"""Self-play: one model proposes tasks and solves them; both roles learn, each from comparisons within its groups.

A solver's report is a score within its task's group. A proposer's report brings the scores of the attempts at its task,
without and with a hint, and its reward is the regret (`regret.py`); a text that is no task costs. The tensor half is
`program.py`; the game itself is played by a client (`play.py`). Source of roles, regret and bands: arXiv:2608.19197.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from recipes.selfplay.regret import trial
from reef_cli.core.types import Extras, Inference, Report, Sample
from reef_cli.learning.comparing import FOR_PROGRAM, ComparedSettings, GroupedRecipe
from reef_cli.learning.contract import Group, RecipeSettings, Refusal, Signal
from reef_cli.learning.samples import group_places, scored_sample, traced_sample
from reef_cli.learning.settings import check

ROLE, BAND = "role", "band"
"""Entries of a sample's extras."""

PROPOSER, SOLVER = "proposer", "solver"


@dataclass(frozen=True, slots=True)
class SelfPlaySettings(ComparedSettings):
    """Settings of self-play beside those of every recipe that compares groups."""

    batch_size: int = 32
    """Samples per training step, of both roles; batches take whole groups until they hold as many."""

    group_size: int = 4
    """Attempts per task without the hint, which are the solver's group."""

    proposals: int = 8
    """Tasks per generation, which are the proposer's group."""

    mastered: float = 0.9
    """Tasks solved more often than this without the hint are mastered."""

    out_of_reach: float = 0.1
    """Tasks solved less often than this without the hint are out of reach."""

    refused_reward: float = -1.0
    """The proposer's reward for a text that is no task."""

    train_proposer: bool = True
    """Whether proposals train; off leaves the proposer as it is."""

    aggregate: Literal["token", "sequence"] = "sequence"
    """Whether every token counts the same, or every answer: proposals and attempts differ in length."""

    def __post_init__(self) -> None:
        ComparedSettings.__post_init__(self)
        small = ["proposals"] if self.proposals < 2 else []
        crossed = ["out_of_reach"] if self.out_of_reach > self.mastered else []
        check(self, shares=("mastered", "out_of_reach"), wrong=small + crossed)


class SelfPlayRecipe(GroupedRecipe):
    """Two roles of one model: tasks earn regret, attempts earn their score."""

    name: ClassVar[str] = "selfplay"
    title: ClassVar[str] = "Self-play: the model proposes tasks it cannot solve yet, and learns to solve them"
    signal: ClassVar[Signal] = Signal("scores of attempts, and regret of the tasks", "a verifier")
    settings_type: ClassVar[type[RecipeSettings]] = SelfPlaySettings
    settings: SelfPlaySettings
    program_path: ClassVar[str] = "recipes.selfplay.program:SelfPlayProgram"
    for_program: ClassVar[tuple[str, ...]] = FOR_PROGRAM

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per proposal or attempt, or a stable reason why there is none."""
        places = group_places(report)
        if isinstance(places, Refusal):
            return places
        role = report.metadata.get("role")
        if role not in (PROPOSER, SOLVER):
            return Refusal("needs_role")
        told = {**places, Extras.GROUP: f"{role} {places[Extras.GROUP]}", ROLE: role}
        if role == PROPOSER:
            return self._proposal(report, records, step_of, told)
        return scored_sample(report, records, step_of, max_temperature=self.max_temperature, extras=told)

    def _proposal(
        self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int], told: Mapping[str, Any]
    ) -> Sample | Refusal:
        s = self.settings
        if not s.train_proposer:
            return Refusal("proposer_does_not_train")
        if report.metadata.get("valid") is False:
            reward, band = s.refused_reward, "refused"
        elif (made := trial(report.metadata)) is not None:
            reward, band = made.regret, made.band(s.mastered, s.out_of_reach)
        else:
            return Refusal("needs_attempts")
        return traced_sample(
            report, records, step_of, reward=reward, max_temperature=self.max_temperature, extras={**told, BAND: band}
        )

    def group(self, sample: Sample) -> Group:
        """A generation of tasks, or the attempts at one task; batches take whole groups of both."""
        size = self.settings.proposals if sample.extras[ROLE] == PROPOSER else self.settings.group_size
        return Group(sample.extras[Extras.GROUP], size, sample.extras[Extras.ROLLOUT])
