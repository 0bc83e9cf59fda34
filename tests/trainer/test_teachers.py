"""Teachers and steps on a toy policy: who answers under which weights and contexts, and what a step shows about itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.errors import TrainerError
from reef_cli.core.types import Sample
from reef_cli.trainer import batching, diagnostics
from reef_cli.trainer.batching import Batch
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.learner import Learner
from reef_cli.trainer.process import join_alone
from reef_cli.trainer.stepping import by_sequence, policy_gradient_step
from reef_cli.trainer.teachers import FrozenBase, Itself, MovingAverage, named
from tests.trainer.conftest import TOY, sample, spec, toy_model

__all__ = ["toy_model"]  # the fixture, borrowed


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


def of(*samples: Sample) -> Batch:
    return batching.build(samples, 4)


def step(policy: Policy, batch: Batch, off: OffPolicy | None = None, **more: Any) -> Any:
    advantages = [batch.per_token(micro, [s.reward for s in batch.samples]) for micro in batch.micros]
    return policy_gradient_step(policy, batch, off or OffPolicy(min_ess=0, max_masked=1), advantages, **more)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


def test_the_frozen_base_stays_while_the_policy_moves(policy: Policy) -> None:
    batch = of(sample(0), sample(1))
    before = policy.score(batch.micros[0]).logprob
    assert near(policy.score(batch.micros[0], FrozenBase()).logprob, before)
    step(policy, batch)
    assert near(policy.score(batch.micros[0], FrozenBase()).logprob, before)
    assert not near(policy.score(batch.micros[0]).logprob, before)
    assert near(policy.score(batch.micros[0], Itself()).logprob, policy.score(batch.micros[0]).logprob)


def test_a_moving_average_follows_and_leaves_the_policy_as_it_was(policy: Policy) -> None:
    batch, teacher = of(sample(0), sample(1)), MovingAverage(0.25)
    teacher.reset(policy)
    start = [p.detach().clone() for p in policy.trained]
    step(policy, batch)
    moved = [p.detach().clone() for p in policy.trained]
    teacher.follow(policy)
    expected = [0.75 * a + 0.25 * b for a, b in zip(start, moved, strict=True)]
    assert all(near(a, b) for a, b in zip(teacher.state_dict()["average"], expected, strict=True))
    now = policy.score(batch.micros[0]).logprob
    theirs = policy.score(batch.micros[0], teacher).logprob
    assert not near(theirs, now) and torch.equal(policy.score(batch.micros[0]).logprob, now)
    twin = MovingAverage(0.25)
    twin.reset(policy)
    twin.load_state_dict(teacher.state_dict())
    assert torch.equal(policy.score(batch.micros[0], twin).logprob, theirs)


def test_moving_average_numbers() -> None:
    class Still:
        trained: ClassVar = [torch.tensor(1.0, dtype=torch.float64)]

    teacher, policy = MovingAverage(0.05), Still()
    teacher.reset(policy)  # type: ignore[arg-type]
    policy.trained[0].fill_(2.0)
    values = []
    for _ in range(14):
        teacher.follow(policy)  # type: ignore[arg-type]
        values.append(float(teacher.state_dict()["average"][0]))
    assert values[0] == pytest.approx(1.05, abs=1e-6)
    assert 2 - values[9] == pytest.approx(0.598737, abs=1e-6) and values[13] - 1 == pytest.approx(0.512325, abs=1e-6)


def test_another_context_is_read_before_the_same_answer(policy: Policy) -> None:
    """The teacher's log-probs after other prompts equal those of samples that really have these prompts."""
    mask = (1, 0, 1, 1)
    batch = of(sample(0, length=4, mask=mask), sample(1, length=3), sample(2))
    other = {0: [5, 6, 7, 8, 9, 10, 11], 2: [40]}
    found = policy.score(batching.in_context(batch, batch.micros[0], other)).logprob
    changed = [
        replace(s, tokens=replace(s.tokens, prompt_ids=tuple(other.get(i, s.tokens.prompt_ids))))
        for i, s in enumerate(batch.samples)
    ]
    for position, values in batch.micros[0].split(found).items():
        alone = of(changed[position])
        assert near(values, policy.score(alone.micros[0]).logprob)
    own = policy.score(batch.micros[0]).logprob
    parts, plain = batch.micros[0].split(found), batch.micros[0].split(own)
    assert near(parts[1], plain[1]) and not near(parts[0], plain[0])


