"""SAO's tensor half on a toy policy: its loss against an oracle, the critic's part, warm-up, guards, and state."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.sao.program import Critic, SAOProgram
from reef_cli.core.types import Sample
from reef_cli.trainer import batching
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.learner import Learner
from reef_cli.trainer.losses.advantages import adaptive_lambda
from reef_cli.trainer.process import join_alone
from tests.trainer.conftest import TOY, batch, sample, spec, toy_model

__all__ = ["toy_model"]  # the fixture, borrowed


@pytest.fixture(scope="module", autouse=True)
def group() -> None:
    join_alone(threads=1)


def learner(model: Path, **changes: Any) -> Learner:
    program = spec(**changes)
    return Learner(model, program.path, program.settings, replace(TOY, precision="fp32"))


def policy_of(lab: Learner) -> Policy:
    assert lab.policy is not None
    return lab.policy


def fresh_logprobs(lab: Learner, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the policy's own log-probs, as an engine in perfect agreement would report them."""
    scores = lab.score(None, samples)
    found = []
    for item, row in zip(samples, scores, strict=True):
        values = iter(row)
        logprobs = tuple(next(values) if m else 0.0 for m in item.tokens.loss_mask)
        found.append(replace(item, tokens=replace(item.tokens, logprobs=logprobs)))
    return found


def drifted(count: int = 4) -> list[Sample]:
    """Samples whose engine log-probs are far from the policy's, both ways."""
    return [
        replace(
            item, tokens=replace(item.tokens, logprobs=tuple(-4.5 + 3 * (-1) ** k for k in range(len(item.tokens.logprobs))))
        )
        for item in batch(count)
    ]


def test_the_loss_of_a_whole_step_equals_the_oracle(toy_model: Path) -> None:
    """No critic: A is the reward discounted by GAE's lambda from zero values; ratios come from shifted log-probs."""
    lab = learner(toy_model, use_critic=False, eps_low=0.3, eps_high=5.0)
    mask = (1, 0, 1, 1)
    samples = fresh_logprobs(lab, [sample(0, 1.0, length=4, mask=mask), sample(1, 0.5, length=3), sample(2, 0.0, length=5)])
    shift = (0.0, 0.5, -1.0, 2.5, 0.2)
    stale = []
    for item in samples:
        logprobs = tuple(min(0.0, lp - s) for lp, s in zip(item.tokens.logprobs, shift, strict=False))
        stale.append(replace(item, tokens=replace(item.tokens, logprobs=logprobs)))
    metrics = lab.step(stale).metrics
    total, n, masked = 0.0, 0, 0
    for old, now in zip(stale, samples, strict=True):
        actions = [i for i, m in enumerate(old.tokens.loss_mask) if m]
        lam = adaptive_lambda(len(old.tokens.output_ids), 1.5)
        for k, i in enumerate(actions):
            r = math.exp(now.tokens.logprobs[i] - old.tokens.logprobs[i])
            f = r if 0.7 < r < 6.0 else 0.0
            advantage = old.reward * lam ** (len(actions) - 1 - k)
            total -= f * advantage * now.tokens.logprobs[i]
            n, masked = n + 1, masked + (f == 0)
    assert metrics["policy_loss"] == pytest.approx(total / n, rel=1e-4)
    assert metrics["masked_share"] == pytest.approx(masked / n) and masked > 0
    assert metrics["trained_tokens"] == n == 11


def test_at_lag_zero_the_ratio_is_one(toy_model: Path) -> None:
    lab = learner(toy_model)
    metrics = lab.step(fresh_logprobs(lab, batch())).metrics
    assert metrics["logprob_gap_lag0"] < 1e-5 and metrics["masked_share"] == 0
    assert metrics["ess_share"] == pytest.approx(1, abs=1e-6) and abs(metrics["k3"]) < 1e-9


def test_an_injected_lag_masks_more_and_stays_finite(toy_model: Path) -> None:
    lab = learner(toy_model, max_masked=1.0)
    shares = []
    for drift in (0.0, 0.5, 3.0):
        generator = torch.Generator().manual_seed(0)
        samples = []
        for item in fresh_logprobs(lab, batch(8)):
            noise = torch.randn(len(item.tokens.logprobs), generator=generator).tolist()
            logprobs = tuple(min(0.0, lp + drift * e) for lp, e in zip(item.tokens.logprobs, noise, strict=True))
            samples.append(replace(item, tokens=replace(item.tokens, logprobs=logprobs)))
        metrics = lab.step(samples).metrics
        assert math.isfinite(metrics["policy_loss"]) and math.isfinite(metrics["grad_norm"])
        shares.append(metrics["masked_share"])
    assert shares[0] < shares[1] < shares[2]


def test_the_mask_can_be_switched_off(toy_model: Path) -> None:
    lab = learner(toy_model, use_mask=False)
    assert lab.step(drifted()).metrics["masked_share"] == 0
    assert learner(toy_model).step(drifted()).metrics["masked_share"] > 0


@pytest.mark.parametrize(
    ("setting", "reason"), [({"max_masked": 0.0}, "masked_share_too_high"), ({"min_ess": 1.01}, "ess_too_low")]
)
def test_guards_call_the_policy_step_off(toy_model: Path, setting: dict[str, float], reason: str) -> None:
    lab = learner(toy_model, **setting)
    report = lab.step(drifted())
    assert report.policy_updated is False and report.metrics["skipped"] == reason and report.metrics["published"] is False


