"""SFT's tensor half: the mean negative log-likelihood of the demonstrated tokens."""

from dataclasses import dataclass

from reef_cli.trainer.batching import Batch
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.program import Program, StepReport
from reef_cli.trainer.stepping import imitation_step


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What the recipe hands over; documented in `recipe.py`."""

    policy_lr: float


class SFTProgram(Program):
    """One imitation step per batch. It has no state."""

    settings_type = ProgramSettings
    settings: ProgramSettings

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        return imitation_step(policy, batch)
