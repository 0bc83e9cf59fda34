"""Adapters SGLang would not survive are refused by their names and shapes alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.engines.adapter_files import check_adapter, shapes

LAYER = "model.layers.0.mlp"


def adapter(folder: Path, *modules: str, rank: int = 2, wide: int = 64, out: int = 172) -> Path:
    folder.mkdir()
    tensors = {}
    for module in modules:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(rank, wide)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(out, rank)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


def test_a_fitting_adapter_passes(tiny: Path, tmp_path: Path) -> None:
    base = shapes(tiny)
    assert base["model.layers.0.mlp.up_proj.weight"] == (172, 64)
    check_adapter(adapter(tmp_path / "a", f"{LAYER}.up_proj", f"{LAYER}.gate_proj"), base, 2)
    check_adapter(adapter(tmp_path / "b", f"{LAYER}.gate_proj"), base, 2)


def test_peft_adapters_pass_but_for_the_fused_pair(tiny: Path, lora: Path) -> None:
    with pytest.raises(UnsupportedArtifact, match="without gate_proj") as caught:
        check_adapter(lora, shapes(tiny), 4)
    assert "trainer.target_modules" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "modules", "text"),
    [
        ({}, ["model.layers.9.mlp.gate_proj"], "no linear layer"),
        ({}, ["model.norm"], "no linear layer"),
        ({"wide": 63}, [f"{LAYER}.gate_proj"], "the layer is"),
        ({"out": 171}, [f"{LAYER}.gate_proj"], "the layer is"),
        ({"rank": 3}, [f"{LAYER}.gate_proj"], "rank 3, the engine room for 2"),
    ],
)
def test_what_does_not_fit_is_named(tiny: Path, tmp_path: Path, changes: dict, modules: list[str], text: str) -> None:
    with pytest.raises(UnsupportedArtifact, match=text):
        check_adapter(adapter(tmp_path / "a", *modules, **changes), shapes(tiny), 2)


def test_broken_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArtifact, match="no safetensors"):
        shapes(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UnsupportedArtifact, match="no readable"):
        shapes(tmp_path)
