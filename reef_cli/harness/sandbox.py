"""Where an episode's processes live: a bubblewrap sandbox, or, when a person says so, none (`unsafe`).

The sandbox has its own network (loopback only), processes, users and mounts: the system read-only, the agent read-only, its
home and work folder writable, nothing else. Without bubblewrap an episode is refused, never quietly run in the open.
"""

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reef_cli.sandbox import bubblewrap

MARK = "REEF_EPISODE"
SOCKET, RELAY = "/reef/gateway.sock", "/reef/relay.py"
HOME, WORK = "/reef/home", "/reef/work"


@dataclass(frozen=True, slots=True)
class Room:
    """The paths of one episode on the host."""

    home: Path
    work: Path
    socket: Path


def problem() -> str | None:
    """Why the sandbox does not work on this machine, or None."""
    return bubblewrap.problem()


def require() -> None:
    """Raise `MissingDependency` when episodes cannot be sandboxed here."""
    reason = problem()
    if reason is not None:
        raise bubblewrap.missing("episodes", reason, ", or accept the risk with --unsafe")


def wrap(argv: Sequence[str], room: Room, readable: Iterable[Path], relay: Path) -> list[str]:
    """The command that runs `argv` in a fresh sandbox. The environment is inherited, so that no token is in any argument."""
    out = bubblewrap.walls(readable)
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
