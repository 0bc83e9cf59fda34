"""Structured logs: one JSON object a line in `<home>/logs/reef.log`, rotated, mode 0600, without secrets.

Every line is masked as a whole after formatting (message, extra fields and traceback alike), so a secret cannot slip through a
field nobody thought of. Bodies are never logged. Knows nothing of what is logged.
"""

import logging
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import orjson

from reef_cli.telemetry.secrets import mask

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}
_MAX_BYTES = 16 * 1024 * 1024
_KEEP = 5


class Secrets:
    """The secrets known to this process; more may be added while it runs. Short ones are ignored: they would mask words."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known: set[str] = set()
        for secret in known:
            self.add(secret)

    def add(self, secret: str) -> None:
        if len(secret.strip()) >= 6:
            self._known.add(secret.strip())

    def mask(self, text: str) -> str:
        # The longest first: one secret may contain another.
        return mask(text, sorted(self._known, key=len, reverse=True))


class JsonLines(logging.Formatter):
    """`{"at", "level", "logger", "message", ...extra, "traceback"?}` on one line, masked."""

    def __init__(self, secrets: Secrets) -> None:
        super().__init__()
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._secrets.mask(record.getMessage()),
        }
        for name, value in record.__dict__.items():
            if name not in _STANDARD and name not in line:
                line[name] = self._clean(value)
        if record.exc_info:
            line["traceback"] = self._secrets.mask(self.formatException(record.exc_info))
        return orjson.dumps(line, default=str).decode()

    def _clean(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        return self._secrets.mask(value if isinstance(value, str) else str(value))


class PrivateRotatingFile(RotatingFileHandler):
    """A rotating file nobody else may read."""

    def _open(self) -> Any:
        handle = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(handle, self.mode, encoding=self.encoding, errors=self.errors)


def setup(home: Path, level: str = "info", secrets: Secrets | None = None) -> logging.Handler:
    """Send the `reef` loggers and warnings of libraries to the log file; returns the handler for `close`.

    The `reef` logger takes `level`, everything else `warning`. Safe to call once per process and home.
    """
    folder = home / "logs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = PrivateRotatingFile(folder / "reef.log", maxBytes=_MAX_BYTES, backupCount=_KEEP, encoding="utf-8")
    handler.setFormatter(JsonLines(secrets or Secrets()))
    root = logging.getLogger()
    root.addHandler(handler)
    for name in ("reef", "reef_cli"):
        logging.getLogger(name).setLevel(level.upper())
    return handler


def close(handler: logging.Handler) -> None:
    """Detach what `setup` attached and close the file."""
    logging.getLogger().removeHandler(handler)
    handler.close()
