"""What an engine prints: copied into its log without the keys it was given, its last lines kept to say why it died.

A thread copies, so a busy event loop never holds the engine back. SGLang prints its whole configuration, keys included, which
is why the child does not write into the file itself. The log is set aside once when it has grown, and the older one dropped.
"""

import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

LIMIT_BYTES = 32 * 1024 * 1024
_KEPT_LINES = 400
_CAUSE = re.compile(r"(?:[\w.]+(?:Error|Exception|Interrupt)|.*\berror): \S")
"""The last line of a traceback, or what argparse says."""


class Output:
    """The output of one run of an engine. `fd` is the child's stdout and stderr; call `started` once the child has it."""

    def __init__(self, path: Path, secrets: Sequence[str] = ()) -> None:
        self._path = path
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._read, self.fd = os.pipe()
        self._thread = threading.Thread(target=self._copy, daemon=True, name="engine-log")

    def started(self) -> None:
        """The child has its copy: the log ends when the last process that holds one does."""
        os.close(self.fd)
        self._thread.start()

    def close(self) -> None:
        """Wait for the last words of an engine that has ended."""
        if self._thread.is_alive():
            self._thread.join(2.0)

    def tail(self, count: int = 12) -> list[str]:
        """The last lines that say something."""
        lines = [line.decode(errors="replace").rstrip() for line in tuple(self._lines) if line.strip()]
        return [line[:400] for line in lines[-count:]]

    def cause(self) -> str:
        """The line that names the fault, else the last one: interpreters print much after a traceback."""
        lines = self.tail(_KEPT_LINES) or ["empty log"]
        return next((line for line in reversed(lines) if _CAUSE.match(line)), lines[-1]).strip()

    def _copy(self) -> None:
        with os.fdopen(self._read, "rb") as source, self._open() as log:
            for line in source:
                clean = line
                for secret in self._secrets:
                    clean = clean.replace(secret, b"***")
                self._lines.append(clean)
                log.write(clean)

    def _open(self) -> "_Log":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return _Log(self._path)


class _Log:
    """A file that is set aside as `NAME.1` when it has reached the limit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, line: bytes) -> None:
        self._file.write(line)
        if self._file.tell() > LIMIT_BYTES:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab", buffering=0)
