"""Distillation: divergences between what a student and a teacher say about the same positions, per token, to be minimised.

The student's tensors carry the gradient; the teacher's are detached. `alpha` names the divergence as SDPO does: 0 is forward
KL(T||S), 1 reverse KL(S||T), between them the Jensen-Shannon family around M = (1 - alpha) S + alpha T. Distributions are
log-probs `[N, K]`: the whole vocabulary, or K of its entries closed by `with_tail` or `renormalised`. Over a whole vocabulary
`linear_divergence` goes through the head in chunks of tokens and keeps no vocabulary-sized tensor for the backward pass.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reef_cli.trainer.losses import importance

CHUNK_ELEMENTS = 1 << 22
"""Logits alive at once, per model: 16 MB in fp32, 85 tokens at 49,152 entries."""

TAIL_LIMIT = -1e-7
"""Largest log of the listed probabilities' sum, so that the tail bin's log exists."""


def opd_advantages(advantage: Tensor, student: Tensor, teacher: Tensor, strength: float) -> Tensor:
    """On-policy distillation as an advantage: A - strength * (log p_student - log p_teacher); detached."""
    return (advantage - strength * (student - teacher)).detach()


def normalised_gap(teacher: Tensor, behaviour: Tensor, beta: float, clip: float) -> Tensor:
    """beta * clip(RMSNorm(log p_teacher - log p_sampled), -clip, clip) over one answer's tokens; detached."""
    gap = (teacher - behaviour).detach()
    rms = gap.square().mean().sqrt().clamp_min(torch.finfo(gap.dtype).tiny)
    return beta * (gap / rms).clamp(-clip, clip)


# -- divergences -----------------------------------------------------------------------------------------------------------


def divergence(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """Per position `[N]`, from log-probs `[N, K]` that each sum to one."""
    teacher = teacher.detach()
    if alpha == 0:
        return _kl(teacher, student)
    if alpha == 1:
        return _kl(student, teacher)
    weights = torch.tensor([1 - alpha, alpha], dtype=student.dtype, device=student.device).log()
    middle = torch.logsumexp(torch.stack([student + weights[0], teacher + weights[1]]), 0)
    return (1 - alpha) * _kl(student, middle) + alpha * _kl(teacher, middle)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def with_tail(logprobs: Tensor) -> Tensor:
    """`[N, K]` entries of a distribution closed by one bin for all the others: `[N, K + 1]`."""
    listed = torch.logsumexp(logprobs, -1, keepdim=True).clamp(max=TAIL_LIMIT)
    return torch.cat([logprobs, torch.log(-torch.expm1(listed))], -1)


def renormalised(logprobs: Tensor) -> Tensor:
    """`[N, K]` entries as a distribution of their own."""
    return logprobs - torch.logsumexp(logprobs, -1, keepdim=True)


def listed_divergence(student: Tensor, teacher: Tensor, alpha: float, *, tail: bool) -> Tensor:
    """The divergence from `[N, K]` listed entries of both, closed by a tail bin or renormalised."""
    close = with_tail if tail else renormalised
    return divergence(close(student), close(teacher), alpha)


def linear_divergence(
    student: Tensor,
    teacher: Tensor,
    head: nn.Module,
    temperature: Tensor,
    alpha: float,
    elements: int = CHUNK_ELEMENTS,
    teacher_head: nn.Module | None = None,
) -> Tensor:
    """The whole vocabulary's divergence `[N]` from hidden states `[N, H]`; logits are recomputed in the backward pass."""
    heads = (head, teacher_head or head)
    parts = [
        checkpoint(_through_heads, student[part], teacher[part].detach(), heads, temperature[part], alpha, use_reentrant=False)
        for part in _chunks(len(student), head, elements)
    ]
    return torch.cat(parts) if parts else student.float().sum(-1)


def _through_heads(
    student: Tensor, teacher: Tensor, heads: tuple[nn.Module, nn.Module], temperature: Tensor, alpha: float
) -> Tensor:
    with torch.no_grad():
        target = _log_softmax(teacher, heads[1], temperature)
    return divergence(_log_softmax(student, heads[0], temperature), target, alpha)


@torch.no_grad()
def top_entries(
    hidden: Tensor, head: nn.Module, temperature: Tensor, k: int, elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """The `k` likeliest ids `[N, k]` at each hidden state and their log-probs, likeliest first; all where there are fewer."""
    logprobs = (_log_softmax(hidden[part], head, temperature[part]) for part in _chunks(len(hidden), head, elements))
    found = [part.topk(min(k, part.shape[-1]), -1) for part in logprobs]
    if not found:
        return hidden.new_zeros((0, k), dtype=torch.long), hidden.new_zeros((0, k), dtype=torch.float32)
    return torch.cat([part.indices for part in found]), torch.cat([part.values for part in found])


def _log_softmax(hidden: Tensor, head: nn.Module, temperature: Tensor) -> Tensor:
    logits = head(hidden)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    found: Tensor = (wide / temperature.unsqueeze(-1)).log_softmax(-1)
    return found


def _chunks(count: int, head: nn.Module, elements: int) -> list[slice]:
    weight = head.weight
    assert isinstance(weight, Tensor)
    size = max(1, elements // weight.shape[0])
    return [slice(start, start + size) for start in range(0, count, size)]


# -- overlap of the likeliest tokens (OpenClaw-RL) ---------------------------------------------------------------------------


def overlap(student_ids: Tensor, teacher_ids: Tensor) -> Tensor:
    """How many of the student's ids `[N, K]` are among the teacher's `[N, J]`, per position `[N]`."""
    return (student_ids.unsqueeze(-1) == teacher_ids.unsqueeze(-2)).any(-1).sum(-1)


def overlap_advantages(old: Tensor, teacher: Tensor, clip: float, known: Tensor | None = None) -> Tensor:
    """A_v = w_v * clamp(log T_v - log S_v, -clip, clip) on `[N, K]` log-probs, w the student's softmax over the listed ids.

    `known` (bool `[N, K]`) leaves ids out, for instance those outside the teacher's own list.
    """
    listed = old if known is None else old.masked_fill(~known, -torch.inf)
    weight = torch.softmax(listed, -1)
    gap = (teacher - old).clamp(-clip, clip)
    return (weight * (gap if known is None else gap.masked_fill(~known, 0.0))).detach()


def overlap_loss(current: Tensor, old: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """The clipped surrogate summed over the listed ids, per position `[N]`; log-probs are of the whole vocabulary's law."""
    rho = importance.ratio(current, old.detach())
    return importance.ppo_loss(rho, advantage, eps_low, eps_high).sum(-1)
