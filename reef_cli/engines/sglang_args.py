"""The installed SGLang: its version, and native flags checked against its own arguments before anything is started.

SGLang lives in an environment of its own (`engine.python`), since it pins other versions than Reef. Asking it for its
arguments takes about ten seconds, so the answer is kept in the cache per interpreter and version.
"""

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ConfigError, MissingDependency

OLDEST = (0, 5, 21)
"""The first version whose weight updates run in sessions, which is what Reef speaks."""
OURS = ("host", "port", "api-key", "admin-api-key", "config", "model", "model-path", "weight-version")
"""Flags that belong to Reef: addresses and keys, and what it must know to tell its own engine from another."""
ALONE = {"dp-size": "engines that share one address", "pp-size": "layers spread over processes"}
"""Flags whose only servable value is 1: SGLang cannot take weights otherwise."""
_PROBE = Path(__file__).with_name("sglang_probe.py")
_VERSION = "from importlib.metadata import version; print(version('sglang'))"
_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Installed:
    """An SGLang and its own command-line options; none where they were not asked for."""

    version: str
    options: Mapping[str, Mapping[str, Any]]


def interpreter(python: str | None) -> str:
    """The interpreter of SGLang's environment: `engine.python`, else Reef's own. A folder means an environment."""
    if python is None:
        return sys.executable
    path = Path(python).expanduser()
    return str(path / "bin" / "python" if path.is_dir() else path)


def inspect(python: str, cache: Path, env: Mapping[str, str], *, options: bool = True) -> Installed:
    """Look at the SGLang of an interpreter. Raises `MissingDependency` when there is none or it is too old."""
    version = _ask(python, ["-c", _VERSION], env)
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if found < OLDEST:
        raise MissingDependency(
            f"SGLang {version} is too old", why="its weight updates know no sessions", hint="install sglang 0.5.21 or newer"
        )
    return Installed(version, _options(python, version, cache, env) if options else {})


def check(native: Mapping[str, Any], installed: Installed) -> None:
    """Every flag of `engine.sglang` is one SGLang has, with a value it takes. Raises `ConfigError` with all that are not."""
    faults = [fault for name, value in native.items() for fault in _faults(name.replace("_", "-"), value, installed)]
    if faults:
        message, hint = faults[0]
        why = "; ".join(text for text, _ in faults[1:])
        raise ConfigError(message, why=f"and {why}" if why else "", hint=hint, key="engine.sglang")


def flags(values: Mapping[str, Any], installed: Installed | None = None) -> list[str]:
    """`--name value`; True stands alone, lists repeat their values, objects are JSON. None and False are left out, but
    False is said where the option has a `--no-` form."""
    found: list[str] = []
    for name, value in values.items():
        if value is False and installed is not None and installed.options.get(name, {}).get("kind") == "pair":
            found.append(f"--no-{name}")
        if value is None or value is False:
            continue
        found.append(f"--{name}")
        if isinstance(value, list | tuple):
            found.extend(_word(each) for each in value)
        elif value is not True:
            found.append(_word(value))
    return found


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _faults(name: str, value: Any, installed: Installed) -> Iterator[tuple[str, str]]:
    if name in OURS:
        yield f"engine.sglang.{name} is Reef's own to set", "leave it out; the model is engine.model"
        return
    if name in ALONE and value not in (None, 1):
        yield f"engine.sglang.{name} must be 1: {ALONE[name]} cannot be given new weights", "leave it out"
        return
    option = installed.options.get(name)
    if option is None:
        near = difflib.get_close_matches(name, installed.options, 1)
        hint = f"did you mean {near[0]}?" if near else "see: python -m sglang.launch_server --help"
        yield f"engine.sglang.{name} is no flag of SGLang {installed.version}", hint
    elif option["kind"] in ("switch", "pair") and not isinstance(value, bool):
        yield f"engine.sglang.{name} is a switch", "give true or false"
    elif isinstance(value, bool) and option["kind"] == "value":
        yield f"engine.sglang.{name} needs a value, not {str(value).lower()}", "give a value, or leave it out"
    elif option["choices"] and not isinstance(value, list) and str(value) not in option["choices"]:
        yield f"engine.sglang.{name} cannot be {value!r}", f"one of {', '.join(option['choices'])}"


def _options(python: str, version: str, cache: Path, env: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    key = hashlib.sha256(f"{python}\0{version}\0{_PROBE.read_text(encoding='utf-8')}".encode()).hexdigest()[:16]
    kept = cache / f"sglang-arguments-{key}.json"
    try:
        options: Mapping[str, Mapping[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        text = _ask(python, ["-W", "ignore", str(_PROBE)], env)
        options = json.loads(text)
        cache.mkdir(parents=True, exist_ok=True)
        kept.write_text(text, encoding="utf-8")
    return options


def _ask(python: str, words: list[str], env: Mapping[str, str]) -> str:
    """The last line that the interpreter prints."""
    try:
        done = subprocess.run(
            [python, *words], capture_output=True, text=True, timeout=_TIMEOUT_S, env=os.environ | dict(env), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependency(
            f"Cannot ask {python} for its SGLang", why=str(error), hint="engine.python names the interpreter that has it"
        ) from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise MissingDependency(
            f"SGLang is not usable in {python}",
            why=lines[-1],
            hint="pip install sglang in an environment of its own, and name its interpreter in engine.python",
        )
    return (done.stdout.strip().splitlines() or [""])[-1]
