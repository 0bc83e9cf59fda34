"""Off-policy corrections: the worked numbers of the literature, an independent oracle in plain Python, and gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.trainer.losses import importance as imp

D = torch.float64
LOG_RHO = torch.tensor([0.05, -0.3, 0.8, -0.02], dtype=D)
RHO = LOG_RHO.exp()
HEAVY = torch.tensor([0.1, 0.1, 2.5, -0.1], dtype=D)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=D)


def near(actual: torch.Tensor, expected: list[float] | float) -> None:
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)


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
    weight = imp.dis_weight(rho, low, high)
    near(weight, weights)
    loss = imp.weighted_policy_loss(weight, t(0.5, 0.5, 0.5, 0.5), new)
    near(loss.detach(), losses)
    near(loss.mean().detach(), mean)
    assert (weight == 0).double().mean() == masked
    loss.sum().backward()
    assert new.grad is not None
    near(new.grad, [-0.5 * w for w in weights])


def test_dis_bounds_are_strict() -> None:
    near(imp.dis_weight(t(1 - 0.3, 1 + 5.0, 0.7000001, 5.9999999), 0.3, 5.0), [0, 0, 0.7000001, 5.9999999])


# -- the family (section on off-policy corrections) --------------------------------------------------------------------------


def test_ratios_and_truncations() -> None:
    near(RHO, [1.051271, 0.740818, 2.225541, 0.980199])
    near(imp.tis_weight(RHO, 2.0), [1.051271, 0.740818, 2.0, 0.980199])
    near(imp.icepop_weight(RHO, 0.5, 2.0), [1.051271, 0.740818, 0, 0.980199])
    near(imp.icepop_weight(t(0.5, 2.0), 0.5, 2.0), [0.5, 2.0])


def test_sequence_ratios() -> None:
    near(imp.sequence_ratio(LOG_RHO), 1.698932)
    near(imp.geometric_ratio(LOG_RHO), 1.141679)
    near(imp.sequence_ratio(torch.full((10,), math.log(1.1), dtype=D)), 2.593742)
    assert float(imp.sequence_ratio(torch.full((100,), math.log(1.1), dtype=D))) == pytest.approx(13780.612, abs=1e-3)
    near(imp.geometric_ratio(torch.full((100,), math.log(1.1), dtype=D)), 1.1)


def test_divergences() -> None:
    near(imp.k1(LOG_RHO), -0.1325)
    near(imp.k2(LOG_RHO), 0.091613)
    near(imp.k3(LOG_RHO), 0.116957)


def test_effective_sample_size() -> None:
    near(imp.effective_sample_size(RHO), 3.300600)
    near(imp.effective_sample_size(RHO) / 4, 0.825150)
    near(HEAVY.exp()[2], 12.182494)
    near(imp.effective_sample_size(HEAVY.exp()), 1.542899)
    near(imp.effective_sample_size(imp.tis_weight(HEAVY.exp(), 2.0)), 3.603240)
    near(imp.effective_sample_size(t(0, 0)), 0.0)


def test_m2po_drops_the_largest_until_the_rest_is_calm() -> None:
    near(LOG_RHO.square().mean(), 0.183225)
    keep = imp.m2po_keep(LOG_RHO, 0.04)
    assert keep.tolist() == [True, True, False, True]
    near(LOG_RHO[keep].square().mean(), 0.030967)
    assert imp.m2po_keep(LOG_RHO, 1.0).all()


def test_decoupled_ppo() -> None:
    loss = imp.decoupled_ppo_loss(t(-1.0), t(-1.2), t(-2.0), t(1.0), 0.2)
    near(imp.ratio(t(-1.2), t(-2.0)), [2.225541])
    near(imp.ratio(t(-1.0), t(-1.2)), [1.221403])
    near(loss, [-2.670649])


def test_a3po() -> None:
    near(imp.a3po_proximal(t(-1.0), t(-2.0), 3, 7, 8), [-1.2])
    near(imp.a3po_proximal(t(-1.0), t(-2.0), 8, 8, 8), [-1.0])


def test_gspo_clips_the_geometric_ratio() -> None:
    s = imp.geometric_ratio(t(0.001, -0.0005, 0.002, 0.0))
    near(s, 1.000625)
    near(-imp.ppo_loss(s, torch.ones((), dtype=D), 3e-4, 4e-4), 1.0004)


def test_cispo_keeps_a_gradient_where_dis_has_none() -> None:
    for rho, expected in ((0.8, 0.8), (9.0, 6.0)):
        lp = t(-2.0).requires_grad_()
        loss = imp.weighted_policy_loss(imp.cispo_weight(t(rho), 5.0), t(0.5), lp)
        near(loss.detach(), [expected])
        loss.sum().backward()
        assert lp.grad is not None and float(lp.grad) != 0
    near(imp.dis_weight(t(9.0), 0.3, 5.0), [0.0])
    near(imp.cispo_weight(t(0.1), 5.0, 0.3), [0.7])


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
    weight = imp.dis_weight(imp.ratio(new, old), low, high)
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
    assert float(imp.k3(log_rho)) >= -1e-12 and float(imp.k2(log_rho)) >= 0
    ess = float(imp.effective_sample_size(log_rho.exp()))
    assert 1 - 1e-9 <= ess <= len(values) + 1e-9


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=12), st.floats(0.001, 3))
def test_m2po_keeps_the_largest_calm_prefix(values: list[float], threshold: float) -> None:
    squares = sorted(v * v for v in values)
    longest = max((n for n in range(1, len(squares) + 1) if sum(squares[:n]) / n <= threshold), default=0)
    assert int(imp.m2po_keep(t(*values), threshold).sum()) in (longest, longest - 1, longest + 1)


def test_weights_never_overflow() -> None:
    assert torch.isfinite(imp.ratio(t(0.0), t(-1e4))).all()
    assert torch.isfinite(imp.sequence_ratio(torch.full((1000,), 5.0, dtype=D)))
