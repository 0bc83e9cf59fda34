"""The four tools. Each returns text for the model; a failure is text too, never an exception: the model shall see it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIMIT = 20_000
HIDDEN = ("REEF_TOKEN", "REEF_BASE_URL")


def _schema(name: str, description: str, required: str, **parameters: tuple[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": words} for key, (kind, words) in parameters.items()}
    body = {"type": "object", "properties": properties, "required": required.split()}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}


SCHEMAS = [
    _schema(
        "read",
        "Read a text file.",
        "path",
        path=("string", "File to read"),
        offset=("integer", "First line, from 1"),
        limit=("integer", "Number of lines"),
    ),
    _schema(
        "bash",
        "Run a shell command in the working directory.",
        "command",
        command=("string", "Command"),
        timeout=("number", "Seconds"),
    ),
    _schema(
        "edit",
        "Replace text that occurs exactly once in a file.",
        "path old new",
        path=("string", "File to change"),
        old=("string", "Exact text to replace"),
        new=("string", "Replacement"),
    ),
    _schema(
        "write",
        "Write a whole file, making its folders.",
        "path content",
        path=("string", "File"),
        content=("string", "Content"),
    ),
]


def shorten(text: str) -> str:
    """Long output loses its middle, and says so."""
    if len(text) <= LIMIT:
        return text
    half = LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - LIMIT} characters left out ...]\n{text[-half:]}"


def read(path: str, offset: int = 1, limit: int = 2000) -> str:
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    chosen = lines[max(int(offset), 1) - 1 :][: int(limit)]
    rest = len(lines) - (max(int(offset), 1) - 1) - len(chosen)
    return shorten("".join(chosen)) + (f"\n[{rest} more lines]" if rest > 0 else "")


def write(path: str, content: str) -> str:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content.encode())
    return f"wrote {len(content)} characters to {path}"


def edit(path: str, old: str, new: str) -> str:
    target = Path(path)
    text = target.read_bytes().decode()
    count = text.count(old) if old else 0
    if count != 1:
        return f"error: the text to replace occurs {count} times in {path}; it must occur exactly once"
    target.write_bytes(text.replace(old, new).encode())
    return f"changed {path}"


def bash(command: str, timeout: float = 120.0) -> str:
    """Output and exit status. A command that runs too long is killed together with everything it started."""
    environment = {key: value for key, value in os.environ.items() if key not in HIDDEN}
    child = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        out, _ = child.communicate(timeout=float(timeout))
        tail = "" if child.returncode == 0 else f"\n[exit status {child.returncode}]"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, _ = child.communicate()
        tail = f"\n[killed after {timeout} seconds]"
    return shorten(out.decode(errors="replace")) + tail


TOOLS: Mapping[str, Callable[..., str]] = {"read": read, "bash": bash, "edit": edit, "write": write}


def call(name: str, arguments: Any) -> str:
    """Run one tool call."""
    tool = TOOLS.get(name)
    if tool is None:
        return f"error: no tool is named {name!r}; there are {', '.join(TOOLS)}"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    try:
        return tool(**arguments)
    except (OSError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}: {error}"
