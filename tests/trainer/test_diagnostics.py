"""What a step says about its batch: worked numbers through a real policy, and guards that call the update off and say so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.types import Sample
from reef_cli.trainer import batching
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.learner import Learner
from reef_cli.trainer.process import join_alone
from reef_cli.trainer.stepping import policy_gradient_step
from tests.trainer.conftest import TOY, sample, spec, toy_model

__all__ = ["toy_model"]  # the fixture, borrowed
CALM = (0.05, -0.3, 0.8, -0.02)
HEAVY = (0.1, 0.1, 2.5, -0.1)


@pytest.fixture(scope="module", autouse=True)
def group() -> None:
    join_alone(threads=1)


@pytest.fixture(scope="module")
def lab(toy_model: Path) -> Learner:
    program = spec()
    return Learner(toy_model, program.path, program.settings, replace(TOY, precision="fp32"))


@pytest.fixture
def policy(lab: Learner) -> Policy:
    lab._afresh(None)
    assert lab.policy is not None
    return lab.policy


def sampled_elsewhere(lab: Learner, log_ratios: tuple[float, ...]) -> Sample:
    """An answer whose tokens have these log-ratios: what another policy would have recorded."""
    answer = sample(0, length=len(log_ratios))
    (now,) = lab.score(None, [answer])
    logprobs = tuple(mine - ratio for mine, ratio in zip(now, log_ratios, strict=True))
    return replace(answer, tokens=replace(answer.tokens, logprobs=logprobs))


def step(policy: Policy, answer: Sample, off: OffPolicy) -> dict[str, Any]:
    batch = batching.build([answer], 4)
    advantages = [batch.per_token(micro, [1.0]) for micro in batch.micros]
    return dict(policy_gradient_step(policy, batch, off, advantages).metrics)


def test_the_worked_numbers_come_out_of_a_real_step(lab: Learner) -> None:
    answer = sampled_elsewhere(lab, CALM)
    assert lab.policy is not None
    metrics = step(lab.policy, answer, OffPolicy("icepop", 0.5, 2.0))
    assert metrics["ess_share"] == pytest.approx(0.825150, abs=1e-4)
    assert (metrics["k1"], metrics["k2"], metrics["k3"]) == pytest.approx((-0.1325, 0.091613, 0.116957), abs=1e-4)
    assert metrics["masked_share"] == 0.25 and metrics["published"] is True and "skipped" not in metrics
    assert metrics["logprob_gap_lag0"] == metrics["logprob_gap"] == pytest.approx(1.17 / 4, abs=1e-4)


@pytest.mark.parametrize(
    ("log_ratios", "off", "reason"),
    [
        (HEAVY, OffPolicy("tis", min_ess=0.5), "ess_too_low"),
        (HEAVY, OffPolicy("none", min_ess=0.386), "ess_too_low"),
        (HEAVY, OffPolicy("none", min_ess=0.385), None),
        (CALM, OffPolicy("dis", 0.97, 1.06, max_masked=0.49), "masked_share_too_high"),
        (CALM, OffPolicy("dis", 0.97, 1.06, max_masked=0.5), None),
        (CALM, OffPolicy("icepop", 0.8, 1.02, max_masked=0.7), "masked_share_too_high"),
        (CALM, OffPolicy("ppo", 0.99, 1.01, max_masked=0.4), "masked_share_too_high"),
        (CALM, OffPolicy("gspo", 0.99, 1.01), "masked_share_too_high"),
        (CALM, OffPolicy("cispo", max_masked=0.0), None),
        (CALM, OffPolicy("decoupled", max_masked=0.0), None),
    ],
)  # fmt: skip
def test_a_guard_calls_the_update_off_and_says_so(
    lab: Learner, log_ratios: tuple[float, ...], off: OffPolicy, reason: str | None
) -> None:
    """The heavy tail has an effective sample size of 1.542899 of 4 tokens."""
    answer = sampled_elsewhere(lab, log_ratios)
    policy = lab.policy
    assert policy is not None
    before = [weight.detach().clone() for weight in policy.trained]
    metrics = step(policy, answer, off)
    assert metrics.get("skipped") == reason and metrics["published"] is (reason is None)
    same = all(torch.equal(old, new) for old, new in zip(before, policy.trained, strict=True))
    assert same is (reason is not None), "a step that was called off changes nothing"
