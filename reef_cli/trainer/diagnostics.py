"""What a step shows about itself: how far the sampling policy is from the learning one, how stale the batch was, and when
that is a reason not to learn from it. The names are those of the metrics in trackers and `reef jobs show`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reef_cli.config.off_policy import OffPolicy
from reef_cli.trainer.batching import Batch, MicroBatch
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.losses import importance
from reef_cli.trainer.model import TokenOutput
from reef_cli.trainer.program import StepRefused


@dataclass(frozen=True, slots=True)
class _Seen:
    """One micro-batch: log-ratio, tokens without a gradient because of it, entropy."""

    micro: MicroBatch
    log_ratio: Tensor
    masked: Tensor
    entropy: Tensor


class Diagnosis:
    """Gathers over the micro-batches of one step."""

    def __init__(self, policy: Policy, batch: Batch) -> None:
        self._policy, self._batch = policy, batch
        self._seen: list[_Seen] = []

    def note(self, micro: MicroBatch, out: TokenOutput, masked: Tensor | None = None) -> None:
        """Remember what a micro-batch showed; call it from the loss."""
        gap = (out.logprob - micro.rollout_logprobs).detach().double()
        none = torch.zeros_like(gap, dtype=torch.bool)
        self._seen.append(_Seen(micro, gap, none if masked is None else masked, out.entropy.detach().double()))

    def metrics(self) -> dict[str, Any]:
        """Masked share, ESS/n, K1 to K3, entropy, |log-prob gap| of all tokens and of those at lag 0, over all ranks.

        Raises `StepRefused` when the batch's log-probs are not finite.
        """
        sums = torch.zeros(10, dtype=torch.float64, device=self._policy.device)
        for part in self._seen:
            sums += self._sums(part)
        sums = self._policy.sum(sums)
        if not torch.isfinite(sums).all():
            raise StepRefused("The batch's log-probs are not finite", hint="look at the log-probs the engine recorded")
        masked, weight, squares, k1, k2, k3, entropy, gap, fresh, all_gap = sums.tolist()
        n = max(1, self._batch.tokens)
        return {
            "masked_share": masked / n,
            "ess_share": importance.effective_sample_size(weight, squares) / n,
            "k1": k1 / n,
            "k2": k2 / n,
            "k3": k3 / n,
            "entropy": entropy / n,
            "logprob_gap_lag0": gap / fresh if fresh else None,
            "logprob_gap": all_gap / n,
        }

    def _sums(self, part: _Seen) -> Tensor:
        log_rho = part.log_ratio.clamp(-importance.LOG_RATIO_LIMIT, importance.LOG_RATIO_LIMIT)
        rho = log_rho.exp()
        lags = [self._batch.lag(position) == 0 for position in part.micro.rows]
        fresh = torch.tensor(lags, dtype=torch.bool, device=rho.device)[part.micro.row]
        return torch.stack(
            [
                part.masked.sum().double(),
                rho.sum(),
                rho.square().sum(),
                importance.k1(log_rho).sum(),
                importance.k2(log_rho).sum(),
                importance.k3(log_rho).sum(),
                part.entropy.sum(),
                part.log_ratio.abs()[fresh].sum(),
                fresh.sum().double(),
                part.log_ratio.abs().sum(),
            ]
        )


def veto(metrics: dict[str, Any], off: OffPolicy) -> str | None:
    """Why the step must be called off, as the metric `skipped` will say."""
    if metrics["masked_share"] > off.max_masked:
        return "masked_share_too_high"
    return "ess_too_low" if metrics["ess_share"] < off.min_ess else None


def batch_metrics(batch: Batch) -> dict[str, Any]:
    """Reward, size and staleness of a batch; `lag_histogram` counts samples by publications since they were made."""
    lags = [batch.lag(position) for position in range(len(batch.samples))]
    return {
        "reward_mean": mean([sample.reward for sample in batch.samples]),
        "trained_tokens": batch.tokens,
        "lag_mean": mean(lags),
        "lag_max": max(lags, default=0),
        "lag_histogram": {str(lag): count for lag, count in sorted(Counter(lags).items())},
    }


def mean(values: Sequence[float]) -> float:
    """0 for none."""
    return sum(values) / len(values) if values else 0.0
