"""Entropic policy gradient on a whole grid (TTT-Discover, arXiv:2601.16175): one optimizer step.

    e_i = exp(beta (R_i - max R))   Z_i = mean of the others' e   A_i = e_i / Z_i - 1   beta: KL(softmax || uniform) = ln 2
    A_t += kl * (mean d - d_t)      d_t = log p sampled - log p of the frozen base
    L = - sum over tokens of r_t A_t   r_t = p now / p sampled, not clipped

Groups of equal rewards are left out: they say nothing, and their distance term alone would still move the weights. Rewards stay
Python floats (float64) until they are advantages: near a record they differ by less than float32 can tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.types import Sample
from reef_cli.trainer.batching import Batch, MicroBatch
from reef_cli.trainer.diagnostics import batch_metrics, mean
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.groups import positions
from reef_cli.trainer.losses import importance
from reef_cli.trainer.losses.advantages import adaptive_beta, entropic_advantages, kl_advantages
from reef_cli.trainer.losses.policy import Terms
from reef_cli.trainer.model import TokenOutput
from reef_cli.trainer.program import OptimizerSettings, Program, StepReport
from reef_cli.trainer.stepping import step
from reef_cli.trainer.teachers import FrozenBase


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What the recipe hands over; documented in `learning.grid`."""

    lr: float
    kl_coefficient: float
    divergence: float
    beta: float | None
    weight_cap: float | None
    min_ess: float


@dataclass(frozen=True, slots=True)
class Grid:
    """A step's advantages per sample, which samples train, and the groups' inverse temperatures."""

    advantages: list[float]
    trains: list[bool]
    betas: list[float]
    constant: int


class EntropicProgram(Program):
    """One step per grid; no state beside the weights."""

    settings_type = ProgramSettings
    settings: ProgramSettings

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(lr=self.settings.lr, clip=0.0)

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        grid = advantages(batch.samples, self.settings)
        rewards = [sample.reward for sample in batch.samples]
        told = {
            "reward_max": max(rewards),
            "groups": len(grid.betas) + grid.constant,
            "constant_groups": grid.constant,
            "beta_mean": mean(grid.betas),
            "advantage_max": max(grid.advantages),
        }
        if not any(grid.trains):
            return StepReport(False, {**batch_metrics(batch), **told, "published": False, "skipped": "constant_rewards"})
        weights = [float(trains) for trains in grid.trains]
        per_token, gap = self._per_token(policy, batch, grid, weights)
        by_micro = {id(micro): values for micro, values in zip(batch.micros, per_token, strict=True)}

        def terms(micro: MicroBatch, out: TokenOutput) -> Terms:
            rho = importance.ratio(out.logprob, micro.rollout_logprobs)
            return Terms(-rho * by_micro[id(micro)], torch.zeros_like(rho, dtype=torch.bool))

        off = OffPolicy(kind="none", min_ess=self.settings.min_ess)
        report = step(policy, batch, off, terms, weights=weights, divisor=1.0)
        return StepReport(report.policy_updated, {**report.metrics, **told, "gap_to_base": gap})

    def _per_token(
        self, policy: Policy, batch: Batch, grid: Grid, weights: Sequence[float]
    ) -> tuple[list[Tensor], float | None]:
        """Advantages `[N]` per micro-batch with the distance to the base in them, and the mean distance."""
        own = [batch.per_token(micro, grid.advantages) for micro in batch.micros]
        if self.settings.kl_coefficient == 0:
            return own, None
        base = FrozenBase()
        theirs = [policy.score(micro, base).logprob for micro in batch.micros]
        total = torch.zeros(2, dtype=torch.float64, device=policy.device)
        for micro, logprob in zip(batch.micros, theirs, strict=True):
            counts = batch.per_token(micro, weights).double()
            gap = (micro.rollout_logprobs - logprob).double()
            total += torch.stack([(gap * counts).sum(), counts.sum()])
        total = policy.sum(total)
        middle = float(total[0] / total[1].clamp(min=1))
        coefficient = self.settings.kl_coefficient
        return [
            values + kl_advantages(micro.rollout_logprobs, logprob, coefficient, middle)
            for micro, values, logprob in zip(batch.micros, own, theirs, strict=True)
        ], middle


def advantages(samples: Sequence[Sample], settings: ProgramSettings) -> Grid:
    """Entropic leave-one-out advantages inside each comparison set, in the order of the samples."""
    grid = Grid([0.0] * len(samples), [False] * len(samples), [], 0)
    constant = 0
    for members in positions(samples):
        rewards = [samples[position].reward for position in members]
        if min(rewards) == max(rewards):
            constant += 1
            continue
        beta = adaptive_beta(rewards, settings.divergence) if settings.beta is None else settings.beta
        grid.betas.append(beta)
        for position, value in zip(members, entropic_advantages(rewards, beta=beta, cap=settings.weight_cap), strict=True):
            grid.advantages[position], grid.trains[position] = value, True
    return Grid(grid.advantages, grid.trains, grid.betas, constant)
