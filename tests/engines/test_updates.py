"""Weight updates with a real gloo group between this process (the trainer's place) and a real engine process."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from reef_cli.weights.buckets import pack
from reef_cli.weights.group import close_group, free_port, make_group
from tests.engines.live import Live, ids_of

GREEDY = {"max_new_tokens": 30, "ignore_eos": True}


class Trainer:
    """Rank 0 of a push group, in this process."""

    def __init__(self, engine: Live, name: str) -> None:
        self.engine, self.name = engine, name
        port = free_port()
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": name}
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(engine.post, "/init_weights_update_group", body | {"backend": "gloo"})
            self.group = make_group("127.0.0.1", port, 2, 0, name, "gloo", 20)
            assert joined.result().json()["success"], joined.result().text

    def send(self, body: dict, tensors: list[torch.Tensor]):
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.engine.post, "/update_weights_from_distributed", body | {"group_name": self.name})
            for tensor in tensors:
                dist.broadcast(tensor, group_src=0, group=self.group)
            return reply.result()

    def push(self, weights: dict[str, torch.Tensor], limit: int = 20_000, **more) -> list:
        replies = []
        for bucket in pack(weights.items(), limit):
            body = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "flush_cache": False}
            replies.append(self.send(body | {"load_format": "flattened_bucket"} | more, [bucket.flat]))
        return replies

    def close(self) -> None:
        close_group(self.group)


@pytest.fixture
def trainer(own: Live) -> Iterator[Trainer]:
    made = Trainer(own, "reef-test-1")
    yield made
    made.close()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "model.safetensors"))


def reference(folder: Path, tmp_path: Path) -> dict:
    engine = Live(folder, tmp_path / "reference", "--skip-invariance-check").wait()
    try:
        return engine.generate(ids_of(25), **GREEDY)
    finally:
        engine.stop()


def test_a_full_push_in_buckets_makes_the_engine_the_other_model(
    own: Live, trainer: Trainer, other: Path, tmp_path: Path
) -> None:
    before = own.post("/weights_checker", {"action": "checksum"}).json()
    assert own.generate(ids_of(25), **GREEDY)["output_ids"]
    assert own.post("/pause_generation", {"mode": "retract"}).status_code == 200
    assert own.post("/begin_weight_update", {"selector": "all"}).json()["success"]
    replies = trainer.push(weights(other))
    assert len(replies) > 3 and all(reply.json()["success"] for reply in replies)
    assert own.post("/end_weight_update").json()["success"]
    assert own.post("/flush_cache").status_code == 200
    own.post("/update_weight_version", {"new_version": "s@1", "abort_all_requests": False})
    own.post("/continue_generation", {"torch_empty_cache": False})
    after = own.post("/weights_checker").json()
    assert after["per_engine_checksum"] != before["per_engine_checksum"]
    pushed, loaded = own.generate(ids_of(25), **GREEDY), reference(other, tmp_path)
    assert pushed["output_ids"] == loaded["output_ids"]
    assert pushed["meta_info"]["output_token_logprobs"] == loaded["meta_info"]["output_token_logprobs"]
    assert pushed["meta_info"]["weight_versions"] == [{"version": "s@1", "start": 0, "end": 30}]
    own.post("/begin_weight_update")
    trainer.push(weights(other))
    own.post("/end_weight_update")
    assert own.post("/weights_checker").json()["per_engine_checksum"] == after["per_engine_checksum"]


def test_a_plain_list_is_received_tensor_by_tensor(own: Live, trainer: Trainer, other: Path) -> None:
    new = weights(other)
    names = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    sent = [new["model.norm.weight"].float(), new["model.layers.0.mlp.up_proj.weight"], new["model.embed_tokens.weight"]]
    own.post("/begin_weight_update")
    before = own.post("/weights_checker").json()["ranks"][0]["checksums"]
    body = {"names": names, "dtypes": ["float32", "bfloat16", "bfloat16"], "shapes": [list(t.shape) for t in sent]}
    reply = trainer.send(body | {"weight_version": "w2"}, sent)
    assert reply.json()["success"], reply.text
    after = own.post("/weights_checker").json()["ranks"][0]["checksums"]
    changed = {name for name in after if after[name] != before[name]}
    # The norm of a fresh model is all ones in both; a tied head is not sent twice.
    assert changed == {"model.layers.0.mlp.up_proj.weight"}
    assert own.generate([5], max_new_tokens=1)["meta_info"]["weight_version"] == "w2"
    own.post("/end_weight_update")


def test_sessions_are_required_and_do_not_nest(own: Live, trainer: Trainer) -> None:
    body = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": trainer.name}
    refused = own.post("/update_weights_from_distributed", body)
    assert refused.status_code == 400 and "begin_weight_update" in refused.json()["message"]
    assert own.post("/end_weight_update").status_code == 400
    assert own.post("/begin_weight_update").status_code == 200
    assert own.post("/begin_weight_update").status_code == 400
    unknown = own.post("/update_weights_from_distributed", body | {"group_name": "nobody"})
    assert unknown.status_code == 400 and "does not exist" in unknown.json()["message"]
    assert own.post("/end_weight_update").status_code == 200


@pytest.mark.parametrize("name", ["model.layers.9.mlp.up_proj.weight", "model.norm.weight"])
def test_wrong_names_and_shapes_are_refused_and_the_engine_lives(own: Live, trainer: Trainer, name: str) -> None:
    answer = own.generate(ids_of(25), **GREEDY)
    own.post("/begin_weight_update")
    (reply,) = trainer.push({name: torch.zeros(3, dtype=torch.bfloat16)}, weight_version="bad")
    assert reply.status_code == 400 and "partially updated" in reply.json()["message"]
    own.post("/end_weight_update")
    again = own.generate(ids_of(25), **GREEDY)
    assert again["output_ids"] == answer["output_ids"] and again["meta_info"]["weight_version"] == "base"


def test_in_place_updates_must_not_flush(own: Live, trainer: Trainer, other: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(own.generate, ids_of(30), max_new_tokens=450, ignore_eos=True)
        own.until_running()
        own.post("/pause_generation", {"mode": "in_place"})
        own.post("/begin_weight_update")
        (reply,) = trainer.push(weights(other), 1 << 30, flush_cache=True, weight_version="w9")
        assert reply.status_code == 400 and "the cache was not flushed" in reply.json()["message"]
        (reply,) = trainer.push(weights(other), 1 << 30, weight_version="w10")
        assert reply.status_code == 200
        own.post("/end_weight_update")
        own.post("/continue_generation")
        spans = long.result()["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["base", "w10"] and spans[-1]["end"] == 450


def test_a_push_without_a_pause_waits_for_running_requests(own: Live, trainer: Trainer, other: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(own.generate, ids_of(30), max_new_tokens=450, ignore_eos=True)
        own.until_running()
        begun = pool.submit(own.post, "/begin_weight_update")
        assert begun.result().status_code == 200 and not own.running()
        assert [span["version"] for span in long.result()["meta_info"]["weight_versions"]] == ["base"]
        own.post("/end_weight_update")


def test_a_silent_trainer_does_not_stop_generation(tiny: Path, tmp_path: Path) -> None:
    engine = Live(tiny, tmp_path / "log", "--group-timeout", "3", "--skip-invariance-check").wait()
    try:
        body = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2, "backend": "gloo"}
        with ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(engine.post, "/init_weights_update_group", body)
            assert engine.generate(ids_of(9), max_new_tokens=5)["output_ids"]
            assert not stuck.done()
            assert stuck.result().status_code == 400
        trainer = Trainer(engine, "later")
        engine.post("/begin_weight_update")
        update = {"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[64]], "group_name": "later"}
        with ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(engine.post, "/update_weights_from_distributed", update)
            assert engine.generate(ids_of(9), max_new_tokens=5)["output_ids"]
            assert stuck.result().status_code == 400
        trainer.close()
    finally:
        engine.stop()


_DYING = """
import sys, threading, time, httpx, torch, torch.distributed as dist
from reef_cli.weights.group import make_group
url, port = sys.argv[1], int(sys.argv[2])
body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
body |= {"group_name": "dying", "backend": "gloo"}
threading.Thread(target=lambda: httpx.post(url + "/init_weights_update_group", json=body, timeout=30)).start()
make_group("127.0.0.1", port, 2, 0, "dying", "gloo", 30)
print("joined", flush=True)
time.sleep(60)
"""


def test_a_trainer_killed_mid_push_leaves_the_engine_serving(own: Live) -> None:
    dying = subprocess.Popen([sys.executable, "-c", _DYING, own.url, str(free_port())], stdout=subprocess.PIPE, text=True)
    try:
        assert dying.stdout.readline() == "joined\n"
        own.post("/begin_weight_update")
        update = {"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[64]], "group_name": "dying"}
        with ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(own.post, "/update_weights_from_distributed", update)
            time.sleep(0.3)
            os.kill(dying.pid, signal.SIGKILL)
            assert stuck.result().status_code == 400
        assert own.post("/end_weight_update").status_code == 200
        assert own.post("/destroy_weights_update_group", {"group_name": "dying"}).status_code == 200
        assert own.post("/destroy_weights_update_group", {"group_name": "dying"}).status_code == 400
        assert own.generate(ids_of(9), max_new_tokens=5)["output_ids"]
    finally:
        dying.kill()
        dying.wait()


def test_from_disk_is_all_or_nothing(own: Live, other: Path, tmp_path: Path) -> None:
    answer = own.generate(ids_of(25), **GREEDY)
    broken = tmp_path / "broken"
    broken.mkdir()
    refused = own.post("/update_weights_from_disk", {"model_path": str(broken), "weight_version": "b"})
    assert refused.status_code == 400 and "no safetensors" in refused.json()["message"]
    part = weights(other)
    part["model.norm.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    save_file(part, str(broken / "model.safetensors"))
    assert own.post("/update_weights_from_disk", {"model_path": str(broken), "weight_version": "b"}).status_code == 400
    del part["model.norm.weight"]
    save_file(part, str(broken / "model.safetensors"))
    lacking = own.post("/update_weights_from_disk", {"model_path": str(broken), "weight_version": "b"})
    assert lacking.status_code == 400 and "lacks 1 parameters" in lacking.json()["message"]
    same = own.generate(ids_of(25), **GREEDY)
    assert same["output_ids"] == answer["output_ids"] and same["meta_info"]["weight_version"] == "base"
    good = own.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "s@2"})
    assert good.status_code == 200, good.text
    swapped = own.generate(ids_of(25), **GREEDY)
    assert swapped["output_ids"] == reference(other, tmp_path)["output_ids"] != answer["output_ids"]
    assert swapped["meta_info"]["weight_version"] == "s@2" and swapped["meta_info"]["cached_tokens"] == 0


def test_no_prefix_survives_a_change_of_weights(own: Live, other: Path) -> None:
    own.generate(ids_of(100), max_new_tokens=2)
    assert own.generate(ids_of(100), max_new_tokens=2)["meta_info"]["cached_tokens"] > 50
    own.post("/update_weights_from_disk", {"model_path": str(other), "flush_cache": False})
    assert own.generate(ids_of(100), max_new_tokens=2)["meta_info"]["cached_tokens"] == 0


async def test_pushes_under_load_lose_no_request(own: Live, tiny: Path, other: Path) -> None:
    """Eight clients ask without a break while weights change four times; each answer is whole and names its weights."""
    import httpx

    async with httpx.AsyncClient(base_url=own.url, timeout=60) as http:
        stop = asyncio.Event()
        replies: list[dict] = []

        async def client(seed: int) -> None:
            while not stop.is_set():
                body = {
                    "input_ids": ids_of(20, seed),
                    "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
                }
                answer = await http.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                replies.append(answer.json())

        clients = [asyncio.ensure_future(client(seed)) for seed in range(8)]
        for step, folder in enumerate([other, tiny, other, tiny]):
            await asyncio.sleep(0.3)
            await http.post("/pause_generation", json={"mode": "retract"})
            body = {"model_path": str(folder), "weight_version": f"s@{step}"}
            assert (await http.post("/update_weights_from_disk", json=body)).status_code == 200
            await http.post("/continue_generation", json={})
        stop.set()
        await asyncio.gather(*clients)
    assert all(reply["meta_info"]["finish_reason"] == {"type": "length", "length": 40} for reply in replies)
    assert {reply["meta_info"]["weight_version"] for reply in replies} >= {"s@0", "s@1", "s@2", "s@3"}
    for reply in replies:
        edge = 0
        for span in reply["meta_info"]["weight_versions"]:
            assert span["start"] == edge
            edge = span["end"]
        assert edge == 40
