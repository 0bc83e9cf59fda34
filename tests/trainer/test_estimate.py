"""The estimate counts what is there: parameters from headers, shares by ZeRO stage, and what a real step was seen to take."""

from dataclasses import replace
from pathlib import Path

import pytest

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.trainer.estimate import estimate
from tests.trainer.conftest import TOY

LAYER = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32
TOTAL = 96 * 32 + 2 * LAYER + 32
"""The toy model: embedding (tied head), two layers with two key-value heads of four, a norm."""


def test_parameters_come_from_the_tensor_headers(toy_model: Path) -> None:
    full = estimate(replace(TOY, method="full"), toy_model, tokens=16)
    assert full.parameters == full.trained == TOTAL
    assert (full.weights, full.gradients, full.optimizer) == (2 * TOTAL, 2 * TOTAL, 12 * TOTAL)


def test_an_adapter_trains_rank_times_both_sides_of_each_layer(toy_model: Path) -> None:
    sides = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 64)
    lora = estimate(TOY, toy_model, tokens=16)
    assert lora.trained == 2 * TOY.rank * sides
    assert lora.weights == 2 * (TOTAL + lora.trained)


@pytest.mark.parametrize(("stage", "shared"), [(0, ()), (1, ("optimizer",)), (2, ("optimizer", "gradients"))])
def test_each_stage_spreads_more_over_the_ranks(toy_model: Path, stage: int, shared: tuple[str, ...]) -> None:
    settings = replace(TOY, method="full", zero_stage=stage)
    alone, four = (estimate(replace(settings, world_size=ranks), toy_model, tokens=16) for ranks in (1, 4))
    for part in ("weights", "gradients", "optimizer"):
        whole, mine = getattr(alone, part), getattr(four, part)
        assert mine == (whole / 4 if part in shared else whole), part


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArtifact, match="no safetensors"):
        estimate(TOY, tmp_path, tokens=16)


@pytest.mark.model
def test_the_default_model_is_estimated_close_to_what_a_step_took(language_model: Path) -> None:
    """Peak resident memory of one step on one rank, measured on a CPU: 2.03 GB with 8 rows of 128 tokens, LoRA of rank 16."""
    seen = 2027 * 1024**2
    found = estimate(TrainerSettings(device="cpu"), language_model, tokens=128)
    assert found.parameters == 134_515_008
    assert 0.75 * seen < found.memory < 1.25 * seen
