"""Distillation: the worked numbers against an oracle in plain Python, chunking, and gradients by finite differences."""

import math

import pytest
import torch
from torch import nn

from reef_cli.config.off_policy import OffPolicy
from reef_cli.trainer.losses import distill
from reef_cli.trainer.losses.logprobs import linear_logprobs
from reef_cli.trainer.losses.policy import policy_terms

D = torch.float64
S3, T3 = [0.7, 0.2, 0.1], [0.4, 0.5, 0.1]
S4, T4 = [0.5, 0.25, 0.15, 0.1], [0.2, 0.5, 0.05, 0.25]


def logs(*probs: float) -> torch.Tensor:
    return torch.tensor([probs], dtype=D).log()


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def oracle(s: list[float], t: list[float], alpha: float) -> float:
    if alpha in (0, 1):
        return kl(s, t) if alpha else kl(t, s)
    m = [(1 - alpha) * a + alpha * b for a, b in zip(s, t, strict=True)]
    return (1 - alpha) * kl(s, m) + alpha * kl(t, m)


@pytest.mark.parametrize(("alpha", "value"), [(0, 0.234299), (1, 0.208473), (0.5, 0.053923), (0.25, 0.041830)])
def test_divergences_over_three_entries(alpha: float, value: float) -> None:
    assert oracle(S3, T3, alpha) == pytest.approx(value, abs=1e-6)
    assert float(distill.divergence(logs(*S3), logs(*T3), alpha)) == pytest.approx(value, abs=1e-6)


def test_listed_entries_with_a_tail_and_renormalised() -> None:
    assert float(distill.divergence(logs(*S4), logs(*T4), 1)) == pytest.approx(0.358021, abs=1e-6)
    assert float(distill.divergence(logs(*S4), logs(*T4), 0.5)) == pytest.approx(0.084129, abs=1e-6)
    s, t = logs(*S4[:2]), logs(*T4[:2])
    assert float(distill.listed_divergence(s, t, 1, tail=True)) == pytest.approx(0.239278, abs=1e-6)
    assert float(distill.listed_divergence(s, t, 1, tail=False)) == pytest.approx(0.310819, abs=1e-6)
    assert float(distill.listed_divergence(logs(*S3[:2]), logs(*T3[:2]), 1, tail=True)) == pytest.approx(0.208473, abs=1e-6)
    s, t = logs(0.6, 0.2), logs(0.5, 0.4)
    assert float(distill.listed_divergence(s, t, 1, tail=True)) == pytest.approx(0.109393, abs=1e-6)
    assert float(distill.listed_divergence(s, t, 0, tail=True)) == pytest.approx(0.116783, abs=1e-6)


def test_a_tail_that_holds_nothing_stays_finite() -> None:
    whole = distill.with_tail(logs(0.5, 0.5))
    assert torch.isfinite(whole).all() and float(whole.exp().sum()) == pytest.approx(1, abs=1e-6)


def test_sampled_token_form() -> None:
    """Reverse KL by the sampled token is the policy loss with the gap as its advantage."""
    s = torch.tensor([-1.2], dtype=D, requires_grad=True)
    advantage = distill.opd_advantages(torch.zeros(1, dtype=D), s, torch.tensor([-0.4], dtype=D), 1.0)
    terms = policy_terms(OffPolicy("none"), s, s.detach(), advantage, torch.zeros(1, dtype=torch.long))
    terms.loss.sum().backward()
    assert float(terms.loss) == pytest.approx(0.96) and s.grad is not None and float(s.grad) == pytest.approx(-0.8)


def test_opd_numbers() -> None:
    def t(*v: float) -> torch.Tensor:
        return torch.tensor(v, dtype=D)

    found = distill.opd_advantages(t(0.5, 0.5, 0.5), t(-1, -0.5, -2), t(-0.7, -1.5, -2), 1.0)
    assert found.tolist() == pytest.approx([0.8, -0.5, 0.5])
    gap = distill.normalised_gap(t(0.3, -0.1, -2, 0.5), t(0, 0, 0, 0), 0.5, 1.0)
    assert gap.tolist() == pytest.approx([0.143839, -0.047946, -0.5, 0.239732], abs=1e-6)


