"""LoRA files against PEFT itself: reading, writing, merging, naming, refusing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.weights.lora import CONFIG_FILE, TENSOR_FILE, Lora, LoraConfig, hf_name, merge, read_lora, write_lora


@pytest.fixture
def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    ).eval()


def _peft(model, **changes):
    import peft

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | changes
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))


@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"mlp.down_proj": 3}}]
)
def test_merging_a_read_adapter_equals_pefts_own_merge(tiny, tmp_path: Path, changes) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    wrapped = _peft(tiny, **changes)
    wrapped.save_pretrained(tmp_path)
    lora = read_lora(tmp_path)
    theirs = wrapped.merge_and_unload().state_dict()
    assert set(lora.tensors) == {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"}
    for module, (a, b) in lora.tensors.items():
        ours = merge(before[f"{module}.weight"], a, b, lora.config.scaling(module))
        torch.testing.assert_close(ours, theirs[f"{module}.weight"])


def test_every_checkpoint_name_survives_pefts_wrapping(tiny) -> None:
    names = set(tiny.state_dict())
    wrapped = _peft(tiny, modules_to_save=["lm_head"])
    mapped = [hf_name(name) for name in wrapped.state_dict()]
    found = [name for name in mapped if name is not None]
    assert set(found) == names and len(found) == len(names)


def test_what_is_written_is_read_back_by_us_and_by_peft(tiny, tmp_path: Path) -> None:
    import peft

    config = LoraConfig(r=2, alpha=6.0, target_modules=("q_proj",), base="tiny")
    pair = (torch.randn(2, 32), torch.randn(32, 2))
    write_lora(tmp_path, Lora(config, {"model.layers.0.self_attn.q_proj": pair}))
    back = read_lora(tmp_path)
    assert back.config == config and back.rank == 2
    assert torch.equal(back.tensors["model.layers.0.self_attn.q_proj"][1], pair[1])
    ids = torch.tensor([[1, 2, 3]])
    weight = tiny.model.layers[0].self_attn.q_proj.weight
    pristine = weight.detach().clone()
    with torch.no_grad():
        wrapped = peft.PeftModel.from_pretrained(tiny, str(tmp_path))
        theirs = wrapped(ids).logits
        plain = wrapped.unload()
        plain.model.layers[0].self_attn.q_proj.weight.copy_(merge(pristine, *pair, 3.0))
        torch.testing.assert_close(plain(ids).logits, theirs, atol=1e-4, rtol=1e-4)


def test_merge_keeps_type_and_input() -> None:
    weight = torch.randn(4, 4).bfloat16()
    kept = weight.clone()
    merged = merge(weight, torch.randn(2, 4), torch.randn(4, 2), 2.0)
    assert merged.dtype == torch.bfloat16 and torch.equal(weight, kept) and not torch.equal(merged, kept)


def _folder(path: Path, config=None, tensors=None) -> Path:
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (path / CONFIG_FILE).write_text(json.dumps(plain | (config or {})))
    a, b = "base_model.model.x.q_proj.lora_A.weight", "base_model.model.x.q_proj.lora_B.weight"
    save_file({a: torch.ones(2, 3), b: torch.ones(3, 2)} if tensors is None else tensors, str(path / TENSOR_FILE))
    return path


@pytest.mark.parametrize(
    "config",
    [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"peft_type": "IA3"}, {"r": "many"}, {"r": None}],
)
def test_adapters_that_could_not_be_reproduced_are_refused(tmp_path: Path, config) -> None:
    with pytest.raises(UnsupportedArtifact):
        read_lora(_folder(tmp_path, config))


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"base_model.model.x.q_proj.lora_A.weight": torch.ones(2, 3)},
        {"base_model.model.x.q_proj.weight": torch.ones(2, 3)},
        {"x.lora_A.weight": torch.ones(3, 3), "x.lora_B.weight": torch.ones(3, 3)},
        {"x.lora_A.weight": torch.ones(2), "x.lora_B.weight": torch.ones(3, 2)},
    ],
)
def test_malformed_tensors_are_refused(tmp_path: Path, tensors) -> None:
    with pytest.raises(UnsupportedArtifact):
        read_lora(_folder(tmp_path, tensors=tensors))


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArtifact, match="cannot be read"):
        read_lora(tmp_path)
    (_folder(tmp_path) / TENSOR_FILE).write_bytes(b"not tensors")
    with pytest.raises(UnsupportedArtifact, match="no readable safetensors"):
        read_lora(tmp_path)
    (tmp_path / TENSOR_FILE).unlink()
    with pytest.raises(UnsupportedArtifact, match="does not exist"):
        read_lora(tmp_path)
