"""The job ledger seen from outside the server: read-only looks, and a gate that holds a job in a state.

The server writes every transition before its side effect, in a transaction. Whoever holds SQLite's write lock therefore keeps
a job in its present state while side effects go on, which makes moments of a few milliseconds reachable for a `kill -9`,
with no hook in the product.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATES = ("reserved", "training", "candidate", "evaluating", "decided", "publishing", "loaded")


@dataclass(frozen=True)
class Ledger:
    """The experience database of a home."""

    path: Path

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Empty while the database is not there yet."""
        if not self.path.exists():
            return []
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=10)) as connection:
            return connection.execute(query, values).fetchall()

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, oldest first."""
        names = ("seq", "id", "scenario", "state", "outcome", "reason", "release_id", "content_id")
        return [dict(zip(names, row, strict=True)) for row in self.rows(f"SELECT {', '.join(names)} FROM jobs ORDER BY seq")]

    def open_jobs(self) -> list[dict[str, Any]]:
        return [job for job in self.jobs() if job["state"] not in ("settled", "failed")]

    def settled(self) -> int:
        return sum(job["state"] == "settled" for job in self.jobs())

    def samples(self) -> dict[str, str]:
        """State of every report's sample."""
        return dict(self.rows("SELECT report_id, state FROM sample_state"))

    def history(self, job_id: str) -> list[str]:
        """The states a job went through."""
        return [row[0] for row in self.rows("SELECT state FROM job_events WHERE job_id = ? ORDER BY seq", job_id)]

    @contextmanager
    def held(self, state: str, limit_s: float) -> Iterator[None]:
        """Hold the newest job in exactly `state`: while the body runs no transition can be written.

        A moment may be missed; another job's is waited for then. Raises `TimeoutError` when none was caught.
        """
        with closing(sqlite3.connect(self.path, timeout=0, isolation_level=None)) as connection:
            _catch(connection, state, limit_s)
            try:
                yield
            finally:
                connection.execute("ROLLBACK")


def _catch(connection: sqlite3.Connection, state: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    before = (None, *STATES)[STATES.index(state)]
    pause = 0.0005
    while time.monotonic() < deadline:
        with suppress(sqlite3.OperationalError):  # the server writes just now
            connection.execute("BEGIN IMMEDIATE")
            row = connection.execute("SELECT state FROM jobs ORDER BY seq DESC LIMIT 1").fetchone()
            if row and row[0] == state:
                return
            connection.execute("ROLLBACK")
            # Next comes the state that is wanted, perhaps for a millisecond.
            pause = 0.0 if row and row[0] == before else 0.0005
        time.sleep(pause)
    raise TimeoutError(f"no job was caught in {state} within {limit_s:g} s")
