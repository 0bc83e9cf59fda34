"""Guidance-TTT: a small model learns to advise on one hard problem, a frozen executor of any size carries the advice out.

The learning is TTT-Discover's, on the guide's answers alone: what the executor writes is no record of this scenario and never
trains. The search is `reef discover --space guidance-lines` or `guidance-programs`.
"""

from dataclasses import dataclass
from typing import ClassVar

from reef_cli.learning.contract import Signal
from reef_cli.learning.grid import GridRecipe, GridSettings


@dataclass(frozen=True, slots=True)
class GuidanceTTTSettings(GridSettings):
    """Smaller grids than those of programs: 8 groups of 16 pieces of advice."""

    batch_size: int = 128
    """Pieces of advice per training step, all groups together."""

    group_size: int = 16
    """Pieces of advice per group, all about one parent."""


class GuidanceTTTRecipe(GridRecipe):
    """A trained guide and a frozen executor; only the guide's tokens train, with entropic advantages over whole grids."""

    name: ClassVar[str] = "guidance_ttt"
    title: ClassVar[str] = "Guidance-TTT: train a guide for a frozen executor on one hard problem"
    signal: ClassVar[Signal] = Signal("a score within its group", "a verifier, through the executor")
    settings_type: ClassVar[type[GridSettings]] = GuidanceTTTSettings
