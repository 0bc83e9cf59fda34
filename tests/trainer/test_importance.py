"""Off-policy corrections: the worked numbers of the literature, an independent oracle in plain Python, and gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.config.off_policy import OffPolicy
from reef_cli.trainer.losses import importance as imp
from reef_cli.trainer.losses.policy import policy_terms, ratio_weight, sequence_means

D = torch.float64
LOG_RHO = torch.tensor([0.05, -0.3, 0.8, -0.02], dtype=D)
RHO = LOG_RHO.exp()
HEAVY = torch.tensor([0.1, 0.1, 2.5, -0.1], dtype=D)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=D)


def near(actual: torch.Tensor | float, expected: list[float] | float) -> None:
    assert (actual.tolist() if isinstance(actual, torch.Tensor) else actual) == pytest.approx(expected, abs=1e-6)


def ess(weights: torch.Tensor) -> float:
    return imp.effective_sample_size(float(weights.sum()), float(weights.square().sum()))


def one_answer(log_rho: torch.Tensor) -> torch.Tensor:
    """GSPO's ratio of an answer, from that of each of its tokens."""
    return sequence_means(log_rho, torch.zeros(len(log_rho), dtype=torch.long)).exp()[0]


# -- SAO's mask (worked example 1) -----------------------------------------------------------------------------------------

ROLLOUT = t(-1.0, -0.5, -2.0, -0.1)
NEW = t(-0.8, -1.2, -0.1, -0.1)


@pytest.mark.parametrize(
    ("low", "high", "weights", "losses", "mean", "masked"),
    [
        (0.3, 5.0, [1.221403, 0, 0, 1.0], [0.488561, 0, 0, 0.05], 0.134640, 0.5),
        (0.8, 3.0, [1.221403, 0.496585, 0, 1.0], [0.488561, 0.297951, 0, 0.05], 0.209128, 0.25),
    ],
)
def test_dis(low: float, high: float, weights: list[float], losses: list[float], mean: float, masked: float) -> None:
    new = NEW.clone().requires_grad_()
    rho = imp.ratio(new, ROLLOUT)
    near(rho.detach(), [1.221403, 0.496585, 6.685894, 1.0])
    weight = ratio_weight(OffPolicy("dis", 1 - low, 1 + high), rho)
    near(weight, weights)
    loss = imp.weighted_policy_loss(weight, t(0.5, 0.5, 0.5, 0.5), new)
    near(loss.detach(), losses)
    near(loss.mean().detach(), mean)
    assert (weight == 0).double().mean() == masked
    loss.sum().backward()
    assert new.grad is not None
    near(new.grad, [-0.5 * w for w in weights])


def test_dis_bounds_are_strict() -> None:
    off = OffPolicy("dis", 1 - 0.3, 1 + 5.0)
    near(ratio_weight(off, t(1 - 0.3, 1 + 5.0, 0.7000001, 5.9999999)), [0, 0, 0.7000001, 5.9999999])


# -- the family (section on off-policy corrections) --------------------------------------------------------------------------


def test_ratios_and_truncations() -> None:
    near(RHO, [1.051271, 0.740818, 2.225541, 0.980199])
    near(ratio_weight(OffPolicy("tis", high=2.0), RHO), [1.051271, 0.740818, 2.0, 0.980199])
    near(ratio_weight(OffPolicy("tis", high=2.0), t(0.5, 1.0, -1.0).exp()), [1.648721, 2.0, 0.367879])
    near(ratio_weight(OffPolicy("icepop", 0.5, 2.0), RHO), [1.051271, 0.740818, 0, 0.980199])
    near(ratio_weight(OffPolicy("icepop", 0.5, 2.0), t(0.5, 2.0)), [0.5, 2.0])


def test_the_geometric_ratio_does_not_grow_with_length() -> None:
    near(one_answer(LOG_RHO), 1.141679)
    near(one_answer(torch.full((100,), math.log(1.1), dtype=D)), 1.1)


def test_divergences() -> None:
    near(imp.k1(LOG_RHO).mean(), -0.1325)
    near(imp.k2(LOG_RHO).mean(), 0.091613)
    near(imp.k3(LOG_RHO).mean(), 0.116957)
    near(imp.k3(t(-1.5, -1.0) - t(-1.0, -1.5)), [0.106531, 0.148721])


