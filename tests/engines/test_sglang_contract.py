"""Every request Reef sends to SGLang, held against the field lists of the package's own types (recorded, with its version).

`tests/sglang/test_recorded.py` compares the recording with the installed package.
"""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from reef_cli.config.schema import EngineSettings
from reef_cli.core.errors import ConfigError
from reef_cli.core.ports import Sampling
from reef_cli.engines import launch, sglang_args
from reef_cli.engines.client import EngineClient
from reef_cli.engines.generation import request_body
from reef_cli.weights import contract

RECORDED = json.loads((Path(__file__).parent / "contract" / "sglang.json").read_text())
FULL = Sampling(stop=("a",), stop_token_ids=(1,), seed=5, logit_bias={3: 1.0}, top_k=4, min_new_tokens=2)


def faults(path: str, body: dict[str, Any]) -> list[str]:
    """What SGLang would not understand, or would fill in by itself."""
    known = RECORDED["routes"][path]
    unknown = [f"{name} is no field" for name in body if name not in known]
    missing = [f"{name} is required" for name, default in known.items() if default == "required" and name not in body]
    hurting = [
        f"{name} defaults to {known[name]!r}" for name in HURTFUL if known.get(name) not in (None, False) and name not in body
    ]
    return unknown + missing + hurting


HURTFUL = ("abort_all_requests", "abort_all", "flush_cache", "mode", "torch_empty_cache", "selector", "backend", "group_name")
"""Fields whose defaults abort, flush or pick something nobody asked for."""


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        ("/pause_generation", {"mod": "retract"}, ["mod is no field", "mode defaults to 'abort'"]),
        ("/update_weight_version", {}, ["new_version is required", "abort_all_requests defaults to True"]),
        ("/end_weight_update", {"flush": True}, ["flush is no field"]),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, []),
    ],
)
def test_the_comparison_itself_finds_what_is_wrong(path: str, body: dict[str, Any], wrong: list[str]) -> None:
    assert faults(path, body) == wrong


def write_adapter(folder: Path) -> Path:
    from tests.learning.world import write_adapter as write

    write(folder, 1)
    return folder


