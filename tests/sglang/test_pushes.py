"""Whole weights pushed over gloo by the trainer's own code, and read from disk: what both engines run afterwards, and what
they run when it fails."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from reef_cli.core.errors import EngineError
from reef_cli.engines.chat_format import ModelChat
from reef_cli.trainer.protocol import Push
from reef_cli.trainer.push import Pusher
from reef_cli.trainer.weightfiles import whole_weights
from reef_cli.weights import contract
from reef_cli.weights.group import free_port
from tests.sglang.adapters import make_adapter, make_merged
from tests.sglang.running import Running, apart, facts, scores
from tests.sglang.test_differential import MEAN, Pair


@pytest.fixture(scope="module")
def prompt(language_model: Path) -> list[int]:
    return ModelChat(language_model).render([{"role": "user", "content": "What is the capital of France?"}])


@pytest.fixture(scope="module")
def adapter(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter") / "a", language_model, seed=1)


@pytest.fixture(scope="module")
def merged(language_model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_merged(tmp_path_factory.mktemp("merged") / "m", language_model, adapter)


@pytest.fixture(scope="module")
def pusher(language_model: Path) -> Iterator[Pusher]:
    torch.set_num_threads(1)
    made = Pusher(language_model, torch.device("cpu"))
    yield made
    made.close()


def push(pusher: Pusher, engine: Running, folder: Path, version: str, **more: Any) -> Any:
    """As `LocalServing` does it: paused with the requests kept."""
    engine.post("/pause_generation", {"mode": "retract"})
    try:
        keys = (engine.launch.admin_key, engine.launch.api_key)
        return pusher.push(Push("s", str(folder), version, engine.url, *keys, **more))
    finally:
        engine.post("/continue_generation", {"torch_empty_cache": False})


def answer(engine: Running, prompt: list[int]) -> dict[str, Any]:
    return engine.generate(prompt, max_new_tokens=16, ignore_eos=True)


def unchanged(engine: Running, prompt: list[int], before: dict[str, Any]) -> None:
    """The same tokens; in SGLang a cached prefix moves log-probs by rounding."""
    (ids, logprobs), (known, others) = facts(answer(engine, prompt)), facts(before)
    assert ids == known and apart(logprobs, others) < MEAN


@contextmanager
def base_again(pusher: Pusher, engine: Running, model: Path) -> Iterator[None]:
    """The engine is shared: it gets its own weights back, bit for bit."""
    before = engine.post("/weights_checker", {"action": "checksum", "selector": "all"}).json()["per_engine_checksum"]
    try:
        yield
    finally:
        push(pusher, engine, model, "base")
        after = engine.post("/weights_checker", {"action": "checksum", "selector": "all"}).json()["per_engine_checksum"]
        assert after == before


def test_a_full_push_makes_both_engines_the_same_other_model(
    pair: Pair, pusher: Pusher, merged: Path, language_model: Path, prompt: list[int]
) -> None:
    replies, thinks = {}, {}
    for kind, engine in pair.items():
        before, thought = answer(engine, prompt), scores(engine, prompt)
        with base_again(pusher, engine, language_model):
            flight = engine.under_way(prompt[:12], max_new_tokens=40, ignore_eos=True)
            receipt = push(pusher, engine, merged, "s@r1-00000001")
            print(kind, receipt)
            assert receipt["bytes"] > 200e6 and {"send_seconds", "flush_seconds", "label_seconds"} <= receipt.keys()
            replies[kind] = answer(engine, prompt)
            thinks[kind] = scores(engine, prompt)
            spans = flight.meta()["weight_versions"]
            assert [span["version"] for span in spans] == ["base", "s@r1-00000001"] and spans[-1]["end"] == 40
        assert replies[kind]["meta_info"]["weight_versions"] == [{"version": "s@r1-00000001", "start": 0, "end": 16}]
        assert apart(thinks[kind], thought) > 5 * MEAN
        unchanged(engine, prompt, before)
    assert apart(thinks["embedded"], thinks["sglang"]) < apart(thinks["sglang"], thought) / 5


def test_a_merged_push_equals_the_merged_checkpoint(
    pair: Pair, pusher: Pusher, adapter: Path, merged: Path, language_model: Path, prompt: list[int]
) -> None:
    engine = pair["sglang"]
    with base_again(pusher, engine, language_model):
        receipt = push(pusher, engine, adapter, "s@r2-00000001", held="base")
        pushed = answer(engine, prompt)
        loaded = engine.post("/update_weights_from_disk", {"model_path": str(merged), "weight_version": "s@r3-00000001"})
        assert loaded.status_code == 200 and loaded.json()["success"], loaded.text
        unchanged(engine, prompt, pushed)
        assert engine.get("/model_info").json()["weight_version"] == "s@r3-00000001"
    assert 0 < receipt["bytes"] < 220e6, "only what the adapter touches is sent"


def checksum(engine: Running) -> str:
    reply = engine.post("/weights_checker", {"action": "checksum", "selector": "all"})
    return str(reply.json()["per_engine_checksum"])


def version(engine: Running) -> str:
    return str(engine.get("/model_info").json()["weight_version"])


@pytest.mark.parametrize("transport", ["group", "ipc"])
def test_changed_values_make_the_engine_what_all_weights_make_it(
    engine: Running, pusher: Pusher, language_model: Path, tmp_path: Path, transport: str
) -> None:
    """Five of a hundred values of some matrices, which SGLang holds fused; the rest is not sent."""
    new = nudged(tmp_path / "new", language_model)
    with base_again(pusher, engine, language_model):
        whole = push(pusher, engine, new, "s@r5-00000001", transport=transport)
        wanted = checksum(engine)
        push(pusher, engine, language_model, "base")
        assert checksum(engine) != wanted
        part = push(pusher, engine, new, "s@r6-00000001", transport=transport, held="base", delta=True)
        assert checksum(engine) == wanted and version(engine) == "s@r6-00000001"
    print(engine.kind, transport, whole, part)
    assert part["bytes"] < whole["bytes"] / 10 and part["held"] is True


def nudged(folder: Path, model: Path) -> Path:
    """The model with some values of four layers' matrices changed."""
    generator = torch.Generator().manual_seed(3)
    tensors = dict(whole_weights(model))
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and any(f"layers.{number}." in name for number in range(4)):
            chosen = torch.rand(tensor.shape, generator=generator) < 0.05
            tensors[name] = torch.where(chosen, tensor * 1.5 + 0.01, tensor)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def test_memory_is_let_go_and_taken_back_with_requests_kept(engine: Running, prompt: list[int]) -> None:
    """On a CPU there is no memory saver, so only the order of calls is proved: nothing is lost, nothing answered meanwhile."""
    before = answer(engine, prompt)
    flight = engine.under_way(prompt[:12], max_new_tokens=40, ignore_eos=True)
    engine.post("/pause_generation", {"mode": "retract"})
    assert engine.post("/release_memory_occupation", contract.MEMORY).status_code == 200
    assert not flight.done
    assert engine.post("/resume_memory_occupation", contract.MEMORY).status_code == 200
    engine.post("/continue_generation", {"torch_empty_cache": False})
    assert flight.meta()["completion_tokens"] == 40
    unchanged(engine, prompt, before)