def test_overlap_numbers() -> None:
    old, teacher = logs(0.5, 0.3, 0.1, 0.05), logs(0.2, 0.6, 0.05, 0.1)
    advantage = distill.overlap_advantages(old, teacher, 1.0)
    assert advantage[0].tolist() == pytest.approx([-0.482258, 0.218889, -0.072963, 0.036481], abs=1e-6)
    assert float(distill.overlap_loss(old, old, advantage, 0.2, 0.28)) == pytest.approx(0.299851, abs=1e-6)
    known = torch.tensor([[True, True, False, True]])
    part = distill.overlap_advantages(old, teacher, 1.0, known)
    assert float(distill.overlap_loss(old, old, part, 0.2, 0.28)) == pytest.approx(0.253581, abs=1e-6)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert distill.overlap(ids, torch.tensor([[3, 1, 9], [7, 8, 9]])).tolist() == [2, 0]


class Toy(nn.Module):
    """Two layers in float64: an embedding of positions into hidden states, and a head over a vocabulary of 7."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(5, 6, dtype=D)
        self.head = nn.Linear(6, 7, bias=False, dtype=D)
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("elements", [7, 14, 1 << 20])
def test_the_whole_vocabularys_gradient_through_a_two_layer_model(alpha: float, elements: int) -> None:
    """Against finite differences, however small the chunks are, and equal to the divergence of plain softmaxes."""
    toy, x = Toy(), torch.randn(4, 5, dtype=D, generator=torch.Generator().manual_seed(0))
    teacher = torch.randn(4, 6, dtype=D, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([1.0, 0.7, 1.3, 1.0], dtype=D)

    def loss() -> torch.Tensor:
        return distill.linear_divergence(toy(x), teacher, toy.head, temperature, alpha, elements).sum()

    def plain(hidden: torch.Tensor) -> torch.Tensor:
        return (toy.head(hidden) / temperature.unsqueeze(-1)).log_softmax(-1)

    value = loss()
    assert float(value) == pytest.approx(float(distill.divergence(plain(toy(x)), plain(teacher), alpha).sum()), rel=1e-12)
    value.backward()
    weight = toy.inner.weight
    assert weight.grad is not None
    for place in ((0, 0), (3, 2), (5, 4)):
        assert float(weight.grad[place]) == pytest.approx(difference(loss, weight, place), rel=1e-5, abs=1e-9)


def difference(loss: "object", weight: torch.Tensor, place: tuple[int, int], h: float = 1e-6) -> float:
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[place] += sign * h
            values.append(float(loss()))  # type: ignore[operator]
            weight[place] -= sign * h
    return (values[0] - values[1]) / (2 * h)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_listed_entries_gradient_through_a_two_layer_model(alpha: float, tail: bool) -> None:
    """The road SDPO and OPD take: log-probs of K ids from the frozen head's analytic backward pass."""
    toy, x = Toy(), torch.randn(4, 5, dtype=D, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 0, 3], [2, 1, 6]])
    temperature = torch.ones(4, dtype=D)
    teacher, _ = linear_logprobs(torch.randn(4, 6, dtype=D), toy.head, ids, temperature)

    def loss() -> torch.Tensor:
        student, _ = linear_logprobs(toy(x), toy.head, ids, temperature, 2)
        return distill.listed_divergence(student, teacher, alpha, tail=tail).sum()

    loss().backward()
    weight = toy.inner.weight
    assert weight.grad is not None
    for place in ((0, 0), (3, 2), (5, 4)):
        assert float(weight.grad[place]) == pytest.approx(difference(loss, weight, place), rel=1e-5, abs=1e-9)


def test_top_entries_are_the_likeliest_whatever_the_chunks() -> None:
    toy, hidden = Toy(), torch.randn(5, 6, dtype=D)
    whole = toy.head(hidden).log_softmax(-1).topk(3, -1)
    ids, values = distill.top_entries(hidden, toy.head, torch.ones(5, dtype=D), 3, elements=14)
    assert torch.equal(ids, whole.indices) and torch.allclose(values, whole.values)
    none, _ = distill.top_entries(hidden[:0], toy.head, torch.ones(0, dtype=D), 3)
    assert none.shape == (0, 3)
