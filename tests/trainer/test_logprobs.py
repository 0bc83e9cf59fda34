"""Log-probs: equal to the plain formula, with the right gradients, whatever the chunk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from reef_cli.trainer.losses.logprobs import linear_logprobs, selected_logprobs

D = torch.float64


def case(n: int, k: int, trained: bool = False) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 10 + k)
    head = nn.Linear(5, 13, bias=False, dtype=D).requires_grad_(trained)
    with torch.no_grad():
        head.weight.copy_(torch.randn(13, 5, dtype=D, generator=generator))
    hidden = torch.randn(n, 5, dtype=D, generator=generator).requires_grad_()
    ids = torch.randint(0, 13, (n, k), generator=generator)
    return hidden, head, ids, torch.rand(n, dtype=D, generator=generator) + 0.5


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 10), st.booleans())
def test_equals_the_plain_formula_with_gradients(n: int, k: int, chunk: int, trained: bool) -> None:
    hidden, head, ids, temperature = case(n, k, trained)
    logprobs, entropy = linear_logprobs(hidden, head, ids, temperature, chunk)
    weights = torch.arange(1.0, n * k + 1, dtype=D).view(n, k)
    (logprobs * weights).sum().backward()
    grads = [hidden.grad.clone(), head.weight.grad.clone() if trained else None]  # type: ignore[union-attr]
    hidden.grad = head.weight.grad = None
    plain = torch.log_softmax(head(hidden) / temperature[:, None], -1)
    (plain.gather(-1, ids) * weights).sum().backward()
    torch.testing.assert_close(logprobs, plain.gather(-1, ids))
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1))
    torch.testing.assert_close(grads[0], hidden.grad)
    if trained:
        torch.testing.assert_close(grads[1], head.weight.grad)


def test_gradient_against_finite_differences() -> None:
    hidden, head, ids, temperature = case(4, 2)
    assert torch.autograd.gradcheck(lambda x: linear_logprobs(x, head, ids, temperature, 3)[0], hidden)


def test_no_tokens_still_makes_a_graph() -> None:
    hidden, head, ids, temperature = case(3, 1)
    logprobs, _ = linear_logprobs(hidden[:0], head, ids[:0], temperature[:0])
    logprobs.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()


def test_bf16_logits_are_normalised_in_fp32() -> None:
    logits = torch.randn(3, 50_000, dtype=torch.bfloat16)
    logprobs, _ = selected_logprobs(logits, torch.zeros(3, 1, dtype=torch.long), torch.ones(3))
    assert logprobs.dtype == torch.float32
    exact = torch.log_softmax(logits.double(), -1)[:, :1]
    assert logprobs.double().tolist() == [pytest.approx(row, abs=1e-4) for row in exact.tolist()]
