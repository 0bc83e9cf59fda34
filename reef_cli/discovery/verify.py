"""Runs a problem's verifier: its own process, its own memory and time, nothing but numbers through a pipe.

A solution that breaks or stalls the verifier is invalid; a verifier that cannot run at all is an `EvaluationError`, which stops
the step: an outage is no score.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef_cli.core.errors import EvaluationError
from reef_cli.discovery.problem import Verdict

# Runs inside, before the verifier: its limits, its arguments, its name.
_LIMITER = """
import resource, runpy, sys
seconds, memory, *sys.argv = sys.argv[1:]
for kind, limit in ((resource.RLIMIT_CPU, int(seconds)), (resource.RLIMIT_AS, int(memory))):
    resource.setrlimit(kind, (limit, limit))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_KNOWN = ("valid", "reason", "value", "strict")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one verification may use."""

    seconds: float = 20.0
    memory_bytes: int = 512 * 1024 * 1024


def verify(command: Sequence[str | Path], solution: Any, limits: Limits | None = None) -> Verdict:
    """The verdict on `solution`. `command` starts with the verifier's script; it runs isolated from the environment."""
    limits = limits or Limits()
    try:
        payload = json.dumps(solution).encode()
    except (TypeError, ValueError, RecursionError):
        return Verdict(False, "is no JSON data")
    bounds = (str(math.ceil(limits.seconds)), str(limits.memory_bytes))
    argv = [sys.executable, "-I", "-S", "-c", _LIMITER, *bounds, *map(str, command)]
    try:
        done = subprocess.run(argv, input=payload, capture_output=True, timeout=limits.seconds, check=False, env={})
    except subprocess.TimeoutExpired:
        return Verdict(False, f"not verified within {limits.seconds:g} s")
    except OSError as error:
        raise EvaluationError("the verifier cannot start", why=str(error)) from error
    if done.returncode < 0:
        return Verdict(False, f"the verifier was stopped by signal {-done.returncode}")
    if done.returncode != 0 and b"MemoryError" in done.stderr:
        return Verdict(False, "the verifier ran out of memory")
    return _read(done.returncode, done.stdout, done.stderr)


def _read(code: int, out: bytes, err: bytes) -> Verdict:
    try:
        said: Mapping[str, Any] = json.loads(out) if code == 0 else {}
        value, strict = float(said["value"]), float(said["strict"])
        verdict = Verdict(said["valid"] is True, str(said["reason"]), value, strict, _rest(said))
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            "the verifier gave no verdict", why=err.decode(errors="replace").strip()[-300:] or str(error)
        ) from error
    if verdict.valid and not (math.isfinite(value) and math.isfinite(strict)):
        raise EvaluationError(f"the verifier gave the value {value}", why="a valid solution has a finite value")
    return verdict


def _rest(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key not in _KNOWN}
