"""States, swaps and files of one rank, in-process on the toy model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.errors import TrainerError, UnsupportedArtifact
from reef_cli.trainer import checkpoint
from reef_cli.trainer.learner import Learner
from reef_cli.trainer.process import join_alone
from reef_cli.trainer.program import StepRefused
from tests.trainer.conftest import TOY, batch, sample, spec


@pytest.fixture(scope="module", autouse=True)
def group() -> None:
    join_alone(threads=1)


def learner(model: Path, settings: TrainerSettings = TOY, seed: int = 0, **changes: object) -> Learner:
    program = spec(**changes)
    return Learner(model, program.path, program.settings, settings, seed)


def train(lab: Learner, out: Path, base: Path | None = None, resume: Path | None = None, scenario: str = "s") -> dict:
    return lab.train(scenario, 0, base, resume, batch(), out)


def weights(result: dict) -> dict[str, torch.Tensor]:
    return load_file(str(Path(result["directory"]) / "adapter_model.safetensors"))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_step_writes_an_adapter_peft_loads_with_equal_logits(toy_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lab = learner(toy_model)
    result = train(lab, tmp_path)
    assert result["kind"] == "lora" and result["metrics"]["policy_updated"] is True
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.bfloat16), result["directory"], autocast_adapter_dtype=False
    )
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, lab.actor.model(ids).logits)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights(result).values())
    assert not list(tmp_path.glob(".*"))


def test_the_step_moves_probability_towards_rewarded_answers(toy_model: Path, tmp_path: Path) -> None:
    lab = learner(toy_model, use_critic=False)
    good = [sample(i, reward=1.0) for i in range(4)]
    before = sum(map(sum, lab.score(None, good)))
    result = lab.train("s", 0, None, None, good, tmp_path)
    assert sum(map(sum, lab.score(Path(result["directory"]), good))) > before


def test_drift_is_zero_from_itself_grows_with_steps_and_changes_nothing(toy_model: Path, tmp_path: Path) -> None:
    lab = learner(toy_model, use_critic=False)
    good = [sample(i, reward=1.0) for i in range(4)]
    first = lab.train("s", 0, None, None, good, tmp_path / "1", "")
    assert first["metrics"]["kl_to_gated"] > 0
    own = Path(first["directory"])
    assert lab.drift(own, good) == pytest.approx(0, abs=1e-9)
    assert lab.drift(None, good) == pytest.approx(first["metrics"]["kl_to_gated"], rel=1e-6)
    state = Path(first["checkpoint"])
    second = lab.train("s", 1, own, state, good, tmp_path / "2", str(own))
    plain = lab.train("s", 1, own, state, good, tmp_path / "3")
    assert same(weights(second), weights(plain)) and "kl_to_gated" not in plain["metrics"]
    third = lab.train("s", 2, None, Path(second["checkpoint"]), good, tmp_path / "4", "")
    assert third["metrics"]["kl_to_gated"] > first["metrics"]["kl_to_gated"]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_resuming_from_disk_equals_going_on_in_memory(toy_model: Path, tmp_path: Path, stage: int, precision: str) -> None:
    settings = replace(TOY, zero_stage=stage, precision=precision)
    lab = learner(toy_model, settings)
    first = train(lab, tmp_path / "1")
    resume = Path(first["checkpoint"])
    going_on = train(lab, tmp_path / "2", resume=resume)
    assert going_on["metrics"]["state"] == "resumed"
    other = train(learner(toy_model, settings, seed=5), tmp_path / "3", resume=resume)
    assert same(weights(going_on), weights(other))
    assert not same(weights(first), weights(other))
    critics = [checkpoint.read_program(Path(r["checkpoint"])) for r in (going_on, other)]
    assert same(critics[0]["critic"], critics[1]["critic"]) and critics[0]["steps"] == critics[1]["steps"] == 2


def test_scenarios_swapped_in_one_process_do_not_touch_each_other(toy_model: Path, tmp_path: Path) -> None:
    alone = learner(toy_model)
    a1 = train(alone, tmp_path / "a1")
    a2 = train(alone, tmp_path / "a2", resume=Path(a1["checkpoint"]))
    lab = learner(toy_model)
    x1 = train(lab, tmp_path / "x1", scenario="x")
    y1 = lab.train("y", 0, None, None, [sample(i, 0.0) for i in range(3)], tmp_path / "y1")
    x2 = train(lab, tmp_path / "x2", resume=Path(x1["checkpoint"]), scenario="x")
    y2 = lab.train("y", 0, None, Path(y1["checkpoint"]), [sample(i, 0.5) for i in range(3)], tmp_path / "y2")
    assert same(weights(x1), weights(a1)) and same(weights(x2), weights(a2))
    assert y2["metrics"]["state"] == "resumed"


def test_a_moved_checkpoint_is_recognised_as_what_is_in_memory(toy_model: Path, tmp_path: Path) -> None:
    lab = learner(toy_model)
    first = train(lab, tmp_path / "1")
    moved = Path(first["checkpoint"]).rename(tmp_path / "elsewhere")
    # Only the state's id is needed: memory holds the rest.
    for file in moved.rglob("*.pt"):
        file.unlink()
    assert train(lab, tmp_path / "2", resume=moved)["metrics"]["state"] == "resumed"


def test_a_fresh_start_continues_from_the_base_artifact(toy_model: Path, tmp_path: Path) -> None:
    lab = learner(toy_model)
    first = train(lab, tmp_path / "1")
    warm = learner(toy_model, critic_only_steps=1)
    result = train(warm, tmp_path / "2", base=Path(first["directory"]))
    assert result["metrics"]["policy_updated"] is False
    assert result["metrics"]["state"].startswith("fresh")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (Path(result["directory"]) / file).read_bytes() == (Path(first["directory"]) / file).read_bytes()


def test_an_adapter_of_another_rank_is_refused_with_a_hint(toy_model: Path, tmp_path: Path) -> None:
    first = train(learner(toy_model), tmp_path / "1")
    with pytest.raises(UnsupportedArtifact) as caught:
        train(learner(toy_model, replace(TOY, rank=2)), tmp_path / "2", base=Path(first["directory"]))
    assert "trainer.rank" in caught.value.hint


def test_a_checkpoint_of_another_shape_starts_afresh_from_the_artifact_and_says_so(toy_model: Path, tmp_path: Path) -> None:
    first = train(learner(toy_model), tmp_path / "1")
    lab = learner(toy_model, replace(TOY, zero_stage=0))
    result = train(lab, tmp_path / "2", base=Path(first["directory"]), resume=Path(first["checkpoint"]))
    assert result["metrics"]["state"] == "fresh: zero_stage was 1, is 0"


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_step_called_off_changes_no_weights_and_leaves_no_gradient(
    toy_model: Path, tmp_path: Path, stage: int, resumed: bool
) -> None:
    settings = replace(TOY, zero_stage=stage)
    reference = learner(toy_model, settings)
    resume = Path(train(reference, tmp_path / "0")["checkpoint"]) if resumed else None
    expected = train(reference, tmp_path / "1", resume=resume)
    lab = learner(toy_model, settings)
    lab.program.settings = replace(lab.program.settings, min_ess=1.1)
    off = train(lab, tmp_path / "2", resume=resume)
    assert off["metrics"]["skipped"] == "ess_too_low" and off["metrics"]["policy_updated"] is False
    lab.program.settings = replace(lab.program.settings, min_ess=0.0)
    # The critic learned from the batch that was called off; without it in the way the policy's step must be the reference's.
    lab.program.load_state_dict(checkpoint.read_program(resume) if resume else reference_program(toy_model, settings))
    assert same(weights(train_on(lab, tmp_path / "3", off)), weights(expected))


def reference_program(model: Path, settings: TrainerSettings) -> dict:
    return learner(model, settings).program.state_dict()


def train_on(lab: Learner, out: Path, result: dict) -> dict:
    return train(lab, out, resume=Path(result["checkpoint"]))


@pytest.mark.parametrize(
    ("reward", "logprob", "what"), [(float("nan"), -4.5, "critic loss is nan"), (1.0, float("nan"), "log-probs are not finite")]
)
def test_a_non_finite_batch_is_refused_and_the_old_checkpoint_goes_on(
    toy_model: Path, tmp_path: Path, reward: float, logprob: float, what: str
) -> None:
    lab = learner(toy_model)
    first = train(lab, tmp_path / "1")
    resume = Path(first["checkpoint"])
    bad = sample(0, reward)
    bad = replace(bad, tokens=replace(bad.tokens, logprobs=(logprob,) * len(bad.tokens.output_ids)))
    with pytest.raises(StepRefused, match=what):
        lab.train("s", 0, None, resume, [bad], tmp_path / "2")
    assert not (tmp_path / "2").exists()
    after = train(lab, tmp_path / "3", resume=resume)
    expected = train(learner(toy_model), tmp_path / "4", resume=resume)
    assert same(weights(after), weights(expected))
    critics = [checkpoint.read_program(Path(r["checkpoint"])) for r in (after, expected)]
    assert same(critics[0]["critic"], critics[1]["critic"]) and critics[0]["steps"] == critics[1]["steps"]


def test_the_cut_into_micro_batches_does_not_change_the_step(toy_model: Path, tmp_path: Path) -> None:
    grads = [
        train(learner(toy_model, replace(TOY, micro_batch=n, precision="fp32")), tmp_path / str(n))["metrics"]["grad_norm"]
        for n in (1, 2, 4)
    ]
    assert grads[1:] == pytest.approx(grads[:1] * 2, rel=1e-4)


def test_full_training_writes_a_model_folder_transformers_loads(toy_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    settings = replace(TOY, method="full")
    lab = learner(toy_model, settings, policy_lr=1e-3)
    result = train(lab, tmp_path / "1")
    assert result["kind"] == "checkpoint"
    loaded = AutoModelForCausalLM.from_pretrained(result["directory"], dtype=torch.bfloat16)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, lab.actor.model(ids).logits)
    assert "lm_head.weight" not in load_file(str(Path(result["directory"]) / "model.safetensors"))
    again = train(learner(toy_model, settings, policy_lr=1e-3), tmp_path / "2", resume=Path(result["checkpoint"]))
    assert again["metrics"]["state"] == "resumed"
    fresh = train(learner(toy_model, settings, policy_lr=1e-3), tmp_path / "3", base=Path(result["directory"]))
    assert fresh["metrics"]["policy_updated"] is True


def test_a_damaged_checkpoint_is_an_error_that_names_it(toy_model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    with pytest.raises(TrainerError, match="is no trainer checkpoint"):
        train(learner(toy_model), tmp_path / "1", resume=tmp_path / "broken")


def test_metrics_are_json_and_complete(toy_model: Path, tmp_path: Path) -> None:
    metrics = train(learner(toy_model), tmp_path)["metrics"]
    wanted = {
        "reward_mean", "masked_share", "ess_share", "k3", "logprob_gap_lag0", "lag_mean", "lag_max", "entropy", "grad_norm",
        "critic_mse", "explained_variance", "trained_tokens", "critic_seconds", "policy_seconds", "export_seconds", "seconds",
    }  # fmt: skip
    assert wanted <= metrics.keys()
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_trainer_that_rests_between_steps_makes_the_same_steps(toy_model: Path, tmp_path: Path, method: str) -> None:
    """As on a GPU whose memory the engine takes back: nothing is held before, between or after."""
    settings = replace(TOY, method=method)
    awake, resting = learner(toy_model, settings), learner(toy_model, replace(settings, transport="ipc"))
    assert awake.policy is not None and resting.policy is None
    found = []
    for number, lab in enumerate((awake, resting)):
        first = lab.train("s", 0, None, None, batch(), tmp_path / f"{number}-1")
        if lab is resting:
            lab.rest()
            assert lab.policy is None
        second = lab.train("s", 1, Path(first["directory"]), Path(first["checkpoint"]), batch(), tmp_path / f"{number}-2")
        assert second["metrics"]["state"] == "resumed"
        found.append(load_file(str(next(Path(second["directory"]).glob("*.safetensors")))))
    assert same(*found)
