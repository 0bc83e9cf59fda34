"""How a client finds the server of a home: `<home>/run/serve.json`, written by the server when it listens.

The file names the URL, the process, the instance and the token's file. It may outlive its server (`kill -9`), and its pid may
have been given to another process, so a pid counts as alive only when that process is older than the file.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_SLACK_S = 5.0  # boot time from /proc/stat has whole seconds


@dataclass(frozen=True, slots=True)
class Running:
    """A server as it announced itself. `token_file` holds the token, mode 0600; the token itself is never in this file."""

    url: str
    pid: int
    instance: str
    token_file: str | None = None

    def write(self, path: Path) -> None:
        """Publish atomically, readable by the owner only."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        temporary.chmod(0o600)
        temporary.replace(path)


def first_token(text: str) -> str | None:
    """The main token of a token file: the first word of the first line that is no comment."""
    lines = (line.split() for line in text.splitlines())
    return next((words[0] for words in lines if words and not words[0].startswith("#")), None)


def read_running(path: Path) -> Running | None:
    """What the discovery file says, or None when there is none or it is damaged. Says nothing about liveness."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _running(raw) if isinstance(raw, dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _running(raw: Mapping[str, Any]) -> Running:
    token_file = raw.get("token_file") or raw.get("token_path")
    return Running(str(raw["url"]), int(raw["pid"]), str(raw.get("instance", "")), str(token_file) if token_file else None)


def find_live(path: Path) -> Running | None:
    """The live server that wrote `path`, else None."""
    running = read_running(path)
    return running if running is not None and alive(running.pid, path) else None


def alive(pid: int, announced: Path) -> bool:
    """Whether `pid` runs and is the process that wrote `announced`."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # another user's process cannot be the owner of a 0700 home
    started = _started_at(pid)
    try:
        return started is None or started <= announced.stat().st_mtime + _SLACK_S
    except OSError:
        return False


def _started_at(pid: int) -> float | None:
    """Unix time at which a process started, from /proc; None where there is no /proc. Zombies count as gone (inf)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines() if line.startswith("btime"))
    except (OSError, StopIteration):
        return None
    if fields[0] == "Z":
        return float("inf")
    return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def read_token(environ: Mapping[str, str], token_file: Path | None, running: Running | None, home_token: Path) -> str | None:
    """The token to send: `--token-file`, else `REEF_TOKEN`, else the running server's file, else `<home>/token`."""
    if token_file is not None:
        return first_token(token_file.read_text(encoding="utf-8"))
    if environ.get("REEF_TOKEN", "").strip():
        return environ["REEF_TOKEN"].strip()
    candidates = [Path(running.token_file)] if running is not None and running.token_file else []
    for path in (*candidates, home_token):
        try:
            if token := first_token(path.read_text(encoding="utf-8")):
                return token
        except OSError:
            continue
    return None
