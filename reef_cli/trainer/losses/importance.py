"""Off-policy corrections: importance ratios, what to do with large ones, and how far the policies are apart.

Weights (`dis_weight`, `tis_weight`, ...) are detached: they scale a gradient, they are never differentiated. Losses are per
token and to be minimised; callers reduce them. Log-ratios are clamped to +-20 so that no weight overflows.
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


# -- hard masks and truncation ---------------------------------------------------------------------------------------------


def inside(rho: Tensor, low: float, high: float, *, strict: bool) -> Tensor:
    """rho between the bounds, without them when `strict`; 0 outside."""
    rho = rho.detach()
    kept = (rho > low) & (rho < high) if strict else (rho >= low) & (rho <= high)
    return torch.where(kept, rho, torch.zeros_like(rho))


def dis_weight(rho: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Direct double-sided importance sampling (SAO): rho inside (1 - eps_low, 1 + eps_high), strictly; 0 outside."""
    return inside(rho, 1 - eps_low, 1 + eps_high, strict=True)


def icepop_weight(rho: Tensor, low: float, high: float) -> Tensor:
    """IcePop (masked importance sampling): rho inside [low, high]; 0 outside."""
    return inside(rho, low, high, strict=False)


def tis_weight(rho: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(rho, cap)."""
    return rho.detach().clamp(max=cap)


def cispo_weight(rho: Tensor, eps_high: float, eps_low: float | None = None) -> Tensor:
    """CISPO: rho clipped above (and below, if asked), so every token keeps a gradient."""
    return rho.detach().clamp(min=None if eps_low is None else 1 - eps_low, max=1 + eps_high)


def m2po_keep(log_rho: Tensor, threshold: float) -> Tensor:
    """M2PO: True for tokens that stay after dropping the largest squared log-ratios until the rest's mean is <= threshold."""
    squares = log_rho.detach().square()
    values, order = squares.sort()
    means = values.cumsum(0) / torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)
    keep = torch.zeros_like(squares, dtype=torch.bool)
    keep[order[means <= threshold]] = True
    return keep


# -- sequence-level ratios -------------------------------------------------------------------------------------------------


def sequence_ratio(log_rho: Tensor) -> Tensor:
    """Product of the token ratios along the last dimension; grows with length, fit for rejection only."""
    return log_rho.sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def geometric_ratio(log_rho: Tensor) -> Tensor:
    """exp(mean log-ratio) along the last dimension: GSPO's sequence ratio."""
    return log_rho.mean(-1).exp()


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


def decoupled_ppo_loss(new: Tensor, proximal: Tensor, behaviour: Tensor, advantage: Tensor, eps: float) -> Tensor:
    """Decoupled PPO: the clip is around a proximal policy, staleness is corrected by p_proximal / p_behaviour."""
    return ratio(proximal, behaviour).detach() * ppo_loss(ratio(new, proximal), advantage, eps, eps)


def a3po_proximal(new: Tensor, behaviour: Tensor, behaviour_version: float, proximal_version: float, version: float) -> Tensor:
    """A-3PO: the proximal log-prob interpolated by version distance, sparing a forward pass."""
    if version <= behaviour_version:
        return new.detach()
    share = (proximal_version - behaviour_version) / (version - behaviour_version)
    return (behaviour + share * (new - behaviour)).detach()


# -- how far apart ---------------------------------------------------------------------------------------------------------


def k1(log_rho: Tensor) -> Tensor:
    """Mean of -log rho: unbiased for KL(behaviour || new), may be negative."""
    return (-log_rho).mean()


def k2(log_rho: Tensor) -> Tensor:
    """Mean of half the squared log-ratio."""
    return (0.5 * log_rho.square()).mean()


def k3(log_rho: Tensor) -> Tensor:
    """Mean of rho - 1 - log rho: unbiased for KL(behaviour || new), never negative, low variance."""
    return (log_rho.exp() - 1 - log_rho).mean()


def effective_sample_size(weight: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2: between 0 (all weights zero) and the number of weights."""
    total = weight.square().sum()
    return torch.where(
        total > 0, weight.sum().square() / total.clamp_min(torch.finfo(weight.dtype).tiny), torch.zeros_like(total)
    )
