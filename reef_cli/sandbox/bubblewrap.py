"""The walls every sandbox of Reef shares: own network, processes, users and mounts; the system read-only, nothing else.

Without bubblewrap a caller refuses its work; nothing is ever quietly run in the open.
"""

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from reef_cli.core.errors import MissingDependency

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
_SETTINGS = "--unshare-all --die-with-parent --new-session --uid 1000 --gid 1000 --hostname reef"


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
    if done.returncode == 0:
        return None
    return f"bwrap cannot make namespaces here: {done.stderr.decode(errors='replace').strip()[:200]}"


def missing(what: str, reason: str, otherwise: str = "") -> MissingDependency:
    """The error of whoever needs the sandbox and has `reason` why there is none."""
    hint = f"install bubblewrap (Debian: apt-get install bubblewrap){otherwise}"
    return MissingDependency(f"{what} need a sandbox on this machine", why=reason, hint=hint)


def walls(readable: Iterable[Path] = ()) -> list[str]:
    """The beginning of a bwrap command: namespaces, the system and `readable` read-only, empty `/tmp` and `/run`."""
    out = ["bwrap", *_SETTINGS.split()]
    for path in _SYSTEM:
        if Path(path).is_symlink():
            out += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            out += ["--ro-bind", path, path]
    out += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"]
    for path in dict.fromkeys(str(item.resolve()) for item in readable):
        if not path.startswith("/usr/"):
            out += ["--ro-bind", path, path]
    return out