def test_effective_sample_size() -> None:
    near(ess(RHO), 3.300600)
    near(ess(RHO) / 4, 0.825150)
    near(HEAVY.exp()[2], 12.182494)
    near(ess(HEAVY.exp()), 1.542899)
    near(ess(ratio_weight(OffPolicy("tis", high=2.0), HEAVY.exp())), 3.603240)
    near(ess(t(0, 0)), 0.0)


def test_decoupled_ppo() -> None:
    loss = imp.decoupled_ppo_loss(t(-1.0), t(-1.2), t(-2.0), t(1.0), 0.2, 0.2)
    near(imp.ratio(t(-1.2), t(-2.0)), [2.225541])
    near(imp.ratio(t(-1.0), t(-1.2)), [1.221403])
    near(loss, [-2.670649])


def test_gspo_clips_the_geometric_ratio() -> None:
    log_rho = t(0.001, -0.0005, 0.002, 0.0)
    near(one_answer(log_rho), 1.000625)
    off, row = OffPolicy("gspo", 1 - 3e-4, 1 + 4e-4), torch.zeros(4, dtype=torch.long)
    near(policy_terms(off, log_rho, torch.zeros_like(log_rho), torch.ones_like(log_rho), row).loss, [-1.0004] * 4)


def test_cispo_keeps_a_gradient_where_dis_has_none() -> None:
    for rho, expected in ((0.8, 0.8), (9.0, 6.0)):
        lp = t(-2.0).requires_grad_()
        loss = imp.weighted_policy_loss(ratio_weight(OffPolicy("cispo", high=6.0), t(rho)), t(0.5), lp)
        near(loss.detach(), [expected])
        loss.sum().backward()
        assert lp.grad is not None and float(lp.grad) != 0
    near(ratio_weight(OffPolicy("dis"), t(9.0)), [0.0])
    near(ratio_weight(OffPolicy("cispo", 0.7, 6.0), t(0.1)), [0.7])


def test_dual_clip_bounds_a_negative_advantage() -> None:
    near(imp.ppo_loss(t(10.0), t(-1.0), 0.2, 0.2, dual_clip=3.0), [3.0])
    near(imp.ppo_loss(t(10.0), t(-1.0), 0.2, 0.2), [10.0])
    near(imp.ppo_loss(t(10.0), t(1.0), 0.2, 0.2, dual_clip=3.0), [-1.2])


# -- oracle and properties ---------------------------------------------------------------------------------------------------

log_probs = st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-3, 3)), min_size=1, max_size=12)


def oracle(rows: list[tuple[float, float, float]], low: float, high: float) -> tuple[float, list[float], float]:
    """SAO's loss, its gradient and the masked share, token by token in plain Python."""
    total, grads, masked = 0.0, [], 0
    for new, old, advantage in rows:
        r = math.exp(max(-20.0, min(20.0, new - old)))
        f = r if 1 - low < r < 1 + high else 0.0
        masked += f == 0.0
        total -= f * advantage * new
        grads.append(-f * advantage)
    return total, grads, masked / len(rows)


@given(log_probs, st.floats(0.05, 0.9), st.floats(0.1, 8))
def test_dis_equals_the_oracle(rows: list[tuple[float, float, float]], low: float, high: float) -> None:
    new = torch.tensor([row[0] for row in rows], dtype=D, requires_grad=True)
    old, advantage = t(*(row[1] for row in rows)), t(*(row[2] for row in rows))
    weight = ratio_weight(OffPolicy("dis", 1 - low, 1 + high), imp.ratio(new, old))
    loss = imp.weighted_policy_loss(weight, advantage, new).sum()
    loss.backward()
    assert new.grad is not None
    total, grads, masked = oracle(rows, low, high)
    assert float(loss) == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert new.grad.tolist() == pytest.approx(grads, rel=1e-9, abs=1e-12)
    assert float((weight == 0).double().mean()) == pytest.approx(masked)


@given(st.lists(st.floats(-15, 15), min_size=1, max_size=20))
def test_divergence_properties(values: list[float]) -> None:
    log_rho = t(*values)
    assert float(imp.k3(log_rho).min()) >= -1e-12 and float(imp.k2(log_rho).min()) >= 0
    assert 1 - 1e-9 <= ess(log_rho.exp()) <= len(values) + 1e-9


def test_weights_never_overflow() -> None:
    assert torch.isfinite(imp.ratio(t(0.0), t(-1e4))).all()
