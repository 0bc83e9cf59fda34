"""The embedded engine's command line: SGLang's flag names where SGLang has the flag, Reef's own for the rest.

Keys may also come from the environment (`REEF_ENGINE_API_KEY`, `REEF_ENGINE_ADMIN_API_KEY`), which keeps them out of process
listings.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

API_KEY_VARIABLE = "REEF_ENGINE_API_KEY"
ADMIN_KEY_VARIABLE = "REEF_ENGINE_ADMIN_API_KEY"


@dataclass(frozen=True, slots=True)
class Options:
    """Checked command line; times in seconds, lengths in tokens."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str = ""
    weight_version: str = "default"
    dtype: str = "bfloat16"
    threads: int | None = None
    max_running_requests: int = 16
    prefix_slots: int = 16
    context_length: int | None = None
    chunked_prefill_size: int = 256
    max_lora_rank: int = 64
    api_key: str | None = None
    admin_api_key: str | None = None
    incremental_streaming_output: bool = False
    group_timeout: float = 120.0
    health_timeout: float = 20.0
    parent_pid: int | None = None
    skip_invariance_check: bool = False


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options of a command line; exits with code 2 on a wrong one, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m reef_cli.engines.embedded", description=__doc__)
    parser.add_argument("--model-path", "--model", required=True, help="Hugging Face folder with safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 picks a free port, printed when listening")
    parser.add_argument("--served-model-name", default="", help="name in /v1/models; the path when absent")
    parser.add_argument("--weight-version", default="default", help="label of the weights at start")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, help="CPU threads of the torch thread")
    parser.add_argument("--max-running-requests", type=int, default=16)
    parser.add_argument("--prefix-slots", type=int, default=16, help="finished requests whose keys stay for reuse")
    parser.add_argument("--context-length", type=int, help="prompt plus answer; the model's own capped at 4096 when absent")
    parser.add_argument("--chunked-prefill-size", type=int, default=256, help="prompt tokens of one step")
    parser.add_argument("--max-lora-rank", type=int, default=64)
    parser.add_argument("--api-key", default=os.environ.get(API_KEY_VARIABLE))
    parser.add_argument("--admin-api-key", default=os.environ.get(ADMIN_KEY_VARIABLE))
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--group-timeout", type=float, default=120.0, help="longest wait for a weight-update peer")
    parser.add_argument("--health-timeout", type=float, default=20.0, help="longest silence /health accepts")
    parser.add_argument("--parent-pid", type=int, help="exit when this process is no longer the parent")
    parser.add_argument("--skip-invariance-check", action="store_true", help="do not measure batch invariance at start")
    return Options(**vars(parser.parse_args(argv)))
