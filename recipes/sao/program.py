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

from reef_cli.trainer.batching import Batch, MicroBatch
from reef_cli.trainer.engine import Policy, Update
from reef_cli.trainer.losses import advantages as adv
from reef_cli.trainer.losses import importance
from reef_cli.trainer.model import TokenOutput
from reef_cli.trainer.program import OptimizerSettings, Program, StepRefused, StepReport


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
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(lr=self.settings.policy_lr)

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
        metrics = {"reward_mean": _mean([sample.reward for sample in batch.samples]), "trained_tokens": batch.tokens, **critic}
        metrics |= _lags(batch)
        warm_up = self.settings.use_critic and self.steps < self.settings.critic_only_steps
        self.steps += 1
        metrics |= {"program_step": self.steps, "critic_seconds": fitted - started}
        if warm_up:
            return StepReport(False, {**metrics, "published": False, "skipped": "critic_warm_up"})
        update, policy_metrics = self._update_policy(policy, batch, self._advantages(batch, values))
        metrics |= policy_metrics | {"policy_seconds": time.perf_counter() - fitted}
        if update.reason is not None:
            metrics["skipped"] = update.reason
        return StepReport(update.applied, {**metrics, "published": update.applied})

    # -- critic ------------------------------------------------------------------------------------------------------------

    def _fit_critic(self, policy: Policy, batch: Batch) -> tuple[list[Tensor], dict[str, Any]]:
        """Values per micro-batch, from the last pass before its update, and the critic's metrics."""
        if not self.settings.use_critic:
            return [torch.zeros(len(micro), device=policy.device) for micro in batch.micros], {}
        self.critic.follow(_mean([sample.reward for sample in batch.samples]), self.settings.level_decay)
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

    def _update_policy(self, policy: Policy, batch: Batch, advantages: Sequence[Tensor]) -> tuple[Update, dict[str, Any]]:
        by_micro = {id(micro): advantage for micro, advantage in zip(batch.micros, advantages, strict=True)}
        seen: list[_Seen] = []

        def loss(micro: MicroBatch, out: TokenOutput) -> Tensor:
            rho = importance.ratio(out.logprob, micro.rollout_logprobs)
            weight = self._weight(rho)
            seen.append(_Seen(micro, rho.detach(), weight, out.entropy, (out.logprob - micro.rollout_logprobs).detach()))
            return importance.weighted_policy_loss(weight, by_micro[id(micro)], out.logprob).sum()

        metrics: dict[str, Any] = {}

        def veto() -> str | None:
            metrics.update(_ratio_metrics(policy, batch, seen))
            return self._veto(metrics)

        update = policy.update(batch.micros, batch.tokens, loss, veto)
        return update, {"policy_loss": update.loss, "grad_norm": update.grad_norm, **metrics}

    def _weight(self, rho: Tensor) -> Tensor:
        if self.settings.use_mask:
            return importance.dis_weight(rho, self.settings.eps_low, self.settings.eps_high)
        return rho.detach()

    def _veto(self, metrics: Mapping[str, Any]) -> str | None:
        if metrics["masked_share"] > self.settings.max_masked:
            return "masked_share_too_high"
        return "ess_too_low" if metrics["ess_share"] < self.settings.min_ess else None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one micro-batch showed about the distance between the policies."""

    micro: MicroBatch
    rho: Tensor
    weight: Tensor
    entropy: Tensor
    log_rho: Tensor


def _ratio_metrics(policy: Policy, batch: Batch, seen: Sequence[_Seen]) -> dict[str, Any]:
    """Masked share, ESS/n, K3, entropy, and |log-prob gap| of samples at lag 0, over all ranks."""
    sums = torch.zeros(8, dtype=torch.float64, device=policy.device)
    for part in seen:
        log_rho = part.log_rho.double().clamp(-importance.LOG_RATIO_LIMIT, importance.LOG_RATIO_LIMIT)
        rho = part.rho.double()
        fresh = torch.tensor([batch.lag(i) == 0 for i in part.micro.rows], dtype=torch.bool, device=policy.device)
        fresh = fresh[part.micro.row]
        sums += torch.stack(
            [
                (part.weight == 0).sum().double(),
                rho.sum(),
                rho.square().sum(),
                (rho - 1 - log_rho).sum(),
                part.entropy.double().sum(),
                part.log_rho.double().abs()[fresh].sum(),
                fresh.sum().double(),
                part.log_rho.double().abs().sum(),
            ]
        )
    sums = policy.sum(sums)
    if not torch.isfinite(sums).all():
        raise StepRefused("The batch's log-probs are not finite", hint="look at the log-probs the engine recorded")
    masked, first, second, k3, entropy, gap, fresh_tokens, all_gap = sums.tolist()
    n = max(1, batch.tokens)
    return {
        "masked_share": masked / n,
        "ess_share": first**2 / second / n if second > 0 else 0.0,
        "k3": k3 / n,
        "entropy": entropy / n,
        "logprob_gap_lag0": gap / fresh_tokens if fresh_tokens else None,
        "logprob_gap": all_gap / n,
    }


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


def _lags(batch: Batch) -> dict[str, Any]:
    lags = [batch.lag(i) for i in range(len(batch.samples))]
    return {"lag_mean": _mean(lags), "lag_max": max(lags, default=0)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
