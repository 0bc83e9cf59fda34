"""The off-policy block and its kinds: worked numbers, gradients by finite differences, which tokens count as masked."""

import math
from typing import Any

import pytest
import torch

from reef_cli.config.off_policy import BOUNDS, OffPolicy
from reef_cli.core.errors import ConfigError
from reef_cli.trainer.losses import advantages as adv
from reef_cli.trainer.losses.policy import policy_terms, ratio_weight, sequence_means

D = torch.float64
ROLLOUT = torch.tensor([-1.0, -0.5, -2.0, -0.1, -0.7], dtype=D)
NEW = torch.tensor([-0.8, -1.2, -0.1, -0.1, -0.9], dtype=D)
ADVANTAGE = torch.tensor([0.5, -0.5, 0.5, -1.0, 2.0], dtype=D)
ROW = torch.tensor([0, 0, 0, 1, 1])


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=D)


def oracle(off: OffPolicy, new: list[float], old: list[float], advantage: list[float], row: list[int]) -> list[float]:
    """Each token's gradient with respect to its own log-prob, written out from the definitions in plain Python."""
    low, high = off.bounds
    grads = []
    for i, (lp, lp_old, a) in enumerate(zip(new, old, advantage, strict=True)):
        r = math.exp(lp - lp_old)
        if off.kind == "dis":
            grads.append(-a * r if low is not None and high is not None and low < r < high else 0.0)
        elif off.kind == "icepop":
            grads.append(-a * r if low is not None and high is not None and low <= r <= high else 0.0)
        elif off.kind in ("tis", "cispo"):
            grads.append(-a * max(low or 0.0, min(r, high or math.inf)))
        elif off.kind in ("none", "decoupled"):
            grads.append(-a * r)
        else:
            mine = [j for j, other in enumerate(row) if other == row[i]]
            if off.kind == "gspo":
                r = math.exp(sum(new[j] - old[j] for j in mine) / len(mine))
            clipped = r > (high or 0) if a >= 0 else r < (low or 0)
            clipped = clipped or (off.dual_clip is not None and a < 0 and r > off.dual_clip)
            # GSPO: every token of an answer moves the one ratio all of its tokens share.
            grads.append(0.0 if clipped else -a * r)
    if off.kind == "gspo":
        shares = [[j for j, other in enumerate(row) if other == row[i]] for i in range(len(row))]
        grads = [sum(grads[j] for j in mine) / len(mine) for mine in shares]
    return grads


@pytest.mark.parametrize("kind", list(BOUNDS))
@pytest.mark.parametrize("changes", [{}, {"low": 0.5, "high": 1.5}], ids=["defaults", "own bounds"])
def test_every_kind_has_the_gradient_of_its_definition(kind: str, changes: dict[str, float]) -> None:
    off = OffPolicy(kind, **changes)
    new = NEW.clone().requires_grad_()
    terms = policy_terms(off, new, ROLLOUT, ADVANTAGE, ROW)
    terms.loss.sum().backward()
    assert new.grad is not None
    expected = oracle(off, NEW.tolist(), ROLLOUT.tolist(), ADVANTAGE.tolist(), ROW.tolist())
    assert new.grad.tolist() == pytest.approx(expected, abs=1e-9)
    if kind not in ("gspo", "none", "tis", "cispo", "decoupled"):
        assert terms.masked.tolist() == [g == 0 for g in expected]


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_surrogates_agree_with_finite_differences(kind: str) -> None:
    off = OffPolicy(kind, low=0.5, high=1.6, dual_clip=3.0)
    new = NEW.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda lp: policy_terms(off, lp, ROLLOUT, ADVANTAGE, ROW).loss.sum(), (new,))


def test_the_ppo_numbers_of_the_literature() -> None:
    off = OffPolicy("ppo", 0.8, 1.28)
    rho, advantage = t(1.5, 1.1, 0.5, 1.5, 0.5, 0.9), t(1, 1, 1, -1, -1, -1)
    new = rho.log().requires_grad_()
    terms = policy_terms(off, new, torch.zeros_like(rho), advantage, torch.arange(6))
    terms.loss.sum().backward()
    assert terms.loss.tolist() == pytest.approx([-1.28, -1.1, -0.5, 1.5, 0.8, 0.9], abs=1e-6)
    assert new.grad is not None and new.grad.tolist() == pytest.approx([0, -1.1, -0.5, 1.5, 0, 0.9], abs=1e-6)
    assert terms.masked.tolist() == [True, False, False, False, True, False]


def test_the_weights_of_the_literature() -> None:
    rho = t(0.05, -0.3, 0.8, -0.02).exp()
    assert ratio_weight(OffPolicy("tis"), rho).tolist() == pytest.approx([1.051271, 0.740818, 2, 0.980199], abs=1e-6)
    assert ratio_weight(OffPolicy("icepop"), rho).tolist() == pytest.approx([1.051271, 0.740818, 0, 0.980199], abs=1e-6)
    assert ratio_weight(OffPolicy("cispo"), t(9.0, 0.1)).tolist() == pytest.approx([6.0, 0.1])
    assert ratio_weight(OffPolicy("dis"), t(0.7, 6.0, 0.71, 5.9)).tolist() == pytest.approx([0, 0, 0.71, 5.9])
    s = policy_terms(OffPolicy("gspo"), t(0.001, -0.0005, 0.002, 0.0), t(0, 0, 0, 0), t(1, 1, 1, 1), torch.zeros(4).long())
    assert s.loss.tolist() == pytest.approx([-1.0004] * 4, abs=1e-6) and s.masked.all()
    decoupled = policy_terms(OffPolicy("decoupled"), t(-1.2), t(-2.0), t(1.0), torch.zeros(1).long())
    assert float(decoupled.loss) == pytest.approx(-2.225541, abs=1e-6)
    importance = policy_terms(OffPolicy("none"), t(-1.0, -2.0, -0.5), t(-1.1, -1.9, -0.5), t(2, 2, 2), torch.arange(3))
    assert importance.loss.tolist() == pytest.approx([2 * 1.105171, 4 * 0.904837, 1.0], abs=1e-5)


