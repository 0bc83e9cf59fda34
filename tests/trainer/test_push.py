"""Weight pushes between a real trainer process and a real engine process, over gloo; and what is reported when they fail."""

import pickle
import shutil
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from reef_cli.core.errors import EngineError, UnsupportedArtifact
from reef_cli.core.types import Held
from reef_cli.trainer.carriers import GroupCarrier
from reef_cli.trainer.handle import TrainerHandle
from reef_cli.trainer.protocol import Push
from reef_cli.trainer.push import Pusher
from reef_cli.trainer.weightfiles import merged_weights, whole_weights
from reef_cli.weights import contract
from reef_cli.weights.handles import deserialize, serialize
from reef_cli.weights.lora import Lora, merge, read_lora, write_lora
from reef_cli.weights.plugin import reef_delta
from tests.engines.live import Live, ids_of, make_lora, make_model
from tests.trainer.conftest import TOY, release, spec, trace_of

BASE = Held("base", None)
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
    receipt = await handle.push("s", candidate.directory, "s@r1-00000001", engine.url, held=BASE)
    assert receipt["held"] is True and receipt["bytes"] > 0 and receipt["tensors"] == 2 * len(LORA.target_modules)
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
    first = await handle.push("s", lora, "s@r1-00000001", engine.url, held=BASE)
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


def checksum(engine: Live) -> str:
    return str(engine.post("/weights_checker").json()["per_engine_checksum"])


def version(engine: Live) -> str:
    return str(httpx.get(f"{engine.url}/model_info", timeout=30).json()["weight_version"])


@pytest.fixture
def pusher(model: Path) -> Iterator[Pusher]:
    """Rank 0's pusher in this process; small buckets."""
    made = Pusher(model, torch.device("cpu"), bucket_bytes=20_000)
    yield made
    made.close()


def command(engine: Live, folder: Path, label: str, **more: Any) -> Push:
    return Push("s", str(folder), label, engine.url, **more)


def moved(folder: Path, model: Path, share: float, seed: int = 1) -> Path:
    """The model with some of its values changed: `share` of those of each matrix, the norms untouched."""
    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(whole_weights(model))
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            chosen = torch.rand(tensor.shape, generator=generator) < share
            tensors[name] = torch.where(chosen, tensor * 1.5 + 0.01, tensor)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def test_what_an_engine_holds_is_sent_again_unless_it_says_that_it_holds_it(
    engine: Live, pusher: Pusher, model: Path, tmp_path: Path
) -> None:
    wide, narrow = make_lora(tmp_path / "wide", model), tmp_path / "narrow"
    lora = read_lora(wide)
    some = {module: pair for module, pair in lora.tensors.items() if module.endswith("q_proj")}
    write_lora(narrow, Lora(replace(lora.config, target_modules=("q_proj",)), some))
    whole = len(list(whole_weights(model)))
    first = pusher.push(command(engine, wide, "s@r1-00000001", held="base"))
    assert (first["held"], first["tensors"]) == (True, len(lora.tensors))
    second = pusher.push(command(engine, narrow, "s@r2-00000001", held="s@r1-00000001", held_directory=str(wide)))
    assert (second["held"], second["tensors"]) == (True, len(lora.tensors)), "what the wider adapter changed goes back"
    partly = checksum(engine)
    third = pusher.push(command(engine, narrow, "s@r3-00000001", held="s@r9-00000001", held_directory=str(wide)))
    assert (third["held"], third["tensors"]) == (False, whole), "it runs other weights than were thought"
    assert checksum(engine) == partly and version(engine) == "s@r3-00000001"
    assert pusher.push(command(engine, narrow, "s@r4-00000001"))["tensors"] == whole


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_a_delta_makes_the_engine_what_all_weights_make_it(
    engine: Live, pusher: Pusher, model: Path, tmp_path: Path, share: float
) -> None:
    new = moved(tmp_path / "new", model, share)
    whole = pusher.push(command(engine, new, "s@r1-00000001", held="base"))
    wanted = checksum(engine)
    pusher.push(command(engine, model, "base"))
    assert checksum(engine) != wanted
    part = pusher.push(command(engine, new, "s@r2-00000001", held="base", delta=True))
    assert checksum(engine) == wanted and version(engine) == "s@r2-00000001"
    assert part["tensors"] < whole["tensors"], "norms did not change"
    assert part["bytes"] < whole["bytes"] * (0.1 if share < 0.1 else 1)
    back = pusher.push(command(engine, model, "base", held="s@r2-00000001", held_directory=str(new), delta=True))
    assert back["tensors"] == part["tensors"]
    same = pusher.push(command(engine, model, "again", held="base", delta=True))
    assert (same["bytes"], version(engine)) == (0, "again")