@pytest.fixture
async def sent() -> AsyncIterator[tuple[EngineClient, list[tuple[str, dict[str, Any]]]]]:
    """A client of a server that notes each call's path and body and agrees to everything."""
    seen: list[tuple[str, dict[str, Any]]] = []

    async def note(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json() if request.can_read_body else {}))
        return web.json_response({"success": True, "per_engine_checksum": "0"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", note)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    async with EngineClient(f"http://127.0.0.1:{port}") as client:
        yield client, seen
    await runner.cleanup()


async def test_every_control_call_is_one_sglang_knows(
    sent: tuple[EngineClient, list[tuple[str, dict[str, Any]]]], tmp_path: Path
) -> None:
    client, seen = sent
    for mode in ("abort", "retract", "in_place"):
        await client.pause(mode)  # type: ignore[arg-type]
    await client.resume()
    await client.abort("a" * 32)
    await client.load_lora("s@r1", Path("/adapter"))
    async with EngineClient(client.base_url, sends_adapters=True) as afar:
        await afar.load_lora("s@r2", write_adapter(tmp_path / "adapter"))
    await client.unload_lora("s@r1")
    await client.init_group("127.0.0.1", 1234, 2, "g", "gloo")
    await client.begin_update()
    await client.update(["a"], ["bfloat16"], [[1]], "g")
    await client.end_update()
    await client.destroy_group("g")
    await client.update_from_disk(Path("/model"), "s@r2")
    await client.set_version("s@r2")
    await client.checksum()
    await client.flush(0)
    await client.release_memory()
    await client.resume_memory()
    wrong = {
        path: found for path, body in seen if path not in ("/flush_cache", "/server_info") and (found := faults(path, body))
    }
    assert not wrong
    assert {path for path, _ in seen} >= set(RECORDED["routes"]) - {"/generate", "/update_weights_from_tensor"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/init_weights_update_group", contract.join_group("127.0.0.1", 1, 2, "g", "gloo")),
        ("/destroy_weights_update_group", contract.leave_group("g")),
        ("/begin_weight_update", contract.BEGIN),
        ("/update_weights_from_distributed", contract.receive(["a"], ["bfloat16"], [[1]], "g")),
        ("/update_weights_from_tensor", contract.take_tensors(["x"], "flattened_bucket")),
        ("/end_weight_update", contract.END),
        ("/update_weights_from_disk", contract.read_disk("/model", "v")),
        ("/update_weight_version", contract.label("v")),
    ],
)
def test_what_the_trainer_sends_is_spelled_out(path: str, body: dict[str, Any]) -> None:
    assert not faults(path, body)


def test_a_generation_has_no_unknown_field_and_every_limit() -> None:
    body = request_body([1, 2], FULL, 9, "s@a", "rid", stream=True)
    assert set(body) <= set(RECORDED["routes"]["/generate"])
    assert set(body["sampling_params"]) <= set(RECORDED["sampling_params"])
    bare = request_body([1], Sampling(), 9, None, "rid", stream=False)["sampling_params"]
    defaults = RECORDED["sampling_params"]
    unsaid = {name for name, value in defaults.items() if value not in (None, [], {}) and name not in bare}
    assert not unsaid, "a default of SGLang's would decide"
    read = {"finish_reason", "completion_tokens", "output_token_logprobs", "weight_versions", "weight_version", "cached_tokens"}
    assert read | {"prompt_tokens"} <= set(RECORDED["meta_info"])


def test_every_flag_of_the_command_line_exists(tmp_path: Path) -> None:
    settings = EngineSettings(kind="sglang", model="m", context_length=512, sglang={"tp_size": 2, "disable_radix_cache": True})
    whole = launch.Whole(shared=True, changes=True)
    made = launch.sglang(settings, tmp_path, 1234, tmp_path / "log", tmp_path / "config.yaml", whole=whole)
    assert {"--enable-memory-saver", "--enable-weights-cpu-backup", "--custom-weight-loader"} <= set(made.command)
    assert (Path(made.env["PYTHONPATH"].split(os.pathsep)[0]) / f"{contract.CHANGES.split('.')[0]}.py").is_file()
    flags = {word for word in made.command if word.startswith("--")}
    assert flags and flags <= set(RECORDED["flags"])
    assert {f"--{name}" for name in sglang_args.OURS} <= set(RECORDED["flags"])
    keys = json.loads((tmp_path / "config.yaml").read_text())
    assert {f"--{name}" for name in keys} <= set(RECORDED["flags"])
    assert not any(value.startswith("-") for value in keys.values()), "SGLang would take it for a flag"


INSTALLED = sglang_args.Installed(
    RECORDED["version"],
    {
        "tp-size": {"kind": "value", "choices": []},
        "disable-radix-cache": {"kind": "switch", "choices": []},
        "lora-strict-loading": {"kind": "pair", "choices": []},
        "device": {"kind": "value", "choices": ["cuda", "cpu"]},
        "lora-target-modules": {"kind": "list", "choices": ["q_proj", "all"]},
        "dp-size": {"kind": "value", "choices": []},
    },
)


@pytest.mark.parametrize(
    ("native", "message", "hint"),
    [
        ({"tp_sise": 2}, "tp-sise is no flag of SGLang 0.5.23", "did you mean tp-size?"),
        ({"disable_radix_cache": "yes"}, "is a switch", "true or false"),
        ({"tp_size": True}, "needs a value", "give a value"),
        ({"device": "tpu"}, "cannot be 'tpu'", "cuda, cpu"),
        ({"api_key": "k"}, "Reef's own", "leave it out"),
        ({"port": 1}, "Reef's own", "leave it out"),
        ({"dp_size": 2}, "must be 1", "leave it out"),
    ],
)
def test_native_flags_are_checked_by_name_kind_and_choice(native: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sglang_args.check(native, INSTALLED)
    assert message in caught.value.message and hint in caught.value.hint


def test_all_faults_are_named_and_good_flags_pass() -> None:
    with pytest.raises(ConfigError, match="tp-sise") as caught:
        sglang_args.check({"tp_sise": 2, "device": "tpu"}, INSTALLED)
    assert "device cannot be 'tpu'" in caught.value.why
    good = {"tp_size": 2, "disable_radix_cache": True, "device": "cpu", "lora_target_modules": ["q_proj"], "dp_size": 1}
    sglang_args.check(good, INSTALLED)


def test_flags_are_written_as_sglang_reads_them() -> None:
    values = {"a": 1, "b": True, "c": False, "d": None, "e": ["x", 2], "f": {"k": 1}, "lora-strict-loading": False}
    assert sglang_args.flags(values, INSTALLED) == [
        *("--a", "1", "--b", "--e", "x", "2", "--f", '{"k": 1}', "--no-lora-strict-loading")
    ]