def test_warm_up_trains_only_the_critic(toy_model: Path) -> None:
    lab = learner(toy_model, critic_only_steps=2)
    reports = [lab.step(batch()) for _ in range(3)]
    assert [report.policy_updated for report in reports] == [False, False, True]
    assert reports[0].metrics["skipped"] == "critic_warm_up" and "grad_norm" not in reports[0].metrics
    assert reports[1].metrics["critic_mse"] < reports[0].metrics["critic_mse"]


def test_a_fresh_critic_says_zero_and_learns_the_return(toy_model: Path) -> None:
    critic = Critic(8, 4, seed=0)
    assert critic(torch.randn(5, 8)).abs().max() == 0
    lab = learner(toy_model, critic_only_steps=1000, critic_steps=4, level_decay=1.0)
    samples = [sample(i, 0.7) for i in range(4)]
    for _ in range(30):
        metrics = lab.step(samples).metrics
    assert metrics["value_mean"] == pytest.approx(0.7, abs=0.1)


def test_values_used_for_advantages_come_from_the_last_critic_pass(toy_model: Path) -> None:
    """With one critic step the values are those before it: for a fresh critic the mean reward, or zero without a level."""
    mean = sum(item.reward for item in batch()) / len(batch())
    assert learner(toy_model, critic_steps=1).step(batch()).metrics["value_mean"] == pytest.approx(mean)
    cold = learner(toy_model, critic_steps=1, level_decay=1.0)
    assert cold.step(batch()).metrics["value_mean"] == 0
    assert learner(toy_model, critic_steps=2, level_decay=1.0).step(batch()).metrics["value_mean"] != 0


def test_the_level_follows_the_rewards_and_lives_with_the_critic(toy_model: Path) -> None:
    critic = Critic(8, 4, seed=0)
    hidden = torch.randn(5, 8)
    critic.follow(0.2, 0.5)
    assert torch.allclose(critic(hidden), torch.tensor(0.2))
    critic.follow(1.0, 0.5)
    assert torch.allclose(critic(hidden), torch.tensor(0.6))
    twin = Critic(8, 4, seed=1)
    twin.load_state_dict(critic.state_dict())
    twin.follow(0.6, 0.5)
    assert torch.allclose(twin(hidden), critic(hidden))


def test_explained_variance_of_one_sample_is_undefined(toy_model: Path) -> None:
    assert learner(toy_model).step([sample(1, 1.0)]).metrics["explained_variance"] is None


def test_lag_is_counted_from_the_base_step(toy_model: Path) -> None:
    lab = learner(toy_model)
    metrics = lab.step([sample(0, step=2), sample(1, step=5)], base_step=6).metrics
    assert metrics["lag_mean"] == 2.5 and metrics["lag_max"] == 4 and metrics["logprob_gap_lag0"] is None


def test_the_critic_sees_the_frozen_base_whatever_the_adapter(toy_model: Path) -> None:
    lab = learner(toy_model, use_critic=False)
    policy = policy_of(lab)
    micro = batching.build(batch(), 4).micros[0]
    before = policy.features(micro)
    lab.step(batch())
    assert torch.equal(policy.features(micro), before)
    assert not policy.features(micro).requires_grad


def test_state_survives_a_trip(toy_model: Path) -> None:
    lab = learner(toy_model)
    lab.step(batch())
    program = lab.program
    assert isinstance(program, SAOProgram)
    twin = SAOProgram(spec().settings)
    twin.reset(policy_of(lab))
    twin.load_state_dict(program.state_dict())
    hidden = torch.randn(3, policy_of(lab).hidden_size)
    assert torch.equal(twin.critic(hidden), program.critic(hidden)) and twin.steps == program.steps == 1
    moments = [p.critic_optimizer.state_dict()["state"][0]["exp_avg"] for p in (twin, program)]
    assert torch.equal(*moments)


def test_the_better_of_two_answers_becomes_likelier(toy_model: Path) -> None:
    """One prompt, two answers, the better one rewarded: its probability must rise."""
    lab = learner(toy_model, policy_lr=5e-3)
    good, bad = sample(1, 1.0, length=4), sample(1, 0.0, length=4)
    bad = replace(bad, tokens=replace(bad.tokens, output_ids=tuple((t + 1) % 96 for t in good.tokens.output_ids)))

    def gap() -> float:
        policy = policy_of(lab)
        with torch.no_grad():
            micro = batching.build([good, bad], 2).micros[0]
            sums = {i: float(part.sum()) for i, part in micro.split(policy.forward(micro).logprob).items()}
        return sums[0] - sums[1]

    start = gap()
    for _ in range(10):
        pair = [good, bad]
        policy = policy_of(lab)
        with torch.no_grad():
            micro = batching.build(pair, 2).micros[0]
            now = micro.split(policy.forward(micro).logprob)
        on_policy = [replace(item, tokens=replace(item.tokens, logprobs=tuple(now[i].tolist()))) for i, item in enumerate(pair)]
        lab.step(on_policy)
    assert gap() > start + 1
