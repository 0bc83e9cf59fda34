"""Two ranks: the same step as one rank, every ZeRO stage, and a rank's death noticed."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reef_cli.core.errors import TrainerError
from reef_cli.trainer.handle import TrainerHandle
from tests.trainer.conftest import TOY, batch, release
from tests.trainer.test_handle import faulty, gone

pytestmark = pytest.mark.slow
Make = Callable[..., TrainerHandle]
TWO = replace(TOY, world_size=2, precision="fp32")


@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_two_ranks_make_the_step_of_one(make_handle: Make, tmp_path: Path, stage: int) -> None:
    one = await make_handle(settings=replace(TOY, precision="fp32")).train("s", release(), None, None, batch(5), tmp_path / "1")
    handle = make_handle(settings=replace(TWO, zero_stage=stage))
    two = await handle.train("s", release(), None, None, batch(5), tmp_path / "2")
    assert len(handle.pids) == 2
    a, b = (load_file(str(c.directory / "adapter_model.safetensors")) for c in (one, two))
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0.02, atol=2e-4)
    for metric in ("grad_norm", "critic_mse", "k3", "entropy", "trained_tokens"):
        assert two.metrics[metric] == pytest.approx(one.metrics[metric], rel=1e-3)
    resumed = await handle.train("s", release("lora", 1), two.directory, two.checkpoint, batch(5), tmp_path / "3")
    assert resumed.metrics["state"] == "resumed"
    other = make_handle(settings=replace(TWO, zero_stage=stage))
    again = await other.train("s", release("lora", 1), two.directory, two.checkpoint, batch(5), tmp_path / "4")
    c, d = (load_file(str(x.directory / "adapter_model.safetensors")) for x in (resumed, again))
    assert all(torch.equal(c[key], d[key]) for key in c)


@pytest.mark.parametrize("how", ["die", "raise_"])
async def test_one_rank_of_two_failing_ends_both(make_handle: Make, tmp_path: Path, how: str) -> None:
    handle = make_handle(faulty(how, rank=1), TWO)
    await handle.start()
    pids = handle.pids
    with pytest.raises(TrainerError):
        await asyncio.wait_for(handle.train("s", release(), None, None, batch(), tmp_path / "1"), 30)
    assert await gone(pids)
