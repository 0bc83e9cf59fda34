"""Runs `reef` as a person does: its own process, its own home, a small environment."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Reef:
    """A working folder with what a person has set in their shell."""

    cwd: Path
    env: dict[str, str]

    def __call__(self, *words: str, stdin: str = "", env: dict[str, str] | None = None) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "reef_cli", *words],
            cwd=self.cwd,
            env={**self.env, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


def shell_at(cwd: Path, **env: str) -> Reef:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
    return Reef(cwd, {**kept, "HOME": str(cwd), **env})
