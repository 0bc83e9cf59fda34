"""One policy step with its diagnostics and guards, for every program that trains the policy.

A policy-gradient program computes advantages and calls `policy_gradient_step`; a distillation program gives its own terms to
`step`. Both return the metrics a `StepReport` needs: loss, gradient norm, everything of `diagnostics`, and `skipped` with the
reason when a guard called the update off.

    advantages = [batch.per_token(micro, values) for micro in batch.micros]      # one value per sample
    return policy_gradient_step(policy, batch, self.settings.off, advantages)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from reef_cli.config.off_policy import OffPolicy
from reef_cli.trainer import diagnostics
from reef_cli.trainer.batching import Batch, MicroBatch
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.losses.policy import Terms, policy_terms
from reef_cli.trainer.model import TokenOutput
from reef_cli.trainer.program import StepReport

TermsOf = Callable[[MicroBatch, TokenOutput], Terms]


def step(
    policy: Policy,
    batch: Batch,
    off: OffPolicy,
    terms: TermsOf,
    *,
    weights: Sequence[float] | None = None,
    divisor: float | None = None,
    ids: Callable[[MicroBatch], Tensor] | None = None,
) -> StepReport:
    """One update on sum(weight * loss) / divisor.

    `weights` are per sample of the batch (default 1); `divisor` defaults to the batch's action tokens, and 1 makes the loss a
    sum. `ids` as in `Policy.update`.
    """
    diagnosis = diagnostics.Diagnosis(policy, batch)
    shown: dict[str, Any] = {}

    def loss(micro: MicroBatch, out: TokenOutput) -> Tensor:
        found = terms(micro, out)
        diagnosis.note(micro, out, found.masked)
        weight = 1.0 if weights is None else batch.per_token(micro, weights)
        return (found.loss * weight).sum()

    def veto() -> str | None:
        shown.update(diagnosis.metrics())
        return diagnostics.veto(shown, off)

    update = policy.update(batch.micros, batch.tokens if divisor is None else divisor, loss, veto, ids)
    metrics = {
        **diagnostics.batch_metrics(batch),
        "policy_loss": update.loss,
        "grad_norm": update.grad_norm,
        **shown,
        "published": update.applied,
    }
    if update.reason is not None:
        metrics["skipped"] = update.reason
    return StepReport(update.applied, metrics)


def policy_gradient_step(
    policy: Policy,
    batch: Batch,
    off: OffPolicy,
    advantages: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    divisor: float | None = None,
) -> StepReport:
    """`step` with the loss of the off-policy kind; `advantages` are per micro-batch `[N]`."""
    by_micro = {id(micro): advantage for micro, advantage in zip(batch.micros, advantages, strict=True)}

    def terms(micro: MicroBatch, out: TokenOutput) -> Terms:
        return policy_terms(off, out.logprob, micro.rollout_logprobs, by_micro[id(micro)], micro.row)

    return step(policy, batch, off, terms, weights=weights, divisor=divisor)


def imitation_step(policy: Policy, batch: Batch) -> StepReport:
    """Negative log-likelihood of the samples' answers: demonstrations, which no policy sampled. Weights are in the extras."""
    counted = float(sum(sum(s.tokens.loss_mask) for s, weight in zip(batch.samples, batch.weights, strict=True) if weight > 0))
    if counted == 0:
        return StepReport(False, {**diagnostics.batch_metrics(batch), "published": False, "skipped": "nothing_to_imitate"})
    entropy: list[Tensor] = []

    def loss(micro: MicroBatch, out: TokenOutput) -> Tensor:
        weight = batch.per_token(micro, batch.weights)
        entropy.append((out.entropy.detach() * (weight > 0)).sum().double())
        return -(out.logprob * weight).sum()

    update = policy.update(batch.micros, counted, loss, lambda: None)
    metrics = {
        **diagnostics.batch_metrics(batch),
        "policy_loss": update.loss,
        "grad_norm": update.grad_norm,
        "entropy": float(policy.sum(torch.stack(entropy).sum())) / counted,
        "imitated_tokens": int(counted),
        "published": update.applied,
    }
    return StepReport(update.applied, metrics)


def by_sequence(batch: Batch, weights: Sequence[float] | None = None) -> list[float]:
    """Weights under which a token mean becomes the mean over answers of each answer's token mean."""
    given = weights or [1.0] * len(batch.samples)
    counts = [max(1, sum(sample.tokens.loss_mask)) for sample in batch.samples]
    return [weight * batch.tokens / (len(counts) * count) for weight, count in zip(given, counts, strict=True)]
