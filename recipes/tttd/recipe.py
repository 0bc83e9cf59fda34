"""TTT-Discover (test-time training to discover): learn on one hard problem while searching it, for the best single solution.

Grids, admission and the step are shared parts (`reef_cli.learning.grid`, `reef_cli.trainer.entropic`); the search is `reef
discover`. Source: arXiv:2601.16175.
"""

from dataclasses import dataclass
from typing import ClassVar

from reef_cli.learning.contract import Signal
from reef_cli.learning.grid import GridRecipe, GridSettings


@dataclass(frozen=True, slots=True)
class TTTDSettings(GridSettings):
    """The published size: 8 groups of 64 tries."""


class TTTDRecipe(GridRecipe):
    """Entropic advantages inside groups, unclipped importance ratios, distance to the base as an advantage, whole grids."""

    name: ClassVar[str] = "tttd"
    title: ClassVar[str] = "TTT-Discover: train on one hard problem while searching it"
    signal: ClassVar[Signal] = Signal("a score within its group", "a verifier")
    settings_type: ClassVar[type[GridSettings]] = TTTDSettings
