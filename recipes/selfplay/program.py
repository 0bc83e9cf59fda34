"""Self-play's tensor half: the shared step over groups, with what each role earned in its metrics."""

from collections.abc import Sequence

from recipes.selfplay.recipe import BAND, PROPOSER, ROLE
from reef_cli.core.types import Sample
from reef_cli.trainer.batching import Batch
from reef_cli.trainer.diagnostics import mean
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.groups import GroupProgram
from reef_cli.trainer.program import StepReport


class SelfPlayProgram(GroupProgram):
    """One step per batch of whole groups, of both roles at once. It has no state."""

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        report = super().train(policy, batch)
        return StepReport(report.policy_updated, {**report.metrics, **played(batch.samples)})


def played(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean reward of each role, and the shares of proposals by band."""
    proposals = [sample for sample in samples if sample.extras[ROLE] == PROPOSER]
    attempts = [sample for sample in samples if sample.extras[ROLE] != PROPOSER]
    shares = {
        f"{band}_share": mean([float(sample.extras[BAND] == band) for sample in proposals])
        for band in ("frontier", "mastered", "out_of_reach", "refused")
    }
    return {
        "proposals": len(proposals),
        "proposer_reward": mean([sample.reward for sample in proposals]),
        "solver_reward": mean([sample.reward for sample in attempts]),
        **shares,
    }
