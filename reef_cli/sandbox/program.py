"""One short program in a sandbox, with limits on time, memory, file size and processes; what it printed, bounded.

The folder given is its only writable place besides `/tmp`. The environment is a fixed small one, so that no key of the
server's can be read inside. Blocking: asynchronous callers use a thread.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from reef_cli.sandbox import bubblewrap

# Runs inside: the limits hold for the program and all it starts.
_LIMITER = """
import os, resource, sys
seconds, memory, size, processes = map(int, sys.argv[1:5])
for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
                    (resource.RLIMIT_NPROC, processes), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(kind, (limit, limit))
os.execvp(sys.argv[5], sys.argv[5:])
"""
_OUTPUT_LIMIT = 256 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    seconds: float = 10.0
    memory_bytes: int = 1024 * 1024 * 1024
    file_bytes: int = 64 * 1024 * 1024
    processes: int = 64


@dataclass(frozen=True, slots=True)
class Program:
    """A command with the folders it sees: `writable` and `readable` map paths inside to folders of this machine."""

    argv: Sequence[str]
    writable: Mapping[str, Path] = field(default_factory=dict)
    readable: Mapping[str, Path] = field(default_factory=dict)
    cwd: str = "/tmp"
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended. `code` is negative for a signal; `output` is stdout and stderr, cut in the middle when long."""

    code: int
    output: str
    timed_out: bool = False


def run(program: Program) -> Finished:
    """Run to the end or to the limit. `MissingDependency` without a sandbox; a program's own failure is a result."""
    if (reason := bubblewrap.problem()) is not None:
        raise bubblewrap.missing("programs that models wrote", reason)
    with tempfile.TemporaryFile() as sink:
        child = subprocess.Popen(
            _command(program), stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.STDOUT, env=_environment(program),
            start_new_session=True,
        )  # fmt: skip
        try:
            child.communicate(program.stdin, timeout=program.limits.seconds)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(child)
        return Finished(child.returncode, _read(sink), timed_out)


def _command(program: Program) -> list[str]:
    python = Path(sys.executable).resolve()
    out = bubblewrap.walls([Path(sys.base_prefix), python.parent])
    for inside, folder in program.readable.items():
        out += ["--ro-bind", str(folder.resolve()), inside]
    for inside, folder in program.writable.items():
        out += ["--bind", str(folder.resolve()), inside]
    limits = program.limits
    # Processor time of one process cannot pass the wall time by more than this; the wall clock ends the rest.
    numbers = (int(limits.seconds) + 1, limits.memory_bytes, limits.file_bytes, limits.processes)
    return [*out, "--chdir", program.cwd, "--", str(python), "-I", "-c", _LIMITER, *map(str, numbers), *program.argv]


def _environment(program: Program) -> dict[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", **program.environment}


def _end(child: "subprocess.Popen[bytes]") -> None:
    """The sandbox and everything in it: its processes die with bwrap, whose namespace they live in."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read(sink: IO[bytes]) -> str:
    size = sink.seek(0, os.SEEK_END)
    sink.seek(0)
    if size <= _OUTPUT_LIMIT:
        return sink.read().decode(errors="replace")
    start = sink.read(_OUTPUT_LIMIT // 2)
    sink.seek(size - _OUTPUT_LIMIT // 2)
    return f"{start.decode(errors='replace')}\n[...]\n{sink.read().decode(errors='replace')}"