def test_changed_values_that_do_not_fit_their_digest_change_nothing(engine: Live, model: Path) -> None:
    before = checksum(engine)
    weight = dict(whole_weights(model))["model.norm.weight"]
    index, values = torch.tensor([3], dtype=torch.int32), torch.tensor([2.5], dtype=weight.dtype)
    named = reef_delta.pack([("model.norm.weight", weight.shape, index, values)])
    damaged = [(name, tensor + 1 if name == "model.norm.weight" else tensor) for name, tensor in named]
    engine.post("/begin_weight_update")
    refused = engine.post("/update_weights_from_tensor", contract.take_tensors([serialize(damaged)], contract.CHANGES))
    assert refused.status_code == 400 and "do not fit their digest" in refused.text and checksum(engine) == before
    taken = engine.post("/update_weights_from_tensor", contract.take_tensors([serialize(named)], contract.CHANGES))
    assert taken.status_code == 200 and checksum(engine) != before
    engine.post("/end_weight_update")


def test_memory_that_both_reach_carries_the_same_weights(engine: Live, pusher: Pusher, model: Path, tmp_path: Path) -> None:
    new = moved(tmp_path / "new", model, 0.5)
    pusher.push(command(engine, new, "s@r1-00000001"))
    wanted = checksum(engine)
    pusher.push(command(engine, model, "base"))
    receipt = pusher.push(command(engine, new, "s@r2-00000001", transport="ipc"))
    assert checksum(engine) == wanted and receipt["buckets"] > 3 and version(engine) == "s@r2-00000001"


def test_a_trainer_on_a_gpu_reaches_an_engine_without_one(engine: Live, model: Path, tmp_path: Path) -> None:
    """NCCL would need a GPU on both sides; the trainer asked for it whatever the engine ran on."""
    pusher = Pusher(model, torch.device("cuda"), bucket_bytes=20_000)
    try:
        assert pusher.push(command(engine, moved(tmp_path / "new", model, 0.5), "s@r1-00000001"))["buckets"] > 3
        assert version(engine) == "s@r1-00000001"
    finally:
        pusher.close()


def test_payloads_build_nothing_but_tensors(engine: Live) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("built",))

    with pytest.raises(UnsupportedArtifact):
        deserialize(b64encode(pickle.dumps([("a", Evil())])).decode())
    engine.post("/begin_weight_update")
    body = contract.take_tensors([b64encode(pickle.dumps([("a", Evil())])).decode()], None)
    assert engine.post("/update_weights_from_tensor", body).status_code == 400
    engine.post("/end_weight_update")


def test_an_engine_is_marked_while_its_weights_change_and_renamed_when_nothing_did(
    engine: Live, pusher: Pusher, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    honest = GroupCarrier.send

    def looking(self: GroupCarrier, engines: Any, bucket: Any, applied: Any) -> None:
        seen.append(version(engine))
        honest(self, engines, bucket, applied)

    monkeypatch.setattr(GroupCarrier, "send", looking)
    pusher.push(command(engine, model, "s@r1-00000001"))
    assert set(seen) == {contract.PARTIAL} and version(engine) == "s@r1-00000001"

    def failing(self: GroupCarrier, engines: Any, bucket: Any, applied: Any) -> None:
        raise EngineError("no way")

    monkeypatch.setattr(GroupCarrier, "send", failing)
    with pytest.raises(EngineError, match="no way") as caught:
        pusher.push(command(engine, model, "s@r2-00000001"))
    assert caught.value.details["dirty"] is False and version(engine) == "s@r1-00000001"