def test_a_folder_that_cannot_be_loaded_changes_nothing(engine: Running, prompt: list[int], tmp_path: Path) -> None:
    before = answer(engine, prompt)
    refused = engine.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "broken"})
    assert refused.status_code == 400
    unchanged(engine, prompt, before)
    assert engine.get("/model_info").json()["weight_version"] == "base"


def test_weights_the_engine_refuses_are_a_mixture_until_all_are_pushed_again(
    engine: Running, pusher: Pusher, language_model: Path, prompt: list[int], tmp_path: Path
) -> None:
    before = answer(engine, prompt)
    (tmp_path / "config.json").write_text("{}")
    save_file({"model.norm.weight": torch.zeros(4)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(EngineError) as caught:
        push(pusher, engine, tmp_path, "s@r4-00000001")
    assert caught.value.details["dirty"] is True and caught.value.details["phase"] == "send"
    assert version(engine) == contract.PARTIAL
    push(pusher, engine, language_model, "base")
    unchanged(engine, prompt, before)


_PEER = """
import sys, threading, time, httpx
from reef_cli.weights import contract
from reef_cli.weights.group import make_group
url, key, port, name, phase = sys.argv[1:]
post = lambda path, body: httpx.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=240)
body = contract.join_group("127.0.0.1", int(port), 2, name, "gloo")
threading.Thread(target=post, args=("/init_weights_update_group", body), daemon=True).start()
make_group("127.0.0.1", int(port), 2, 0, name, "gloo", 120)
if phase == "receiving":
    post("/begin_weight_update", contract.BEGIN)
    update = contract.receive(["model.norm.weight"], ["bfloat16"], [[576]], name)
    threading.Thread(target=post, args=("/update_weights_from_distributed", update), daemon=True).start()
    time.sleep(1)
print("there", flush=True)
time.sleep(240)
"""


@pytest.mark.parametrize("phase", ["joined", "receiving"])
def test_a_trainer_killed_during_a_push_leaves_the_engine_serving(
    engine: Running, pusher: Pusher, language_model: Path, prompt: list[int], phase: str
) -> None:
    before = answer(engine, prompt)
    name = f"reef-dying-{phase}"
    words = [engine.url, engine.launch.admin_key, str(free_port()), name, phase]
    dying = subprocess.Popen([sys.executable, "-c", _PEER, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert dying.stdout is not None and dying.stdout.readline() == "there\n"
        os.kill(dying.pid, signal.SIGKILL)
        dying.wait()
        if phase == "receiving":
            ended = engine.post("/end_weight_update")
            assert ended.status_code == 200, ended.text
        unchanged(engine, prompt, before)
        # 400 where the trainer died before the engine had joined: there is no group then.
        assert engine.post("/destroy_weights_update_group", {"group_name": name}).status_code in (200, 400)
        push(pusher, engine, language_model, "base")
    finally:
        dying.kill()
        dying.wait()
