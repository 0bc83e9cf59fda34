"""The command lines of local engines: what `reef serve` starts from its settings, as pure functions.

Keys reach the embedded engine through the environment and SGLang through a 0600 configuration file, so they stay out of
process listings.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from reef_cli.config.schema import EngineSettings
from reef_cli.engines import guard
from reef_cli.engines.process import Launch, new_keys
from reef_cli.engines.serving import BASE
from reef_cli.engines.sglang_args import Installed, flags, interpreter
from reef_cli.weights import contract, plugin


@dataclass(frozen=True, slots=True)
class Whole:
    """How whole weights reach an engine: from the memory of a GPU it shares with the trainer, or as changed values only."""

    shared: bool = False
    changes: bool = False


_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def embedded(
    settings: EngineSettings, model_dir: Path, port: int, log_path: Path, *, keys: tuple[str, str] | None = None
) -> Launch:
    """The embedded engine on a loopback port, tied to this process's life."""
    values: dict[str, Any] = {
        "model-path": model_dir,
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": settings.name,
        "weight-version": BASE,
        "dtype": settings.dtype,
        "threads": settings.threads,
        "max-running-requests": settings.max_running_requests,
        "context-length": settings.context_length,
        "max-lora-rank": settings.max_lora_rank,
        "parent-pid": os.getpid(),
        "incremental-streaming-output": True,
    }
    api_key, admin_key = keys or new_keys()
    launch = Launch(
        api_key=api_key,
        admin_key=admin_key,
        command=[sys.executable, "-m", "reef_cli.engines.embedded", *flags(values)],
        url=f"http://127.0.0.1:{port}",
        weight_version=BASE,
        log_path=log_path,
        start_timeout_s=settings.start_timeout_s,
    )
    return _with_env(launch, {"REEF_ENGINE_API_KEY": launch.api_key, "REEF_ENGINE_ADMIN_API_KEY": launch.admin_key})


def sglang(
    settings: EngineSettings,
    model_dir: Path,
    port: int,
    log_path: Path,
    config_path: Path,
    *,
    installed: Installed | None = None,
    adapters: bool = True,
    whole: Whole | None = None,
    keys: tuple[str, str] | None = None,
) -> Launch:
    """A real SGLang on a loopback port, tied to this process's life. `settings.sglang` wins over every flag set here but those
    that are Reef's own. `adapters` False leaves LoRA out, which costs time on every token; `whole`: how whole weights come."""
    native = {key.replace("_", "-"): value for key, value in settings.sglang.items()}
    values: dict[str, Any] = {
        "model-path": model_dir,
        "served-model-name": settings.name,
        "weight-version": BASE,
        "dtype": settings.dtype,
        "sampling-defaults": "openai",
        "context-length": settings.context_length,
        "max-running-requests": settings.max_running_requests,
        "incremental-streaming-output": True,
        "random-seed": 0,
        "log-level-http": "warning",
    }
    if adapters:
        values |= {
            "enable-lora": True,
            "max-lora-rank": settings.max_lora_rank,
            "lora-target-modules": list(_LORA_TARGETS),
            "lora-strict-loading": True,
        }
    if whole is not None and whole.shared:
        # Its memory is lent to the trainer for each step, and its weights are kept in the machine's own meanwhile.
        values |= {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
    if whole is not None and whole.changes:
        values["custom-weight-loader"] = [contract.CHANGES]
    values |= native | {"host": "127.0.0.1", "port": port}
    python = interpreter(settings.python)
    program = [python, "-m", "sglang.launch_server", *flags(values, installed), "--config", str(config_path)]
    api_key, admin_key = keys or new_keys()
    launch = Launch(
        api_key=api_key,
        admin_key=admin_key,
        command=[sys.executable, str(Path(guard.__file__)), str(os.getpid()), *program],
        url=f"http://127.0.0.1:{port}",
        weight_version=BASE,
        log_path=log_path,
        env=sglang_env(settings) | ({"PYTHONPATH": _with_plugin()} if whole is not None and whole.changes else {}),
        start_timeout_s=settings.start_timeout_s,
        stop_timeout_s=20.0,
    )
    _write_private(config_path, {"api-key": launch.api_key, "admin-api-key": launch.admin_key})
    return launch


def placed(settings: EngineSettings, number: int) -> EngineSettings:
    """Settings of the `number`th SGLang of several: on GPUs of its own, after those of the ones before it."""
    native = settings.sglang
    if number == 0 or native.get("device") == "cpu":
        return settings
    step = int(native.get("tp_size", native.get("tp-size", 1)))
    first = int(native.get("base_gpu_id", native.get("base-gpu-id", 0)))
    kept = {key: value for key, value in native.items() if key not in ("base_gpu_id", "base-gpu-id")}
    return replace(settings, sglang={**kept, "base_gpu_id": first + number * step})


def sglang_env(settings: EngineSettings) -> dict[str, str]:
    """What SGLang's process needs: the tools beside its interpreter, and no hub, for the model is a folder."""
    beside = str(Path(interpreter(settings.python)).parent)
    env = {
        "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if settings.sglang.get("device") == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    if settings.threads is not None:
        env["OMP_NUM_THREADS"] = str(settings.threads)
    return env


def _with_plugin() -> str:
    """The folder of what runs inside SGLang, before whatever it finds already."""
    return os.pathsep.join(filter(None, [str(Path(plugin.__file__).parent), os.environ.get("PYTHONPATH")]))


def _with_env(launch: Launch, env: Mapping[str, str]) -> Launch:
    return replace(launch, env=env)


def _write_private(path: Path, values: Mapping[str, str]) -> None:
    """JSON is YAML, which is what the reader expects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(orjson.dumps(values))
