"""Log-probs of chosen tokens without keeping vocabulary-sized tensors.

A response token costs 4 bytes per vocabulary entry as logits (196 kB at 49,152 entries), and autograd would keep several such
copies. Here the head is applied to chunks of tokens. When the head is frozen, the gradient with respect to the hidden state is

    d log p(y) / dh = (W[y] - sum_v p(v) W[v]) / T

so the forward pass keeps one hidden-sized vector per token and the backward pass costs no second pass over the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 256
"""Tokens whose logits are alive at once: 50 MB in fp32 at 49,152 entries."""


def selected_logprobs(logits: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs `[N, K]` of `ids` `[N, K]` and entropies `[N]` (nats) of softmax(logits / temperature); logits are `[N, V]`."""
    scaled = (logits if logits.dtype == torch.float64 else logits.float()) / temperature.unsqueeze(-1)
    normaliser = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, ids) - normaliser.unsqueeze(-1)
    with torch.no_grad():
        entropy = normaliser - ((scaled - normaliser.unsqueeze(-1)).exp() * scaled).sum(-1)
    return logprobs, entropy


def linear_logprobs(
    hidden: Tensor, head: nn.Module, ids: Tensor, temperature: Tensor, chunk: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """Log-probs `[N, K]` of `ids` `[N, K]` under softmax(head(hidden) / temperature), and entropies `[N]` without gradient.

    `hidden` is `[N, H]`, `head` maps H to the vocabulary, `temperature` is `[N]`. Differentiable in `hidden`, and in the head
    when it is trained (then logits are recomputed in the backward pass).
    """
    if len(hidden) == 0:
        return hidden.new_zeros(ids.shape, dtype=torch.float32) + 0 * hidden.float().sum(), hidden.new_zeros(
            0, dtype=torch.float32
        )
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2 and not weight.requires_grad and getattr(head, "bias", None) is None:
        logprobs, entropy = _FrozenHead.apply(hidden, weight, ids, temperature, chunk)  # type: ignore[no-untyped-call]
        return logprobs, entropy
    parts = [
        checkpoint(
            _through_head, hidden[i : i + chunk], head, ids[i : i + chunk], temperature[i : i + chunk], use_reentrant=False
        )
        for i in range(0, len(hidden), chunk)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _through_head(hidden: Tensor, head: nn.Module, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    return selected_logprobs(head(hidden), ids, temperature)


class _FrozenHead(torch.autograd.Function):
    """The analytic form for a frozen linear head; saves `sum_v p(v) W[v]` per token instead of logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(ids.shape, dtype=wide, device=hidden.device)
        entropy = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        expected = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.T
            logprobs[part], entropy[part] = selected_logprobs(logits, ids[part], temperature[part])
            if expected is not None:
                probs = torch.softmax(logits.to(wide) / temperature[part].unsqueeze(-1), -1)
                expected[part] = probs.to(weight.dtype) @ weight
        if expected is not None:
            ctx.save_for_backward(expected, weight, ids, temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        expected, weight, ids, temperature = ctx.saved_tensors
        scaled = grad / temperature.unsqueeze(-1)
        # Rows of the head for K ids per token: as many at once as the forward pass had logits' rows.
        step = max(1, CHUNK_TOKENS // ids.shape[1])
        parts = [
            torch.einsum("nk,nkh->nh", scaled[i : i + step], weight[ids[i : i + step]].to(grad.dtype))
            for i in range(0, len(ids), step)
        ]
        chosen = torch.cat(parts)
        return (chosen - expected.to(grad.dtype) * scaled.sum(1, keepdim=True)).to(expected.dtype), None, None, None, None
