"""Advantages: generalised advantage estimation that skips observation tokens, and group baselines.

An observation token (mask 0) was inserted by the environment: it gets advantage 0, return 0, and its value never enters a
temporal difference. The reward is given on the last action token of the response.
"""

import torch
from torch import Tensor


def adaptive_lambda(length: int, alpha: float) -> float:
    """Length-adaptive GAE lambda: 1 - 1 / (alpha * length), inside [0, 1]; `length` counts all response tokens."""
    return min(1.0, max(0.0, 1 - 1 / (alpha * length))) if length > 0 else 0.0


def skip_observation_gae(values: Tensor, mask: Tensor, reward: float, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[T]` of one response from `values` and 0/1 `mask` `[T]`, walking back over action tokens only."""
    advantages = torch.zeros_like(values)
    following = values.new_zeros(())
    running = values.new_zeros(())
    pending = reward
    for t in reversed(mask.nonzero().flatten().tolist()):
        delta = pending + gamma * following - values[t]
        running = delta + gamma * lam * running
        advantages[t] = running
        following = values[t]
        pending = 0.0
    action = mask.to(values.dtype)
    return advantages, (advantages + values) * action


def monte_carlo_returns(mask: Tensor, reward: float, gamma: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Discounted reward-to-go on action tokens `[T]` (GAE returns at lambda 1); the reward itself when gamma is 1."""
    action = mask.to(dtype)
    after = action.flip(0).cumsum(0).flip(0) - 1
    return action * reward * gamma**after


def grpo_advantages(rewards: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Group-normalised rewards `[G]`: minus the mean, over the sample standard deviation; zeros for a group of one."""
    if rewards.numel() < 2:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + epsilon)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """Each reward `[G]` minus the mean of the others; zeros for a group of one."""
    n = rewards.numel()
    if n < 2:
        return torch.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (n - 1)


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - var(returns - values) / var(returns); None when the returns do not vary (also for a single one)."""
    if returns.numel() < 2:
        return None
    variance = returns.var()
    if float(variance) <= 1e-12:
        return None
    return float(1 - (returns - values).var() / variance)
