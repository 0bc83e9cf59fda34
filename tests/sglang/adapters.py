"""LoRA adapters and whole weights made for a model folder, without PEFT: random, but strong enough to change what it says."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from reef_cli.engines.adapter_files import shapes
from reef_cli.trainer.weightfiles import merged_weights, whole_weights
from reef_cli.weights.lora import Lora, LoraConfig, write_lora

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(folder: Path, model: Path, seed: int, strength: float = 0.04, rank: int = 4) -> Path:
    """An adapter of every linear layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(shapes(model).items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            out, wide = shape
            a = torch.randn(rank, wide, generator=generator) * strength
            tensors[module] = (a.bfloat16(), (torch.randn(out, rank, generator=generator) * strength).bfloat16())
    write_lora(folder, Lora(LoraConfig(r=rank, alpha=4.0 * rank, target_modules=TARGETS), tensors))
    return folder


def make_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter merged, as a whole checkpoint."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(dict(whole_weights(model)) | dict(merged_weights(model, adapter)), str(folder / "model.safetensors"))
    return folder
