"""The command lines of local engines: what `reef serve` starts from its settings, as pure functions.

Keys reach the embedded engine through the environment and SGLang through a 0600 configuration file, so they stay out of
process listings.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from reef_cli.config.schema import EngineSettings
from reef_cli.engines.process import Launch
from reef_cli.engines.serving import BASE

_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def embedded(settings: EngineSettings, model_dir: Path, port: int, log_path: Path) -> Launch:
    """The embedded engine on a loopback port, tied to this process's life."""
    flags: dict[str, Any] = {
        "model-path": model_dir,
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": settings.model,
        "weight-version": BASE,
        "dtype": settings.dtype,
        "threads": settings.threads,
        "max-running-requests": settings.max_running_requests,
        "context-length": settings.context_length,
        "max-lora-rank": settings.max_lora_rank,
        "parent-pid": os.getpid(),
        "incremental-streaming-output": True,
    }
    launch = Launch(
        command=[sys.executable, "-m", "reef_cli.engines.embedded", *_flags(flags)],
        url=f"http://127.0.0.1:{port}",
        weight_version=BASE,
        log_path=log_path,
        start_timeout_s=settings.start_timeout_s,
    )
    return _with_env(launch, {"REEF_ENGINE_API_KEY": launch.api_key, "REEF_ENGINE_ADMIN_API_KEY": launch.admin_key})


def sglang(settings: EngineSettings, model_dir: Path, port: int, log_path: Path, config_path: Path) -> Launch:
    """A real SGLang on a loopback port; `settings.sglang` wins over every flag set here but address and keys."""
    flags: dict[str, Any] = {
        "model-path": model_dir,
        "served-model-name": settings.model,
        "weight-version": BASE,
        "dtype": settings.dtype,
        "sampling-defaults": "openai",
        "context-length": settings.context_length,
        "max-running-requests": settings.max_running_requests,
        "enable-lora": True,
        "max-lora-rank": settings.max_lora_rank,
        "lora-target-modules": list(_LORA_TARGETS),
        "lora-strict-loading": True,
        "incremental-streaming-output": True,
        "random-seed": 0,
    }
    flags |= {key.replace("_", "-"): value for key, value in settings.sglang.items()}
    flags |= {"host": "127.0.0.1", "port": port}
    launch = Launch(
        command=[sys.executable, "-m", "sglang.launch_server", *_flags(flags), "--config", str(config_path)],
        url=f"http://127.0.0.1:{port}",
        weight_version=str(flags["weight-version"]),
        log_path=log_path,
        start_timeout_s=settings.start_timeout_s,
    )
    _write_private(config_path, {"api-key": launch.api_key, "admin-api-key": launch.admin_key})
    return launch


def _flags(values: Mapping[str, Any]) -> list[str]:
    """`--name value`; True is a bare flag, lists repeat their values, None and False are left out."""
    found: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        found.append(f"--{name}")
        if value is not True:
            found.extend(str(each) for each in value) if isinstance(value, list | tuple) else found.append(str(value))
    return found


def _with_env(launch: Launch, env: Mapping[str, str]) -> Launch:
    return replace(launch, env=env)


def _write_private(path: Path, values: Mapping[str, str]) -> None:
    """JSON is YAML, which is what the reader expects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(orjson.dumps(values))
