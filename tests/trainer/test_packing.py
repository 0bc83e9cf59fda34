"""Samples packed behind each other: the same step as padded ones, nothing seen of a neighbour, every token counted once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.errors import TrainerError
from reef_cli.trainer import model
from reef_cli.trainer.batching import build
from reef_cli.trainer.learner import Learner
from reef_cli.trainer.process import join_alone
from tests.trainer.conftest import TOY, batch, sample, spec
from tests.trainer.test_batching import make, traces

PADDED = replace(TOY, precision="fp32", micro_batch=3)
PACKED = replace(PADDED, pack_tokens=24)


@pytest.fixture(scope="module", autouse=True)
def group() -> None:
    join_alone(threads=1)


def learner(folder: Path, how: TrainerSettings, **changes: Any) -> Learner:
    program = spec(**changes)
    return Learner(folder, program.path, program.settings, how)


@settings(deadline=None)
@given(st.lists(traces, min_size=1, max_size=9), st.integers(1, 20), st.integers(1, 3))
def test_every_action_token_once_over_all_ranks(rows: list[tuple[int, list[int]]], limit: int, world: int) -> None:
    samples = make(rows)
    batches = [build(samples, 4, rank=r, world_size=world, pack_tokens=limit) for r in range(world)]
    assert len({len(one.micros) for one in batches}) == 1
    seen: list[tuple[int, int]] = []
    for micro in (micro for one in batches for micro in one.micros):
        assert micro.input_ids.shape[0] == 1 and int(micro.attention_mask.sum()) == micro.input_ids.numel()
        assert micro.input_ids.numel() <= limit or len(micro.rows) <= 1
        for k in range(len(micro)):
            position, offset, column = micro.rows[int(micro.row[k])], int(micro.offset[k]), int(micro.column[k])
            seen.append((position, offset))
            trace = samples[position].tokens
            assert int(micro.targets[k]) == trace.output_ids[offset] == int(micro.input_ids[0, column + 1])
            assert float(micro.rollout_logprobs[k]) == trace.logprobs[offset]
            assert micro.positions is not None and int(micro.positions[0, column]) == len(trace.prompt_ids) + offset - 1
    expected = [(i, k) for i, (prompt, mask) in enumerate(rows) for k, action in enumerate(mask) if action and (prompt or k)]
    assert sorted(seen) == expected and batches[0].tokens == len(expected)


def test_a_packed_step_is_the_padded_step(toy_model: Path) -> None:
    """Loss, gradient, every diagnostic and the weights afterwards, within fp32 rounding; log-probs before it."""
    samples = [sample(i, reward=float(i % 2), length=3 + 2 * i, mask=(1, 0, 1, *(1,) * (2 * i))) for i in range(7)]
    padded, packed = (learner(toy_model, how, use_critic=False) for how in (PADDED, PACKED))
    for one, two in zip(padded.score(None, samples), packed.score(None, samples), strict=True):
        assert one == pytest.approx(two, abs=1e-5)
    a, b = padded.step(samples).metrics, packed.step(samples).metrics
    assert a["trained_tokens"] == b["trained_tokens"] == sum(sum(one.tokens.loss_mask) for one in samples)
    for name in ("policy_loss", "grad_norm", "entropy", "k3", "logprob_gap"):
        assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-7), name
    for (_, (mine, _)), (_, (theirs, _)) in zip(
        model.lora_parameters(padded.actor), model.lora_parameters(packed.actor), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_a_sample_does_not_notice_its_neighbours(toy_model: Path) -> None:
    """Bit for bit: only the first of two packed samples changes."""
    lab = learner(toy_model, replace(PACKED, pack_tokens=1000))
    long, other, short = sample(5, length=9), sample(11, length=9), sample(1, length=4)
    assert len(long.tokens.prompt_ids) == len(other.tokens.prompt_ids)
    assert lab.score(None, [long, short])[1] == lab.score(None, [other, short])[1]


def test_a_model_that_lets_samples_see_each_other_is_refused(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = model.Actor._body

    def leaking(self: Any, ids: Any, mask: Any, positions: Any) -> Any:
        return honest(self, ids, torch.ones_like(ids), None)

    monkeypatch.setattr(model.Actor, "_body", leaking)
    with pytest.raises(TrainerError, match="cannot be packed for a LlamaForCausalLM") as caught:
        learner(toy_model, PACKED)
    assert "trainer.pack_tokens" in caught.value.hint


@pytest.mark.parametrize("method", ["lora", "full"])
def test_checkpointed_activations_change_no_step(toy_model: Path, method: str) -> None:
    plain = learner(toy_model, replace(PADDED, method=method))
    saving = learner(toy_model, replace(PADDED, method=method, gradient_checkpointing=True))
    on = [any(getattr(part, "gradient_checkpointing", False) for part in lab.actor.modules()) for lab in (plain, saving)]
    assert on == [False, True]
    a, b = (lab.step(batch(5)).metrics for lab in (plain, saving))
    assert a["policy_loss"] == pytest.approx(b["policy_loss"], rel=1e-5)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