def test_sequence_means_are_per_answer() -> None:
    assert sequence_means(t(1, 3, 5, 7), torch.tensor([0, 0, 1, 2])).tolist() == [2, 2, 5, 7]
    assert sequence_means(t(), torch.zeros(0, dtype=torch.long)).tolist() == []


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ({"kind": "tiss"}, "kind"), ({"hihg": 2.0}, "hihg"), ({"high": 0.9}, "high"), ({"low": 1.5}, "low"),
        ({"high": "two"}, "high"), ({"min_ess": -1}, "min_ess"), ({"dual_clip": 0.5}, "dual_clip"), ({"low": True}, "low"),
    ],
)  # fmt: skip
def test_impossible_blocks_are_named(block: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        OffPolicy.of(block)


def test_a_block_stands_over_the_recipes_defaults() -> None:
    off = OffPolicy.of({"high": 3}, kind="tis", min_ess=0.1)
    assert (off.kind, off.bounds, off.min_ess, off.max_masked) == ("tis", (None, 3.0), 0.1, 0.5)


# -- advantages of a group -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "beta", "expected"),
    [
        ([0, 0, 1, 2], 1.621566, [-0.905288, -0.905288, -0.450166, 9.882502]),
        ([0, 1, 2, 3], 1.445859, [-0.969633, -0.866698, -0.338701, 8.865418]),
        ([0, 0, 0, 1], 2.553245, [-0.797963, -0.797963, -0.797963, 11.848729]),
        ([0] * 7 + [1], 2.465388, [-0.606034] * 7 + [10.768045]),
        ([0, 0, 1], 2.848229, [-0.890454, -0.890454, 16.257185]),
        ([0, 1, 1], 1048576, [-1, 1, 1]),
        ([1, 1, 1, 0], 1048576, [0.5, 0.5, 0.5, -1]),
        ([2.635983080, 2.635983083, 2.635983084, 2.6359], 1048576, [0.494505, 0.501570, 0.503935, -1]),
        ([0, 2.5414, 2.6, 2.6358], 31.587707, [-1, -0.885019, -0.078435, 7.033000]),
    ],
)
def test_entropic_advantages(rewards: list[float], beta: float, expected: list[float]) -> None:
    assert adv.adaptive_beta(rewards) == pytest.approx(beta, abs=1e-5)
    assert adv.entropic_advantages(rewards) == pytest.approx(expected, abs=1e-6)


def test_entropic_advantages_at_a_fixed_beta() -> None:
    assert adv.entropic_advantages([0, 1, 2, 3], beta=2) == pytest.approx(
        [-0.993554, -0.951708, -0.602265, 18.214797], abs=1e-6
    )
    assert adv.entropic_advantages([0, 0, 1, 2], beta=2) == pytest.approx(
        [-0.952371, -0.952371, -0.608341, 16.445252], abs=1e-6
    )


def test_entropic_edges() -> None:
    assert adv.entropic_advantages([0, 0, 1, 1]) == pytest.approx([-1, -1, 2, 2], abs=1e-9)
    assert adv.entropic_advantages([0.5] * 4) == [0.0] * 4 and adv.entropic_advantages([3.0]) == [0.0]
    assert max(adv.entropic_advantages([0] * 63 + [1])) == pytest.approx(27.785710, abs=1e-6)
    with pytest.raises(ValueError, match="three or more"):
        adv.entropic_advantages([0, 1])
    assert adv.entropic_advantages([0, 1], cap=10) == [-1.0, 9.0]
    assert adv.entropic_advantages([1, 1]) == [0.0, 0.0]


def test_kl_as_an_advantage_adds_up_to_zero() -> None:
    found = adv.kl_advantages(t(-1, -2, -0.5, -1.5), t(-1.2, -1.8, -1, -1.5), 0.1)
    assert found.tolist() == pytest.approx([-0.0075, 0.0325, -0.0375, 0.0125], abs=1e-9)
    part = adv.kl_advantages(t(-1, -2), t(-1.2, -1.8), 0.1, mean=0.125)
    assert part.tolist() == pytest.approx([-0.0075, 0.0325], abs=1e-9)


def test_dr_grpo_does_not_divide() -> None:
    assert adv.dr_grpo_advantages(t(1, 0, 1, 1)).tolist() == [0.25, -0.75, 0.25, 0.25]
    assert adv.dr_grpo_advantages(t(5)).tolist() == [0.0]
    assert adv.grpo_advantages(t(1, 1, 1)).tolist() == [0.0, 0.0, 0.0]
