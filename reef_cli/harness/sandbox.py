"""Where an episode's processes live: a bubblewrap sandbox, or, when a person says so, none (`unsafe`).

The sandbox has its own network (loopback only), processes, users and mounts: the system read-only, the agent read-only, its
home and work folder writable, nothing else. Without bubblewrap an episode is refused, never quietly run in the open.
"""

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reef_cli.core.errors import MissingDependency

MARK = "REEF_EPISODE"
SOCKET, RELAY = "/reef/gateway.sock", "/reef/relay.py"
HOME, WORK = "/reef/home", "/reef/work"
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ssl",
    "/etc/ld.so.cache",
    "/etc/passwd",
    "/etc/group",
)


@dataclass(frozen=True, slots=True)
class Room:
    """The paths of one episode on the host."""

    home: Path
    work: Path
    socket: Path


@functools.cache
def problem() -> str | None:
    """Why the sandbox does not work on this machine, or None. Tried for real, once."""
    if sys.platform != "linux":
        return "bubblewrap needs Linux"
    if shutil.which("bwrap") is None:
        return "the program bwrap is missing"
    probe = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
    try:
        done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (
        None
        if done.returncode == 0
        else f"bwrap cannot make namespaces here: {done.stderr.decode(errors='replace').strip()[:200]}"
    )


def require() -> None:
    """Raise `MissingDependency` when episodes cannot be sandboxed here."""
    reason = problem()
    if reason is not None:
        raise MissingDependency(
            "episodes need a sandbox on this machine",
            why=reason,
            hint="install bubblewrap (Debian: apt-get install bubblewrap), or accept the risk with --unsafe",
        )


def wrap(argv: Sequence[str], room: Room, readable: Iterable[Path], relay: Path) -> list[str]:
    """The command that runs `argv` in a fresh sandbox. The environment is inherited, so that no token is in any argument."""
    out = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--hostname",
        "reef",
    ]
    for path in _SYSTEM:
        if Path(path).is_symlink():
            out += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            out += ["--ro-bind", path, path]
    out += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"]
    for path in dict.fromkeys(str(item.resolve()) for item in readable):
        if not path.startswith("/usr/"):
            out += ["--ro-bind", path, path]
    for source, target in ((room.home, HOME), (room.work, WORK), (room.socket, SOCKET)):
        out += ["--bind", str(source), target]
    out += ["--ro-bind", str(relay), RELAY, "--chdir", WORK]
    return [*out, "--", *argv]


def marked(episode: str) -> list[int]:
    """Processes that carry the episode's mark in their environment, wherever they have moved themselves."""
    wanted = f"{MARK}={episode}".encode()
    found = []
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else []:
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in variables:
                found.append(int(entry.name))
    return found


def kill_all(group: int | None, episode: str) -> None:
    """End an episode's processes: its group first, then whoever left the group but still carries the mark."""
    if group is not None:
        _kill(group, group=True)
    for _ in range(20):
        left = marked(episode)
        if not left:
            return
        for pid in left:
            _kill(pid, group=False)


def _kill(pid: int, group: bool) -> None:
    try:
        os.killpg(pid, signal.SIGKILL) if group else os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
