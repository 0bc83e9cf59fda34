"""Pooled read-only connections, each use of one with its own snapshot. Any thread may read; no reader waits for the writer."""

import queue
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reef_cli.core.errors import Draining
from reef_cli.experience.writer import storage_error

_KEPT = 8


class Readers:
    """A pool that grows on demand and keeps a few connections open."""

    def __init__(self, path: Path) -> None:
        self._uri = f"{path.resolve().as_uri()}?mode=ro"
        self._idle: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue(maxsize=_KEPT)
        self._closed = threading.Event()

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection inside a read transaction: everything read through it is of one moment."""
        if self._closed.is_set():
            raise Draining("the experience log is closed", hint="the server is shutting down; try again later")
        connection = self._take()
        try:
            connection.execute("BEGIN")
            yield connection
        except sqlite3.Error as error:
            raise storage_error(error) or error from error
        finally:
            self._give(connection)

    def _take(self) -> sqlite3.Connection:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            connection = sqlite3.connect(self._uri, uri=True, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA busy_timeout = 10000")
            connection.execute("PRAGMA query_only = 1")
            return connection

    def _give(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        try:
            if self._closed.is_set():
                raise queue.Full
            self._idle.put_nowait(connection)
        except queue.Full:
            connection.close()

    def close(self) -> None:
        """Close idle connections; those in use close when they are given back."""
        self._closed.set()
        while not self._idle.empty():
            self._idle.get_nowait().close()
