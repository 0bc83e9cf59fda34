"""Policy-gradient losses by the kind of their off-policy correction; the kinds are those of `config.off_policy`.

`policy_terms` is what programs call: per action token the loss to be minimised, and which tokens their ratio has taken the
gradient from. The parts are in `importance`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reef_cli.config.off_policy import OffPolicy
from reef_cli.trainer.losses import importance


@dataclass(frozen=True, slots=True)
class Terms:
    """Per action token `[N]`: the loss, and whether the ratio left the token without a gradient."""

    loss: Tensor
    masked: Tensor


def policy_terms(off: OffPolicy, new: Tensor, behaviour: Tensor, advantage: Tensor, row: Tensor) -> Terms:
    """The loss of each token from its log-prob now, the one it was sampled with, and its advantage. All `[N]`.

    `row` says which answer a token belongs to (`MicroBatch.row`).
    """
    if off.kind in ("ppo", "gspo", "decoupled"):
        return _surrogate(off, new, behaviour, advantage, row)
    rho = importance.ratio(new, behaviour)
    weight = ratio_weight(off, rho)
    return Terms(importance.weighted_policy_loss(weight, advantage, new), weight == 0)


def ratio_weight(off: OffPolicy, rho: Tensor) -> Tensor:
    """What a token's gradient is scaled with (detached): the ratio after the kind's mask, cut or clip."""
    low, high = off.bounds
    if off.kind == "dis" and low is not None and high is not None:
        return importance.inside(rho, low, high, strict=True)
    if off.kind == "icepop" and low is not None and high is not None:
        return importance.inside(rho, low, high, strict=False)
    if off.kind in ("tis", "cispo"):
        return rho.detach().clamp(min=low, max=high)
    return rho.detach()


def _surrogate(off: OffPolicy, new: Tensor, behaviour: Tensor, advantage: Tensor, row: Tensor) -> Terms:
    low, high = off.bounds
    assert low is not None and high is not None
    if off.kind == "decoupled":
        # One update per batch: the proximal policy is the one the step starts from, and all staleness is in the correction.
        loss = importance.decoupled_ppo_loss(new, new.detach(), behaviour, advantage, 1 - low, high - 1)
        return Terms(loss, torch.zeros_like(new, dtype=torch.bool))
    log_rho = importance.log_ratio(new, behaviour)
    rho = (sequence_means(log_rho, row) if off.kind == "gspo" else log_rho).exp()
    clipped = torch.where(advantage >= 0, rho > high, rho < low)
    if off.dual_clip is not None:
        clipped = clipped | ((advantage < 0) & (rho > off.dual_clip))
    return Terms(importance.ppo_loss(rho, advantage, 1 - low, high - 1, off.dual_clip), clipped.detach())


def sequence_means(values: Tensor, row: Tensor) -> Tensor:
    """Each token's value replaced by the mean over its answer; differentiable."""
    count = int(row.max()) + 1 if row.numel() else 0
    total = values.new_zeros(count).index_add(0, row, values)
    tokens = values.new_zeros(count).index_add(0, row, torch.ones_like(values))
    return (total / tokens.clamp(min=1))[row]
