"""SAO's tensor half: a hard two-sided mask on importance ratios, a critic as baseline, one rollout per prompt.

Policy loss per action token: -sg(f(r)) * A * log p, with r against the engine's own log-probs and f(r) = r inside (1 -
eps_low, 1 + eps_high), else 0; averaged over all action tokens, masked ones included. Advantages: GAE over action tokens
with length-adaptive lambda. Critic: a small head on hidden states of the frozen base, fitted to Monte-Carlo returns,
`critic_steps` times per policy step; the first `critic_only_steps` steps train it alone. Source: arXiv:2607.07508.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reef_cli.config.off_policy import OffPolicy
from reef_cli.trainer import diagnostics
from reef_cli.trainer.batching import Batch, MicroBatch
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.losses import advantages as adv
from reef_cli.trainer.program import Program, StepRefused, StepReport
from reef_cli.trainer.stepping import policy_gradient_step


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What the recipe hands over; documented in `recipe.py`."""

    policy_lr: float
    critic_lr: float
    eps_low: float
    eps_high: float
    critic_steps: int
    critic_only_steps: int
    critic_width: int
    level_decay: float
    alpha_lambda: float
    gamma: float
    use_critic: bool
    use_mask: bool
    min_ess: float
    max_masked: float


class Critic(nn.Module):
    """Values `[N]` of hidden states `[N, H]`: a head around the running mean of returns (`level`).

    The head's last layer starts at zero, so a fresh critic says what answers earn on average. Without the level a cold head
    would call every rewarded token good and no failed one bad until it has learned that mean by gradient steps, which takes it
    longer than the policy needs to move it. (Mean-only form of adaptive target normalisation, van Hasselt et al. 2016.)
    """

    def __init__(self, hidden_size: int, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.norm = nn.LayerNorm(hidden_size)
        self.inner = nn.Linear(hidden_size, width)
        self.outer = nn.Linear(width, 1)
        with torch.no_grad():
            bound = hidden_size**-0.5
            self.inner.weight.copy_((torch.rand(self.inner.weight.shape, generator=generator) * 2 - 1) * bound)
            self.inner.bias.zero_()
            self.outer.weight.zero_()
            self.outer.bias.zero_()
        self.level: Tensor
        self.seen: Tensor
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.outer(nn.functional.gelu(self.inner(self.norm(hidden)))).squeeze(-1)
        return values + self.level

    def follow(self, mean: float, decay: float) -> None:
        """Move the level towards a batch's mean return; the first batch sets it. A decay of 1 keeps it at zero."""
        if decay < 1:
            self.level.copy_(self.level * decay + mean * (1 - decay) if self.seen else torch.tensor(mean))
            self.seen.fill_(True)


class SAOProgram(Program):
    """One SAO step per batch. Its state: the critic, the critic's optimizer, and how many steps were made."""

    settings_type = ProgramSettings
    settings: ProgramSettings

    @property
    def _off(self) -> OffPolicy:
        """SAO's mask in the terms of the shared block; without it plain importance weights."""
        s = self.settings
        kind = {"kind": "dis", "low": 1 - s.eps_low, "high": 1 + s.eps_high} if s.use_mask else {"kind": "none"}
        return OffPolicy.of(kind, min_ess=s.min_ess, max_masked=s.max_masked)

    def reset(self, policy: Policy) -> None:
        self.steps = 0
        self.critic = Critic(policy.hidden_size, self.settings.critic_width, policy.seed).to(policy.device)
        # Little momentum: while rewards rise quickly, a heavier average overshoots them and turns good answers into bad news.
        self.critic_optimizer = torch.optim.AdamW(
            self.critic.parameters(), lr=self.settings.critic_lr, betas=(0.5, 0.95), weight_decay=0.0
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "critic": self.critic.state_dict(), "optimizer": self.critic_optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        self.critic.load_state_dict(state["critic"])
        self.critic_optimizer.load_state_dict(state["optimizer"])
        for group in self.critic_optimizer.param_groups:
            group["lr"] = self.settings.critic_lr

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        started = time.perf_counter()
        values, critic = self._fit_critic(policy, batch)
        fitted = time.perf_counter()
        warm_up = self.settings.use_critic and self.steps < self.settings.critic_only_steps
        self.steps += 1
        metrics = {**critic, "program_step": self.steps, "critic_seconds": fitted - started}
        if warm_up:
            shown = {**diagnostics.batch_metrics(batch), "published": False, "skipped": "critic_warm_up"}
            return StepReport(False, metrics | shown)
        report = policy_gradient_step(policy, batch, self._off, self._advantages(batch, values))
        metrics |= report.metrics
        return StepReport(report.policy_updated, {**metrics, "policy_seconds": time.perf_counter() - fitted})

    # -- critic ------------------------------------------------------------------------------------------------------------

    def _fit_critic(self, policy: Policy, batch: Batch) -> tuple[list[Tensor], dict[str, Any]]:
        """Values per micro-batch, from the last pass before its update, and the critic's metrics."""
        if not self.settings.use_critic:
            return [torch.zeros(len(micro), device=policy.device) for micro in batch.micros], {}
        self.critic.follow(diagnostics.mean([sample.reward for sample in batch.samples]), self.settings.level_decay)
        features = [policy.features(micro) for micro in batch.micros]
        returns = [self._returns(batch, micro) for micro in batch.micros]
        values: list[Tensor] = []
        for _ in range(self.settings.critic_steps):
            values = self._critic_step(policy, batch, features, returns)
        return values, _critic_metrics(policy, values, returns)

    def _critic_step(self, policy: Policy, batch: Batch, features: Sequence[Tensor], returns: Sequence[Tensor]) -> list[Tensor]:
        self.critic_optimizer.zero_grad()
        values = []
        for hidden, target in zip(features, returns, strict=True):
            value = self.critic(hidden)
            loss = (value - target).square().sum() / max(1, batch.tokens)
            if not torch.isfinite(loss):
                raise StepRefused(f"The critic loss is {float(loss)}", hint="look at the batch's rewards; lower critic_lr")
            loss.backward()
            values.append(value.detach())
        policy.sum_gradients(list(self.critic.parameters()))
        nn.utils.clip_grad_norm_(self.critic.parameters(), 1.0)
        self.critic_optimizer.step()
        return values

    def _returns(self, batch: Batch, micro: MicroBatch) -> Tensor:
        """The critic's target `[N]`: Monte-Carlo returns (GAE at lambda 1)."""
        whole = torch.zeros(len(micro), device=micro.targets.device)
        parts = micro.split(whole)
        for position in parts:
            parts[position] = adv.monte_carlo_returns(
                torch.ones_like(parts[position]), batch.samples[position].reward, self.settings.gamma
            )
        return torch.cat(list(parts.values())) if parts else whole

    # -- policy ------------------------------------------------------------------------------------------------------------

    def _advantages(self, batch: Batch, values: Sequence[Tensor]) -> list[Tensor]:
        """Per micro-batch `[N]`: GAE over each response's action tokens; without a critic the reward itself."""
        found = []
        for micro, value in zip(batch.micros, values, strict=True):
            parts = micro.split(value)
            found.append(torch.cat([self._advantage(batch, i, part) for i, part in parts.items()]) if parts else value)
        return found

    def _advantage(self, batch: Batch, position: int, values: Tensor) -> Tensor:
        sample = batch.samples[position]
        lam = adv.adaptive_lambda(len(sample.tokens.output_ids), self.settings.alpha_lambda)
        # `values` holds action tokens only: observations are skipped by not being there; the length still counts them.
        return adv.skip_observation_gae(values, torch.ones_like(values), sample.reward, self.settings.gamma, lam)[0]


def _critic_metrics(policy: Policy, values: Sequence[Tensor], returns: Sequence[Tensor]) -> dict[str, Any]:
    """Mean squared error and explained variance over the action tokens of all ranks."""
    pairs = policy.gather((torch.cat([v.cpu() for v in values]), torch.cat([r.cpu() for r in returns])))
    value = torch.cat([pair[0] for pair in pairs])
    target = torch.cat([pair[1] for pair in pairs])
    return {
        "critic_mse": float((value - target).square().mean()) if len(value) else None,
        "explained_variance": adv.explained_variance(value, target),
        "value_mean": float(value.mean()) if len(value) else None,
    }
