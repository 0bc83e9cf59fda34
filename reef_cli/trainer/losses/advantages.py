"""Advantages: generalised advantage estimation that skips observation tokens, and baselines of a group of answers to one task.

Group functions take the rewards `[G]` of one comparison set and give one number per answer, for all of its tokens.

An observation token (mask 0) was inserted by the environment: it gets advantage 0, return 0, and its value never enters a
temporal difference. The reward is given on the last action token of the response.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BETA_LIMIT = 1e6
"""Adaptive temperature: doubling stops here, for groups whose rewards cannot reach the wanted divergence."""

BISECTIONS = 60


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


def dr_grpo_advantages(rewards: Tensor) -> Tensor:
    """Each reward `[G]` minus the mean, without the division that favours groups of nearly equal rewards (Dr. GRPO)."""
    return rewards - rewards.mean() if rewards.numel() > 1 else torch.zeros_like(rewards)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """Each reward `[G]` minus the mean of the others; zeros for a group of one."""
    n = rewards.numel()
    if n < 2:
        return torch.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (n - 1)


def adaptive_beta(rewards: Sequence[float], divergence: float = math.log(2)) -> float:
    """The inverse temperature at which the softmax of the rewards is `divergence` nats from uniform; 0 for a group of one.

    Python floats are float64: rewards near a record differ by less than float32 can tell.
    """
    if len(rewards) < 2:
        return 0.0
    low, high = 0.0, 1.0
    while _from_uniform(rewards, high) < divergence and high < BETA_LIMIT:
        high *= 2
    if _from_uniform(rewards, high) < divergence:
        return high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _from_uniform(rewards, middle) < divergence else (low, middle)
    return (low + high) / 2


def entropic_advantages(
    rewards: Sequence[float], *, beta: float | None = None, divergence: float = math.log(2), cap: float | None = None
) -> list[float]:
    """Entropic leave-one-out advantages (TTT-Discover): exp(beta R) over its mean among the others, minus 1.

    `beta` None adapts it to the group. A group of equal rewards gets zeros: it should not train at all. In a group of two
    the denominator of the better one vanishes; `cap` bounds every weight, and without it such a group is refused.
    """
    k = len(rewards)
    if k < 2 or max(rewards) == min(rewards):
        return [0.0] * k
    if k == 2 and cap is None:
        raise ValueError("entropic advantages of two answers are unbounded: use groups of three or more, or a cap")
    scale = adaptive_beta(rewards, divergence) if beta is None else beta
    top = max(rewards)
    powers = [math.exp(scale * (reward - top)) for reward in rewards]
    total = math.fsum(powers)
    weights = [power / ((total - power) / (k - 1) + 1e-12) for power in powers]
    return [min(weight, cap if cap is not None else math.inf) - 1 for weight in weights]


def kl_advantages(logprob: Tensor, base_logprob: Tensor, coefficient: float, mean: float | None = None) -> Tensor:
    """KL to a frozen base as a per-token advantage: coefficient * (mean gap - gap), gap = log p - log p_base; detached.

    It adds up to zero over the batch. `mean` is the gap's mean over all tokens of the batch when these are only some.
    """
    gap = (logprob - base_logprob).detach()
    return coefficient * ((gap.mean() if mean is None else mean) - gap)


def _from_uniform(rewards: Sequence[float], beta: float) -> float:
    """KL(softmax(beta * rewards) || uniform) in nats."""
    top = max(rewards)
    powers = [math.exp(beta * (reward - top)) for reward in rewards]
    total = math.fsum(powers)
    return math.fsum(p / total * math.log(p / total * len(powers)) for p in powers if p > 0)


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - var(returns - values) / var(returns); None when the returns do not vary (also for a single one)."""
    if returns.numel() < 2:
        return None
    variance = returns.var()
    if float(variance) <= 1e-12:
        return None
    return float(1 - (returns - values).var() / variance)
