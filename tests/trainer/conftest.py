"""A toy language model on disk, samples for it, and a trainer handle that is always stopped."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.ids import RecordId, ReleaseId
from reef_cli.core.types import Operation, Release, Sample, Surface, TokenSpan, TokenTrace
from reef_cli.learning.contract import ProgramSpec
from reef_cli.trainer.handle import TrainerHandle

VOCAB = 96
TOY = TrainerSettings(rank=4, alpha=8.0, device="cpu", threads=1, micro_batch=2, start_timeout_s=60, step_timeout_s=30)
SAO = {
    "policy_lr": 1e-2, "critic_lr": 1e-2, "eps_low": 0.3, "eps_high": 5.0, "critic_steps": 2, "critic_only_steps": 0,
    "critic_width": 8, "level_decay": 0.5, "alpha_lambda": 1.5, "gamma": 1.0, "use_critic": True, "use_mask": True,
    "min_ess": 0.0, "max_masked": 1.0,
}  # fmt: skip


def spec(path: str = "recipes.sao.program:SAOProgram", **changes: Any) -> ProgramSpec:
    return ProgramSpec(path, SAO | changes)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Llama layers with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("toy") / "model"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def sample(index: int, reward: float = 1.0, step: int = 0, length: int = 5, mask: tuple[int, ...] | None = None) -> Sample:
    prompt = tuple((7 * index + k) % VOCAB for k in range(3 + index % 3))
    output = tuple((11 * index + 5 * k + 1) % VOCAB for k in range(length))
    trace = TokenTrace(prompt, output, (-4.5,) * length, mask or (1,) * length, (TokenSpan("base", 0, length),))
    return Sample(RecordId(f"s{index}"), (RecordId(f"r{index}"),), trace, reward, ("base",), step, 0.0)


def trace_of(index: int, prompt: list[int], output: list[int], logprobs: list[float], reward: float = 0.0) -> Sample:
    n = len(output)
    trace = TokenTrace(tuple(prompt), tuple(output), tuple(logprobs), (1,) * n, (TokenSpan("base", 0, n),))
    return Sample(RecordId(f"t{index}"), (), trace, reward, ("base",), 0, 0.0)


def batch(count: int = 4) -> list[Sample]:
    return [sample(i, reward=float(i % 2), length=4 + i % 3) for i in range(count)]


def release(kind: str = "base", step: int = 0) -> Release:
    return Release(
        ReleaseId(f"r{step}-00000000"),
        "s",
        None,
        "sha256:0",
        kind,
        Surface.WEIGHTS,
        Operation.CREATION,
        step,
        0.0,
        "t",  # type: ignore[arg-type]
    )


@pytest.fixture
async def make_handle(toy_model: Path, tmp_path: Path) -> AsyncIterator[Callable[..., TrainerHandle]]:
    made: list[TrainerHandle] = []

    def make(program: ProgramSpec | None = None, settings: TrainerSettings = TOY) -> TrainerHandle:
        made.append(TrainerHandle(settings, toy_model, program or spec(), tmp_path / f"trainer{len(made)}.log"))
        return made[-1]

    yield make
    for handle in made:
        await handle.stop()
