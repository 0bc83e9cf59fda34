"""Make an environment in which the real SGLang serves on this machine's CPU, for `make test-sglang`.

    python scripts/sglang_env.py              # make it, unless it is there; prints the path of its interpreter

It lies in the cache (`$REEF_CACHE`, else `~/.cache/reef`) under `sglang-<digest of everything that goes into it>`, takes about
3 GB, and is made once. Every package is pinned by `tests/sglang/cpu/constraints.txt` and comes from the configured package
index; two small stand-ins for compiled parts that no index has for CPUs lie beside that file.
Exits 3 with the reason in the last line where the environment cannot be made.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "tests" / "sglang" / "cpu"
PINS = SOURCE / "constraints.txt"
STAND_INS = ("sitecustomize.py", "sgl_kernel")
LEAST_FREE = 6 * 1024**3
LIMIT_S = 600.0
CANNOT = 3
CHECK = "import sglang.srt.entrypoints.http_server, sglang; print(sglang.__version__)"


class CannotMake(Exception):
    """Why the environment is not to be had here."""


def main() -> int:
    try:
        print(make())
    except CannotMake as reason:
        print(f"the SGLang environment cannot be made: {reason}", file=sys.stderr)
        return CANNOT
    return 0


def make() -> Path:
    """The interpreter of the environment. Raises `CannotMake`."""
    place = cache() / f"sglang-{digest()}"
    python = place / "bin" / "python"
    with only_one(place):
        if not (place / ".ready").exists():
            check_machine(place.parent)
            build(place)
            (place / ".ready").touch()
    return python


def cache() -> Path:
    if own := os.environ.get("REEF_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "reef"


def digest() -> str:
    """Of the pins, the stand-ins and the interpreter: a change of any of them makes another environment."""
    found = hashlib.sha256(f"{platform.machine()} {sys.version_info[:2]}".encode())
    for path in [PINS, *sorted(file for name in STAND_INS for file in _files(SOURCE / name))]:
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _files(path: Path) -> Iterator[Path]:
    yield from (path.rglob("*.py") if path.is_dir() else (path,))


@contextmanager
def only_one(place: Path) -> Iterator[None]:
    """Two runs make it once."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_name(place.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise CannotMake(str(error)) from error


def check_machine(folder: Path) -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise CannotMake(f"it is for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        raise CannotMake(f"{folder} has {free / 1e9:.1f} GB free, it needs {LEAST_FREE / 1e9:.1f}")


def build(place: Path) -> None:
    """PyTorch with what it needs, then every pinned package without its own wishes, then the stand-ins."""
    deadline = time.monotonic() + LIMIT_S
    say(f"making the SGLang environment in {place} (about 3 GB, some minutes)")
    run(deadline, sys.executable, "-m", "venv", "--clear", str(place))
    pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    torch = next(line for line in PINS.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    say("[1/3] PyTorch")
    run(deadline, *pip, "-c", str(PINS), torch)
    say("[2/3] SGLang and what it needs")
    run(deadline, *pip, "--no-deps", "-r", str(PINS))
    say("[3/3] stand-ins, and a first import")
    site = next(place.glob("lib/python3*/site-packages"))
    for name in STAND_INS:
        source, target = SOURCE / name, site / name
        shutil.copytree(source, target, dirs_exist_ok=True) if source.is_dir() else shutil.copy(source, target)
    say(f"SGLang {run(deadline, str(place / 'bin' / 'python'), '-W', 'ignore', '-c', CHECK, SGLANG_USE_CPU_ENGINE='1')}")


def run(deadline: float, *command: str, **environment: str) -> str:
    """One step; the last line of what it printed."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=max(1.0, deadline - time.monotonic()),
            env=os.environ | environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotMake(f"it took more than {LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        fault = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no message")
        raise CannotMake(f"{' '.join(command[1:5])}: {fault}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
