"""`reef doctor`: what this machine has, what that means, what to do. Looks only; changes nothing and imports nothing heavy.

Each check is a small function that returns its finding; `fail` means that `reef serve` cannot work, `warn` that something is
weaker than it could be.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from reef_cli.commands import output
from reef_cli.commands.shell import Shell, new_app, with_shell
from reef_cli.config.paths import cache_at
from reef_cli.config.schema import EngineSettings, ReefSettings
from reef_cli.core.errors import ReefError
from reef_cli.core.machine import usable_cores
from reef_cli.supervisor.room import gpus, machine_memory

app = new_app()

_LEAST_FREE = 2 * 1024**3  # the default model and a few releases of it


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


@app.command()
@with_shell(local=True)
def doctor(shell: Shell) -> int:
    """Check this machine and say what to fix; exits 1 when something must be"""
    findings = [finding for check in CHECKS for finding in check(shell)]
    failed = any(finding.status == "fail" for finding in findings)
    rows = [(finding.status, finding.check, finding.detail, finding.fix) for finding in findings]
    data = {"ok": not failed, "checks": [asdict(finding) for finding in findings]}
    shell.emit(data, lambda: output.table(("", "check", "found", "what to do"), rows))
    return ReefError.exit_code if failed else 0


def check_python(_: Shell) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if good else "fail", version, "" if good else "install Python 3.11 or newer")


def check_git(_: Shell) -> Iterator[Finding]:
    version = tool_version("git", "version")
    yield Finding(
        "git", "ok" if version else "fail", version or "not found", "" if version else "install git; releases are commits"
    )
    lfs = tool_version("git-lfs", "version")
    store = "not found; large files go to the content-addressed store in the home, with LFS pointers in git"
    yield Finding(
        "git-lfs", "ok" if lfs else "warn", lfs or store, "" if lfs else "install git-lfs to push releases to an LFS remote"
    )


def check_disk(shell: Shell) -> Iterator[Finding]:
    for name, path in (("disk, home", shell.home.root), ("disk, cache", cache_at(shell.environ))):
        place = existing(path)
        free = shutil.disk_usage(place).free
        good = free >= _LEAST_FREE and os.access(place, os.W_OK)
        detail = f"{output.size(free)} free at {place}" + ("" if os.access(place, os.W_OK) else ", not writable")
        yield Finding(
            name, "ok" if good else "fail", detail, "" if good else "free some space, or move it: REEF_HOME, REEF_CACHE"
        )


def check_port(shell: Shell) -> Iterator[Finding]:
    if shell.running is not None:
        yield Finding("server", "ok", f"runs at {shell.running.url}, process {shell.running.pid}")
        return
    port = ReefSettings().port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ReefSettings().host, port))
        except OSError as error:
            yield Finding("port", "warn", f"{port}: {error.strerror}", "reef serve --reef.port 0 picks a free one")
        else:
            yield Finding("port", "ok", f"{port} is free")


def check_packages(_: Shell) -> Iterator[Finding]:
    for name, extra, use in (
        ("torch", "local", "the embedded engine and the trainer"),
        ("transformers", "local", "the embedded engine"),
        ("tokenizers", "local", "chat templates"),
        ("peft", "local", "LoRA training"),
        ("deepspeed", "train", "training weights"),
    ):
        version = package_version(name)
        fix = "" if version else f"pip install 'reef-cli[{extra}]'; not needed with an upstream engine"
        yield Finding(name, "ok" if version else "warn", version or f"not installed; needed for {use}", fix)
    sglang = package_version("sglang")
    yield Finding("sglang", "ok", sglang or "not installed; only for engine.kind sglang on this machine")


def check_gpu(shell: Shell) -> Iterator[Finding]:
    cards = gpus()
    if not cards:
        yield Finding("gpu", "ok", "none; the embedded engine and the trainer use the CPU")
        return
    driver = (run_tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "?").splitlines()[0]
    shown = "; ".join(f"{card.name}, {output.size(card.memory)}" for card in cards)
    yield Finding("gpu", "ok", f"{shown}; driver {driver}")
    yield from check_gpu_training()
    yield from check_gpu_engine(shell.environ.get("REEF_ENGINE__PYTHON") or sys.executable)


def check_gpu_training() -> Iterator[Finding]:
    """Whether the trainer's packages can use the GPU: torch for CUDA with its NCCL, and DeepSpeed."""
    torch = package_version("torch")
    if torch is None or "+cpu" in torch:
        detail = "torch is not installed" if torch is None else f"torch {torch} is built for the CPU"
        yield Finding("gpu trainer", "warn", detail, "install torch for CUDA, then 'reef-cli[local,train]'")
        return
    nccl = next((version for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if (version := package_version(name))), None)
    detail = (
        f"torch {torch}, NCCL {nccl or 'not found beside torch'}, DeepSpeed {package_version('deepspeed') or 'not installed'}"
    )
    good = nccl is not None and package_version("deepspeed") is not None
    yield Finding("gpu trainer", "ok" if good else "warn", detail, "" if good else "pip install 'reef-cli[local,train]'")


