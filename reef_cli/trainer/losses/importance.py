"""Off-policy corrections: importance ratios, losses made of them, and how far two policies are apart.

What becomes of a ratio, by kind, is in `policy.ratio_weight`; such weights are detached: they scale a gradient, they are never
differentiated. Losses are per token and to be minimised; callers reduce them. Log-ratios are clamped to +-20 so that no weight
overflows.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log(p_new / p_old) per token, clamped to +-20; differentiable in both."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(new: Tensor, old: Tensor) -> Tensor:
    """p_new / p_old per token."""
    return log_ratio(new, old).exp()


def inside(rho: Tensor, low: float, high: float, *, strict: bool) -> Tensor:
    """rho between the bounds, without them when `strict`; 0 outside."""
    rho = rho.detach()
    kept = (rho > low) & (rho < high) if strict else (rho >= low) & (rho <= high)
    return torch.where(kept, rho, torch.zeros_like(rho))


# -- losses per token ------------------------------------------------------------------------------------------------------


def weighted_policy_loss(weight: Tensor, advantage: Tensor, logprob: Tensor) -> Tensor:
    """-weight * A * log p: the REINFORCE form DIS, IcePop, TIS and CISPO share; only `logprob` carries a gradient."""
    return -weight.detach() * advantage.detach() * logprob


def ppo_loss(rho: Tensor, advantage: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None) -> Tensor:
    """PPO's clipped surrogate; `dual_clip` c bounds a negative advantage's loss by c * |A|. GSPO: pass a sequence ratio."""
    advantage = advantage.detach()
    loss = torch.maximum(-rho * advantage, -rho.clamp(1 - eps_low, 1 + eps_high) * advantage)
    if dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)


def decoupled_ppo_loss(
    new: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor, eps_low: float, eps_high: float
) -> Tensor:
    """Decoupled PPO: the clip is around a proximal policy, staleness is corrected by p_proximal / p_behaviour."""
    return ratio(proximal, behaviour).detach() * ppo_loss(ratio(new, proximal), advantage, eps_low, eps_high)


# -- how far apart ---------------------------------------------------------------------------------------------------------


def k1(log_rho: Tensor) -> Tensor:
    """-log rho per token: its mean is unbiased for KL(behaviour || new) and may be negative."""
    return -log_rho


def k2(log_rho: Tensor) -> Tensor:
    """Half the squared log-ratio per token."""
    return 0.5 * log_rho.square()


def k3(log_rho: Tensor) -> Tensor:
    """rho - 1 - log rho per token: its mean is unbiased for KL(behaviour || new), never negative, of low variance."""
    return log_rho.exp() - 1 - log_rho


def effective_sample_size(total: float, squares: float) -> float:
    """(sum w)^2 / sum w^2 from both sums: between 0 (all weights zero) and the number of weights."""
    return total**2 / squares if squares > 0 else 0.0
