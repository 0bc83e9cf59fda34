"""LoRA per request: equal to PEFT, independent of company, loaded and unloaded while clients stream."""

import asyncio
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from reef_cli.core.errors import EngineError, UnsupportedArtifact
from reef_cli.engines.client import EngineClient
from tests.engines.live import Live, ids_of, make_lora

GREEDY = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture
def loaded(live: Live, lora: Path, lora2: Path):
    for name, path in (("s@a", lora), ("s@b", lora2)):
        reply = live.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        assert reply.status_code == 200, reply.text
    yield live
    for name in ("s@a", "s@b"):
        assert live.post("/unload_lora_adapter", {"lora_name": name}).status_code == 200


def facts(reply: dict) -> tuple:
    return reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


def test_logprobs_equal_pefts_forward(loaded: Live, tiny: Path, lora: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    ids = ids_of(40, 1)
    reply = loaded.generate(ids, path="s@a", **GREEDY)
    plain = loaded.generate(ids, **GREEDY)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), str(lora))
    with torch.no_grad():
        logprobs = model(torch.tensor([ids + reply["output_ids"]])).logits[0].log_softmax(-1)
    for position, (value, token, _) in enumerate(reply["meta_info"]["output_token_logprobs"], start=len(ids) - 1):
        assert value == pytest.approx(float(logprobs[position, token]), abs=0.2)
    assert reply["output_ids"] != plain["output_ids"]


def test_rows_of_several_adapters_run_together_without_changing_a_bit(loaded: Live) -> None:
    asks = [(ids_of(10 + 9 * i, i), [None, "s@a", "s@b"][i % 3]) for i in range(9)]
    alone = [facts(loaded.generate(ids, path=path, **GREEDY)) for ids, path in asks]
    loaded.post("/flush_cache")
    with ThreadPoolExecutor(9) as pool:
        together = list(pool.map(lambda ask: facts(loaded.generate(ask[0], path=ask[1], **GREEDY)), asks))
    assert together == alone


def test_prefixes_are_not_shared_between_adapters(loaded: Live) -> None:
    ids = ids_of(80, 77)
    loaded.post("/flush_cache")
    cached = [
        loaded.generate(ids, path=path, max_new_tokens=2)["meta_info"]["cached_tokens"] for path in (None, "s@a", "s@b", "s@a")
    ]
    assert cached[:3] == [0, 0, 0] and cached[3] > 70


def test_names_are_listed_and_used_once(loaded: Live, lora: Path) -> None:
    models = httpx.get(loaded.url + "/v1/models").json()["data"]
    assert {model["id"] for model in models if model.get("parent")} == {"s@a", "s@b"}
    again = loaded.post("/load_lora_adapter", {"lora_name": "s@a", "lora_path": str(lora)})
    assert (
        again.status_code == 400 and again.json()["success"] is False and set(again.json()["loaded_adapters"]) == {"s@a", "s@b"}
    )
    unknown = loaded.post("/unload_lora_adapter", {"lora_name": "nobody"})
    assert unknown.status_code == 400


def test_a_name_loaded_again_never_sees_the_old_keys(live: Live, lora: Path, lora2: Path) -> None:
    ids, answers = ids_of(60, 3), []
    for path in (lora, lora2):
        live.post("/load_lora_adapter", {"lora_name": "reused", "lora_path": str(path)})
        answers.append(live.generate(ids, path="reused", **GREEDY))
        live.post("/unload_lora_adapter", {"lora_name": "reused"})
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 0]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]


def test_chat_takes_an_adapter_by_model_name(loaded: Live) -> None:
    body = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 12, "temperature": 0}
    base, named, split = (
        loaded.post("/v1/chat/completions", body | more).json()["choices"][0]["message"]["content"]
        for more in ({}, {"model": "s@a"}, {"model": "tiny:s@a"})
    )
    assert named == split != base


def test_unloading_waits_for_users_and_takes_no_new_ones(live: Live, lora: Path) -> None:
    live.post("/load_lora_adapter", {"lora_name": "leaving", "lora_path": str(lora)})
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(live.generate, ids_of(20), "leaving", max_new_tokens=450, ignore_eos=True)
        live.until_running()
        gone = pool.submit(live.post, "/unload_lora_adapter", {"lora_name": "leaving"})
        brief = {"input_ids": [5], "lora_path": "leaving", "sampling_params": {"max_new_tokens": 1}}
        while live.post("/generate", brief).status_code == 200:
            assert not gone.done()
        refused_early = not gone.done()
        assert gone.result().status_code == 200 and not live.running()
    assert len(long.result()["output_ids"]) == 450 and refused_early


@pytest.mark.parametrize("fault", ["missing", "rank", "shape", "pickle"])
def test_bad_adapters_are_refused_by_name(live: Live, tiny: Path, lora: Path, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "bad"
    if fault == "rank":
        make_lora(folder, tiny, rank=65)
    elif fault != "missing":
        shutil.copytree(lora, folder)
        if fault == "pickle":
            (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
        else:
            config = json.loads((folder / "adapter_config.json").read_text())
            (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 7}))
    reply = live.post("/load_lora_adapter", {"lora_name": "bad", "lora_path": str(folder)})
    assert reply.status_code == 400 and reply.json()["error_message"] and "bad" not in reply.json()["loaded_adapters"]


async def test_an_adapter_is_there_before_the_step_under_way_ends(tiny: Path, lora: Path, lora2: Path) -> None:
    from reef_cli.engines.chat_format import ModelChat
    from reef_cli.engines.embedded.core import Core
    from reef_cli.engines.embedded.engine import Engine
    from reef_cli.engines.embedded.model import Model

    core = Core(lambda: Model(str(tiny), torch.bfloat16, 2, 256, 64), "base", 2)
    engine, done = Engine(core, core.start(), ModelChat(tiny)), threading.Event()
    try:
        await engine.load_adapter("first", str(lora))
        step = asyncio.ensure_future(engine.call(lambda: done.wait(30)))
        await asyncio.wait_for(engine.load_adapter("second", str(lora2)), 10)
        assert engine.adapter("second") is not None and not step.done()
        done.set()
        assert await step
    finally:
        done.set()
        core.close()


async def test_an_adapter_that_travels_is_the_one_that_is_read(live: Live, tiny: Path, lora: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    shutil.copytree(lora, there)
    async with EngineClient(live.url) as near, EngineClient(live.url, sends_adapters=True) as afar:
        await near.load_lora("s@read", lora)
        await afar.load_lora("s@sent", there)
        shutil.rmtree(there)
        told = [facts(live.generate(ids_of(20), path=name, **GREEDY)) for name in ("s@read", "s@sent")]
        assert told[0] == told[1] != facts(live.generate(ids_of(20), **GREEDY))
        with pytest.raises(EngineError, match="refused") as refused:
            await afar.load_lora("s@wide", make_lora(tmp_path / "wide", tiny, rank=65))
        assert "rank 65" in refused.value.why and sorted(await near.adapters()) == ["s@read", "s@sent"]
        with pytest.raises(UnsupportedArtifact):
            await afar.load_lora("s@gone", there)
        for name in ("s@read", "s@sent"):
            await near.unload_lora(name)
