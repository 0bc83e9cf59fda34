"""The deployment's own facts for the status page and the metrics: engine, storage, trainer, age. No secrets."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reef_cli.supervisor.stack import Stack

MEASURE_EVERY_S = 30.0
"""Folders are walked at most this often; the figure carries its age."""


class Status:
    """Snapshots of a stack; cheap enough to be asked every second."""

    def __init__(self, stack: "Stack") -> None:
        self._stack = stack
        self._started = stack.clock.monotonic()
        self._bytes: dict[str, int] = {}
        self._measured = float("-inf")
        self._engine: Mapping[str, Any] = {}

    def snapshot(self) -> Mapping[str, Any]:
        """`{instance, uptime_s, home, engine, trainer, storage, evaluating}`."""
        stack, settings = self._stack, self._stack.settings
        now = stack.clock.monotonic()
        if now - self._measured > MEASURE_EVERY_S:
            self._measured = now
            self._bytes = _sizes(stack.home.root)
        return {
            "instance": stack.instance,
            "pid": os.getpid(),
            "uptime_s": round(now - self._started, 1),
            "home": str(stack.home.root),
            "url": stack.server.url if stack.server else None,
            "engine": {
                "kind": settings.engine.kind,
                "model": settings.engine.served,
                "url": settings.engine.url if settings.engine.kind == "upstream" else None,
                "state": stack.not_ready() or "ready",
                "restarts": stack.engine.restarts if stack.engine else 0,
            },
            "trainer": {"pids": stack.trainer.pids, "starts": stack.trainer.starts} if stack.trainer else None,
            "storage": {**self._bytes, "bytes": sum(self._bytes.values()), "age_s": round(now - self._measured, 1)},
            "evaluating": stack.evaluations.under_way(),
        }


def _sizes(root: Path) -> dict[str, int]:
    """Bytes of the home's parts; names of scenarios do not appear."""
    parts = {
        "experience_bytes": ("experience.db", "experience.db-wal"),
        "releases_bytes": ("releases.git",),
        "checkpoints_bytes": ("checkpoints",),
        "logs_bytes": ("logs",),
    }
    return {name: sum(_size(root / part) for part in paths) for name, paths in parts.items()}


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size  # noqa: PTH118 - os.walk hands out text
            except FileNotFoundError:  # a temporary file that went meanwhile
                continue
    return total