def test_the_likeliest_entries_agree_with_scores(policy: Policy) -> None:
    batch = of(sample(0), sample(1))
    ids, values = policy.top(batch.micros[0], 5)
    assert near(policy.score(batch.micros[0], ids=ids).logprobs, values)
    assert (values[:, :-1] >= values[:, 1:]).all()


def test_extras_per_token_stand_beside_the_tokens(policy: Policy) -> None:
    first = replace(sample(0, length=3, mask=(1, 0, 1)), extras={"teacher_logprobs": [-1.0, -2.0, -3.0]})
    batch = of(first, sample(1, length=2))
    parts = batch.micros[0].split(batch.token_extras(batch.micros[0], "teacher_logprobs", 7.0))
    assert parts[0].tolist() == [-1, -3] and parts[1].tolist() == [7, 7]


def test_full_weights_have_no_frozen_base(toy_model: Path) -> None:
    program = spec(critic_only_steps=0)
    whole = Learner(toy_model, program.path, program.settings, replace(TOY, precision="fp32", method="full"))
    assert whole.policy is not None
    with pytest.raises(TrainerError, match="frozen base"):
        whole.policy.score(of(sample(0)).micros[0], FrozenBase())


def test_another_model_teaches_when_it_shares_the_vocabulary(policy: Policy, toy_model: Path, tmp_path: Path) -> None:
    batch = of(sample(0), sample(1))
    before = policy.score(batch.micros[0]).logprob
    teacher = named(str(toy_model))
    assert near(policy.score(batch.micros[0], teacher).logprob, before)
    ids, values = policy.top(batch.micros[0], 4, teacher)
    assert near(policy.score(batch.micros[0], teacher, ids).logprobs, values)
    with pytest.raises(TrainerError, match="no model folder"):
        policy.score(batch.micros[0], named(str(tmp_path)))


def test_a_step_tells_what_section_nine_asks_for(policy: Policy) -> None:
    batch = batching.build([sample(0, step=3), sample(1, step=3), sample(2, step=1)], 2, base_step=3)
    metrics = step(policy, batch).metrics
    assert metrics["lag_histogram"] == {"0": 2, "2": 1} and metrics["lag_max"] == 2
    assert {"masked_share", "ess_share", "k3", "entropy", "logprob_gap_lag0", "grad_norm", "policy_loss"} <= set(metrics)
    assert diagnostics.veto(metrics, OffPolicy(max_masked=0)) in (None, "masked_share_too_high")


def test_weights_leave_answers_out_and_sequence_means_level_lengths(policy: Policy) -> None:
    short, long = sample(0, 1.0, length=2), sample(1, 1.0, length=8)
    batch = of(short, long)
    shares = by_sequence(batch)
    assert shares == [10 / (2 * 2), 10 / (2 * 8)]
    assert sum(w * n for w, n in zip(shares, (2, 8), strict=True)) == pytest.approx(batch.tokens)
    lone = step(policy, of(short)).metrics["policy_loss"]
    policy.start()
    assert lone is not None


def test_a_sum_instead_of_a_mean(lab: Learner, policy: Policy) -> None:
    batch = of(sample(0), sample(1))
    mean = step(policy, batch).metrics["policy_loss"]
    lab._afresh(None)
    assert lab.policy is not None
    total = step(lab.policy, batch, divisor=1.0).metrics["policy_loss"]
    assert total == pytest.approx(mean * batch.tokens, rel=1e-5)
