"""Advantages: worked numbers, a plain-Python oracle that walks the tokens, and the claim that observations do not matter."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.trainer.losses import advantages as adv

D = torch.float64
VALUES = torch.tensor([0.2, 0.4, 9.9, 9.9, 0.6], dtype=D)
MASK = torch.tensor([1, 1, 0, 0, 1])


@pytest.mark.parametrize(
    ("lam", "reward", "advantages", "returns"),
    [
        (1.0, 1.0, [0.8, 0.6, 0, 0, 0.4], [1, 1, 0, 0, 1]),
        (0.95, 1.0, [0.751, 0.58, 0, 0, 0.4], [0.951, 0.98, 0, 0, 1]),
        (0.0, 1.0, [0.2, 0.2, 0, 0, 0.4], [0.4, 0.6, 0, 0, 1]),
        (None, 1.0, [0.673778, 0.546667, 0, 0, 0.4], [0.873778, 0.946667, 0, 0, 1]),
        (None, 0.0, [-0.077333, -0.32, 0, 0, -0.6], None),
    ],
)
def test_skip_observation_gae(lam: float | None, reward: float, advantages: list[float], returns: list[float] | None) -> None:
    lam = adv.adaptive_lambda(5, 1.5) if lam is None else lam
    a, r = adv.skip_observation_gae(VALUES, MASK, reward, 1.0, lam)
    assert a.tolist() == pytest.approx(advantages, abs=1e-6)
    if returns is not None:
        assert r.tolist() == pytest.approx(returns, abs=1e-6)


@pytest.mark.parametrize(
    ("length", "lam"),
    [(1, 0.333333), (2, 0.666667), (3, 0.777778), (5, 0.866667), (10, 0.933333), (64, 0.989583), (512, 0.998698)],
)
def test_adaptive_lambda(length: int, lam: float) -> None:
    assert adv.adaptive_lambda(length, 1.5) == pytest.approx(lam, abs=1e-6)


def test_adaptive_lambda_stays_in_range() -> None:
    assert adv.adaptive_lambda(0, 1.5) == 0 and adv.adaptive_lambda(1, 0.5) == 0


def test_critic_metrics() -> None:
    values, returns = torch.tensor([0.8, 0.3, 0.6, 0.9], dtype=D), torch.tensor([1.0, 0, 1, 1], dtype=D)
    assert float((values - returns).square().mean()) == pytest.approx(0.075, abs=1e-6)
    assert adv.explained_variance(values, returns) == pytest.approx(0.653333, abs=1e-6)
    assert adv.explained_variance(values[:1], returns[:1]) is None
    assert adv.explained_variance(values[:2], torch.ones(2, dtype=D)) is None


def test_group_baselines() -> None:
    rewards = torch.tensor([1.0, 0, 1, 1], dtype=D)
    assert adv.grpo_advantages(rewards).tolist() == pytest.approx([0.499999, -1.499997, 0.499999, 0.499999], abs=1e-6)
    assert adv.rloo_advantages(rewards).tolist() == pytest.approx([0.333333, -1, 0.333333, 0.333333], abs=1e-6)
    assert adv.grpo_advantages(rewards[:1]).tolist() == adv.rloo_advantages(rewards[:1]).tolist() == [0.0]


def oracle(values: list[float], mask: list[int], reward: float, gamma: float, lam: float) -> list[float]:
    """GAE from its definition: a sum of discounted temporal differences over the action tokens, front to back."""
    at = [i for i, m in enumerate(mask) if m]
    v = [values[i] for i in at]
    deltas = [(reward if k == len(v) - 1 else gamma * v[k + 1]) - v[k] for k in range(len(v))]
    found = [0.0] * len(values)
    for k, i in enumerate(at):
        found[i] = math.fsum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(v)))
    return found


tokens = st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 1)), min_size=1, max_size=20)


@given(tokens, st.floats(-2, 2), st.floats(0.5, 1), st.floats(0, 1))
def test_gae_equals_the_definition(rows: list[tuple[float, int]], reward: float, gamma: float, lam: float) -> None:
    values, mask = [v for v, _ in rows], [m for _, m in rows]
    a, r = adv.skip_observation_gae(torch.tensor(values, dtype=D), torch.tensor(mask), reward, gamma, lam)
    assert a.tolist() == pytest.approx(oracle(values, mask, reward, gamma, lam), abs=1e-9)
    assert r.tolist() == pytest.approx([(x + v) * m for x, v, m in zip(a.tolist(), values, mask, strict=True)], abs=1e-9)


@given(tokens, st.floats(-2, 2), st.floats(0.5, 1))
def test_monte_carlo_returns_are_gae_at_lambda_one(rows: list[tuple[float, int]], reward: float, gamma: float) -> None:
    values, mask = torch.tensor([v for v, _ in rows], dtype=D), torch.tensor([m for _, m in rows])
    _, returns = adv.skip_observation_gae(values, mask, reward, gamma, 1.0)
    assert adv.monte_carlo_returns(mask, reward, gamma, D).tolist() == pytest.approx(returns.tolist(), abs=1e-9)


@given(tokens, st.lists(st.floats(-1e6, 1e6), min_size=20, max_size=20))
def test_values_of_observations_do_not_matter(rows: list[tuple[float, int]], noise: list[float]) -> None:
    mask = torch.tensor([m for _, m in rows])
    values = torch.tensor([v for v, _ in rows], dtype=D)
    other = torch.where(mask == 1, values, torch.tensor(noise[: len(rows)], dtype=D))
    first = adv.skip_observation_gae(values, mask, 1.0, 1.0, 0.9)
    second = adv.skip_observation_gae(other, mask, 1.0, 1.0, 0.9)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
