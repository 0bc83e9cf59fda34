"""Getting the agent itself: an exact version, in a prefix of its own, with a Node that can run it.

Package managers are kept inside: their caches and logs go into the prefix and are removed, nothing global is written, install
scripts do not run. A version that is there and answers is not installed again.
"""

from __future__ import annotations

import base64
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .store import Place, Refused, get_json, put, put_json

LIMIT_S = 1800
MARK = "reef-installed.json"


def program(place: Place, plan: Mapping[str, Any]) -> Path:
    """The file to start: the launcher, or the platform's own binary when the launcher is a stub."""
    root = place.agent(plan["version"])
    if plan.get("native"):
        native = root / str(plan["native"]).replace("{platform}", platform_name())
        if native.is_file():
            return native
    return root / str(plan["program"])


def runner(plan: Mapping[str, Any]) -> list[str]:
    """What has to stand before the program: this Python for Python archives, else nothing."""
    return [python(), "-I"] if str(plan["program"]).endswith(".pyz") else []


def ensure(place: Place, plan: Mapping[str, Any], bundled: Mapping[str, str], environment: Mapping[str, str], say: Any) -> bool:
    """Install the agent unless this exact version is there already; True when something was installed."""
    root = place.agent(plan["version"])
    mark = {"package": plan["package"], "version": plan["version"]}
    if plan["manager"] == "bundled":
        data = base64.b64decode(bundled[plan["package"]])
        return put(root / plan["program"], data, 0o755)
    if get_json(root / MARK) == mark and program(place, plan).exists():
        return False
    root.mkdir(parents=True, exist_ok=True)
    say(f"installing {plan['package']} {plan['version']} into {root}")
    try:
        if plan["manager"] == "npm":
            _npm(place, plan, root, environment, say)
        else:
            _pypi(plan, root, environment)
    finally:
        shutil.rmtree(root / ".cache", ignore_errors=True)
    if not program(place, plan).exists():
        raise Refused(f"{plan['package']} was installed but {plan['program']} is missing", f"see {root}")
    put_json(root / MARK, mark)
    return True


def node_folder(place: Place, plan: Mapping[str, Any]) -> Path | None:
    """The folder of a private Node, when one was installed."""
    found = place.adapter / "node" / "node_modules" / f"node-{platform_name()}" / "bin"
    return found if plan.get("node") and (found / "node").exists() else None


def preflight(plan: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """What has to be on the machine before anything is written."""
    if sys.platform not in ("linux", "darwin"):
        raise Refused(f"only Linux and macOS are supported, this is {sys.platform}")
    path = environment.get("PATH")
    if plan["manager"] == "npm" and shutil.which("npm", path=path) is None:
        raise Refused("npm is missing", "install Node.js with npm; Reef brings a newer Node by itself when the agent needs one")
    need = plan.get("python", "3.9")
    if plan["manager"] == "pypi" and sys.version_info < tuple(int(part) for part in need.split(".")):
        raise Refused(
            f"the agent needs Python {need} or newer, this is {platform.python_version()}", "set REEF_PYTHON to a newer one"
        )


def python() -> str:
    """An interpreter that stays: not one of a virtual environment that may be deleted."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def platform_name() -> str:
    """npm's name of this platform, such as linux-x64."""
    machine = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    return f"{sys.platform}-{machine}"


def _npm(place: Place, plan: Mapping[str, Any], root: Path, environment: Mapping[str, str], say: Any) -> None:
    if plan.get("node") and not _node_is(plan["node"], environment):
        prefix = place.adapter / "node"
        if node_folder(place, plan) is None:
            say(f"this machine's Node is older than {plan['node']}; installing one into {prefix}")
            _install(prefix, f"node-{platform_name()}@{plan['node_package']}", environment)
            shutil.rmtree(prefix / ".cache", ignore_errors=True)
    _install(root, f"{plan['package']}@{plan['version']}", environment)


def _install(prefix: Path, spec: str, environment: Mapping[str, str]) -> None:
    prefix.mkdir(parents=True, exist_ok=True)
    inside = {
        **environment,
        "npm_config_cache": str(prefix / ".cache"),
        "npm_config_update_notifier": "false",
        "npm_config_prefix": str(prefix),
    }
    command = [
        "npm",
        "install",
        "--prefix",
        str(prefix),
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--no-save",
        "--loglevel=error",
        spec,
    ]
    _run(command, inside, prefix)


def _pypi(plan: Mapping[str, Any], root: Path, environment: Mapping[str, str]) -> None:
    inside = {
        **environment,
        "PIP_CACHE_DIR": str(root / ".cache"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONNOUSERSITE": "1",
    }
    _run([python(), "-m", "venv", str(root / "venv")], inside, root)
    _run(
        [str(root / "venv" / "bin" / "python"), "-m", "pip", "install", "-q", f"{plan['package']}=={plan['version']}"],
        inside,
        root,
    )


def _run(command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{command[0]} could not run: {error}") from error
    if done.returncode != 0:
        tail = done.stdout.decode(errors="replace").strip().splitlines()[-5:]
        raise Refused(f"{' '.join(command[:2])} failed with status {done.returncode}", "\n".join(tail))


def _node_is(least: str, environment: Mapping[str, str]) -> bool:
    found = shutil.which("node", path=environment.get("PATH"))
    if found is None:
        return False
    try:
        out = subprocess.run(
            [found, "-v"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
        ).stdout.decode()
    except (OSError, subprocess.TimeoutExpired):
        return False
    numbers = [int(part) for part in re.findall(r"\d+", out)[:3]]
    return numbers >= [int(part) for part in least.split(".")]


def search_path(place: Place, plan: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """PATH for the agent, with its private Node in front; a bare environment still finds the system's programs."""
    present = environment.get("PATH") or "/usr/local/bin:/usr/bin:/bin"
    folder = node_folder(place, plan)
    return os.pathsep.join([str(folder), present]) if folder else present