def check_gpu_engine(python: str) -> Iterator[Finding]:
    """SGLang in the interpreter that `engine.python` names; it may be another environment than Reef's."""
    ask = "import importlib.metadata as m; print('sglang', m.version('sglang') + ', torch', m.version('torch'))"
    found = run_tool(python, "-c", ask)
    fix = "" if found else "pip install sglang in an environment of its own and name its interpreter: engine.python"
    yield Finding("gpu engine", "ok" if found else "warn", found or f"no sglang in {python}", fix)


def check_memory(_: Shell) -> Iterator[Finding]:
    total = machine_memory()
    good = total >= 4 * 1024**3
    fix = "" if good else "serve only, or use an upstream engine; training needs about 4 GiB"
    yield Finding("memory", "ok" if good else "warn", f"{output.size(total)}, {usable_cores()} cores", fix)


def check_model(shell: Shell) -> Iterator[Finding]:
    name = EngineSettings().name
    pull = f"reef model pull {name}"
    try:
        from reef_cli.engines.models import ModelStore

        path = ModelStore(cache_at(shell.environ)).resolve(name)
    except ReefError as error:
        yield Finding("model", "warn", error.message, error.hint or pull)
    except ImportError as error:
        yield Finding("model", "warn", f"cannot look: {error}", "pip install 'reef-cli[local]'")
    else:
        yield Finding("model", "ok", f"{name} at {path}")


def check_token(shell: Shell) -> Iterator[Finding]:
    if not shell.home.root.exists():
        yield Finding("home", "ok", f"{shell.home.root} is made on first start")
        return
    mode = shell.home.root.stat().st_mode & 0o777
    yield Finding(
        "home",
        "fail" if mode & 0o077 else "ok",
        f"{shell.home.root}, mode {mode:04o}",
        private_fix(shell.home.root, mode, "700"),
    )
    if not shell.home.token.exists():
        yield Finding("token", "ok", "made on first start")
        return
    mode = shell.home.token.stat().st_mode & 0o777
    yield Finding("token", "fail" if mode & 0o077 else "ok", f"mode {mode:04o}", private_fix(shell.home.token, mode, "600"))


CHECKS: tuple[Callable[[Shell], Iterator[Finding]], ...] = (
    check_python,
    check_git,
    check_disk,
    check_memory,
    check_gpu,
    check_port,
    check_packages,
    check_model,
    check_token,
)


def existing(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    while not path.exists():
        path = path.parent
    return path


def private_fix(path: Path, mode: int, wanted: str) -> str:
    """How to close a path that others can read."""
    return f"chmod {wanted} {path}" if mode & 0o077 else ""


def package_version(name: str) -> str | None:
    """An installed package's version, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tool_version(name: str, *words: str) -> str | None:
    """First line a program prints about its version, or None when it is not there or does not work."""
    found = run_tool(name, *words)
    return found.splitlines()[0] if found else None


def run_tool(*words: str) -> str | None:
    """What a program prints, or None."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
