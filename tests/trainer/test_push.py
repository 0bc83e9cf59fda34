"""Weight pushes between a real trainer process and a real engine process, over gloo; and what is reported when they fail."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reef_cli.core.errors import EngineError
from reef_cli.trainer.handle import TrainerHandle
from reef_cli.trainer.weightfiles import merged_weights, whole_weights
from reef_cli.weights.lora import merge, read_lora
from tests.engines.live import Live, ids_of, make_lora, make_model
from tests.trainer.conftest import TOY, release, spec, trace_of

LORA = replace(TOY, target_modules=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("push"))


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Live]:
    live = Live(model, tmp_path / "engine.log", "--max-lora-rank", "8").wait()
    yield live
    live.stop()


@pytest.fixture
async def handle(model: Path, tmp_path: Path) -> Any:
    made = TrainerHandle(LORA, model, spec(), tmp_path / "trainer.log")
    yield made
    await made.stop()


def engine_logprobs(engine: Live, ids: list[int], **extra: Any) -> tuple[list[int], list[float]]:
    reply = engine.generate(ids, temperature=1.0, max_new_tokens=12, ignore_eos=True, **extra)
    pairs = reply["meta_info"]["output_token_logprobs"]
    return reply["output_ids"], [pair[0] for pair in pairs]


async def test_a_merged_push_makes_the_engine_run_what_the_trainer_trained(
    engine: Live, handle: TrainerHandle, tmp_path: Path
) -> None:
    samples = [trace_of(i, ids_of(6, i), *engine_logprobs(engine, ids_of(6, i)), reward=float(i % 2)) for i in range(4)]
    candidate = await handle.train("s", release(), None, None, samples, tmp_path / "1")
    assert candidate.metrics["logprob_gap_lag0"] < 0.04
    receipt = await handle.push("s", candidate.directory, "s@r1-00000001", engine.url)
    assert receipt["bytes"] > 0 and receipt["tensors"] == 2 * len(LORA.target_modules)
    assert {f"{p}_seconds" for p in ("init", "begin", "send", "end", "flush", "label")} <= receipt.keys()
    info = engine.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).json()
    assert info["meta_info"]["weight_version"] == "s@r1-00000001"
    after = [trace_of(i, ids_of(6, i), *engine_logprobs(engine, ids_of(6, i))) for i in range(4)]
    trained = await handle.score(candidate.directory, after)
    base = await handle.score(None, after)
    gap, moved = distance(trained, after), distance(base, after)
    assert gap < 0.04 and moved > 3 * gap


def distance(scores: list[list[float]], samples: list[Any]) -> float:
    pairs = [(a, b) for row, s in zip(scores, samples, strict=True) for a, b in zip(row, s.tokens.logprobs, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


async def test_a_full_push_brings_the_base_back_over_the_same_group(
    engine: Live, handle: TrainerHandle, model: Path, tmp_path: Path
) -> None:
    ids = ids_of(8, 3)
    before = engine.generate(ids)["output_ids"]
    lora = make_lora(tmp_path / "lora", model)
    first = await handle.push("s", lora, "s@r1-00000001", engine.url)
    assert engine.generate(ids)["output_ids"] != before
    second = await handle.push("s", model, "s@r2-00000001", engine.url)
    assert engine.generate(ids)["output_ids"] == before
    assert second["init_seconds"] < first["init_seconds"] and second["bytes"] > first["bytes"]


async def test_a_restarted_engine_gets_a_new_group_by_itself(handle: TrainerHandle, model: Path, tmp_path: Path) -> None:
    first = Live(model, tmp_path / "e1.log").wait()
    await handle.push("s", model, "s@r1-00000001", first.url)
    first.stop()
    second = Live(model, tmp_path / "e2.log", "--port", str(first.port))
    second.url = first.url
    try:
        second.wait()
        receipt = await handle.push("s", model, "s@r2-00000001", second.url)
        assert receipt["buckets"] >= 1 and receipt["init_seconds"] > 0
    finally:
        second.stop()


async def test_an_engine_that_is_not_there_is_clean_and_the_trainer_lives(handle: TrainerHandle, model: Path) -> None:
    await handle.start()
    pids = handle.pids
    with pytest.raises(EngineError) as caught:
        await handle.push("s", model, "v", "http://127.0.0.1:9")
    assert caught.value.details["dirty"] is False and caught.value.details["phase"] == "init"
    assert handle.pids == pids


async def test_weights_the_engine_refuses_are_reported_as_a_mixture(
    engine: Live, handle: TrainerHandle, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    wrong_model(other)
    with pytest.raises(EngineError) as caught:
        await handle.push("s", other, "s@r1-00000001", engine.url)
    assert caught.value.details["phase"] == "send" and caught.value.details["dirty"] is True
    assert "push all weights again" in caught.value.hint
    # The session is closed and the group left, so a good push works at once.
    receipt = await handle.push("s", model, "s@r2-00000001", engine.url)
    assert receipt["buckets"] >= 1


def wrong_model(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"model.nothing.weight": torch.zeros(4)}, str(folder / "model.safetensors"))


def test_merged_weights_are_pristine_plus_the_product(model: Path, tmp_path: Path) -> None:
    adapter = make_lora(tmp_path / "lora", model)
    lora, whole = read_lora(adapter), dict(whole_weights(model))
    merged = dict(merged_weights(model, adapter))
    assert set(merged) == {f"{module}.weight" for module in lora.tensors} and set(merged) < set(whole)
    for module, (a, b) in lora.tensors.items():
        name = f"{module}.weight"
        assert torch.equal(merged[name], merge(whole[name], a, b, lora.config.scaling(module)))
        assert merged[name].dtype == torch.bfloat16


def test_a_tied_head_is_not_sent(model: Path) -> None:
    names = [name for name, _ in whole_weights(model)]
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
