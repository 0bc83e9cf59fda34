"""The database's schema as one ordered table of named migrations, and the rules by which they are applied.

Each migration runs once, in a transaction together with its row in `_migrations`; before an existing database is changed
it is copied beside itself. A database that carries a migration this code does not know is refused: newer code wrote it.
Names are never reused and applied migrations never edited.
"""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reef_cli.core.errors import StorageError
from reef_cli.experience import jobs_schema, shadows


@dataclass(frozen=True, slots=True)
class Migration:
    """A named step of the schema."""

    name: str
    apply: Callable[[sqlite3.Connection], None]


COUNTERS = ("inferences", "reports", "instructions", "incomplete", "evicted", "stored_bytes", "naive_bytes")
"""Per scenario, kept by the writer."""


def _scenarios(connection: sqlite3.Connection) -> None:
    """Live names are unique; an archived scenario keeps its row under its label. Counters spare status pages a scan."""
    counters = "".join(f", {name} INTEGER DEFAULT 0" for name in COUNTERS)
    connection.execute(f"""
        CREATE TABLE scenarios (
            id INTEGER PRIMARY KEY,
            name TEXT NOT NULL,
            recipe TEXT,
            mode TEXT NOT NULL,
            paused INTEGER NOT NULL,
            created_at REAL NOT NULL,
            archived_at REAL
            {counters}
        )""")
    connection.execute("CREATE UNIQUE INDEX scenarios_name ON scenarios (name)")


def _sessions(connection: sqlite3.Connection) -> None:
    connection.execute("""
        CREATE TABLE sessions (
            id INTEGER PRIMARY KEY,
            scenario_id INTEGER NOT NULL REFERENCES scenarios (id),
            key TEXT NOT NULL,
            source TEXT NOT NULL,
            tools INTEGER NOT NULL DEFAULT 0,
            started_at REAL NOT NULL,
            last_at REAL NOT NULL,
            records INTEGER NOT NULL DEFAULT 0,
            turns INTEGER NOT NULL DEFAULT 0,
            output_tokens INTEGER NOT NULL DEFAULT 0,
            trainable_tokens INTEGER NOT NULL DEFAULT 0,
            summary TEXT NOT NULL DEFAULT ''
        )""")
    connection.execute("CREATE UNIQUE INDEX sessions_key ON sessions (scenario_id, key)")


def _records(connection: sqlite3.Connection) -> None:
    """`records` are light, kept for ever (also as the tombstone of an evicted record); bodies sit in `payloads`.

    Ids are unique among live scenarios; the writer checks that, since an archived scenario's ids may come back. `chain`
    stands for the messages of the request and `next` for those and the answer (see `chain.py`).
    """
    connection.execute("""
        CREATE TABLE records (
            seq INTEGER PRIMARY KEY,
            id TEXT NOT NULL,
            scenario_id INTEGER NOT NULL REFERENCES scenarios (id),
            kind TEXT NOT NULL,
            created_at REAL NOT NULL,
            digest BLOB NOT NULL,
            session_id INTEGER REFERENCES sessions (id),
            parent INTEGER,
            chain INTEGER,
            next INTEGER,
            body_hash INTEGER,
            role TEXT,
            retry_of INTEGER,
            dialect TEXT,
            model TEXT,
            release_id TEXT,
            weight_version TEXT,
            summary TEXT NOT NULL DEFAULT '',
            score REAL,
            complete INTEGER NOT NULL DEFAULT 1,
            finish TEXT,
            error TEXT,
            prompt_tokens INTEGER NOT NULL DEFAULT 0,
            output_tokens INTEGER NOT NULL DEFAULT 0,
            trainable_tokens INTEGER NOT NULL DEFAULT 0,
            stored_bytes INTEGER NOT NULL DEFAULT 0,
            evicted_at REAL,
            evicted_why TEXT
        )""")
    for statement in (
        "CREATE UNIQUE INDEX records_id ON records (id, scenario_id)",
        "CREATE INDEX records_scenario ON records (scenario_id)",
        "CREATE INDEX records_signals ON records (scenario_id, kind) WHERE kind <> 'inference'",
        "CREATE INDEX records_session ON records (session_id)",
        "CREATE INDEX records_chain ON records (chain, session_id) WHERE chain IS NOT NULL",
        "CREATE INDEX records_next ON records (next, session_id) WHERE next IS NOT NULL",
        "CREATE INDEX records_evicted ON records (scenario_id, evicted_at) WHERE evicted_at IS NOT NULL",
    ):
        connection.execute(statement)


def _payloads(connection: sqlite3.Connection) -> None:
    """Bodies as deltas: each text is `base[:head] + data + base[len - tail:]`; `base` names the payload they refer to."""
    connection.execute("""
        CREATE TABLE payloads (
            seq INTEGER PRIMARY KEY,
            base INTEGER,
            hops INTEGER NOT NULL DEFAULT 0,
            meta BLOB NOT NULL,
            body BLOB, body_head INTEGER, body_tail INTEGER, body_size INTEGER,
            talk BLOB, talk_head INTEGER, talk_tail INTEGER, talk_size INTEGER,
            ids BLOB, ids_head INTEGER, ids_tail INTEGER, ids_size INTEGER,
            logprobs BLOB,
            mask BLOB
        )""")
    connection.execute("CREATE INDEX payloads_base ON payloads (base) WHERE base IS NOT NULL")


def _citations(connection: sqlite3.Connection) -> None:
    connection.execute("""
        CREATE TABLE citations (
            record_seq INTEGER NOT NULL,
            report_seq INTEGER NOT NULL,
            position INTEGER NOT NULL,
            PRIMARY KEY (record_seq, report_seq)
        ) WITHOUT ROWID""")
    connection.execute("CREATE INDEX citations_report ON citations (report_seq, position)")


def _links(connection: sqlite3.Connection) -> None:
    """Links are hashes, so every row of an index over them falls on another page of it: one index instead of two.

    What is looked for by `next` has the `chain` before it, whose newest records come first; `next` tells them apart.
    """
    connection.execute("DROP INDEX records_chain")
    connection.execute("DROP INDEX records_next")
    connection.execute("CREATE INDEX records_links ON records (chain, session_id, seq, next) WHERE chain IS NOT NULL")


MIGRATIONS: tuple[Migration, ...] = (
    Migration("001-scenarios", _scenarios),
    Migration("002-sessions", _sessions),
    Migration("003-records", _records),
    Migration("004-payloads", _payloads),
    Migration("005-citations", _citations),
    Migration("006-jobs", jobs_schema.create),
    Migration("007-sample-groups", jobs_schema.add_groups),
    Migration("008-shadow-answers", shadows.create),
    Migration("009-sample-harness", jobs_schema.add_harness),
    Migration("010-links", _links),
)


def applied(connection: sqlite3.Connection) -> list[str]:
    """Names of the migrations a database carries, in the order they were applied."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = '_migrations'").fetchone() is None:
        return []
    return [str(row[0]) for row in connection.execute("SELECT name FROM _migrations ORDER BY id")]


def migrate(connection: sqlite3.Connection, path: Path, table: tuple[Migration, ...] = MIGRATIONS) -> list[str]:
    """Bring a database up to `table`; returns the names applied now. `connection` must be in autocommit mode.

    Raises `StorageError` when the database is newer than this code, or when a migration fails (nothing of it remains).
    """
    present = applied(connection)
    known = {migration.name for migration in table}
    if unknown := [name for name in present if name not in known]:
        raise StorageError(
            f"{path} was written by a newer version of Reef",
            why=f"it carries schema changes unknown here: {', '.join(unknown)}",
            hint="upgrade reef, or restore the copy made before the upgrade",
        )
    pending = [migration for migration in table if migration.name not in present]
    if present and pending:
        _backup(connection, path, pending[0].name)
    for migration in pending:
        _apply(connection, migration, path)
    return [migration.name for migration in pending]


def _apply(connection: sqlite3.Connection, migration: Migration, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS _migrations (id INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL)"
        )
        migration.apply(connection)
        connection.execute("INSERT INTO _migrations (name, applied_at) VALUES (?, ?)", (migration.name, time.time()))
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise StorageError(f"schema change {migration.name} failed on {path}", why=str(error)) from error


def _backup(connection: sqlite3.Connection, path: Path, before: str) -> None:
    """A consistent copy beside the database, private to its owner, never overwritten."""
    target = path.with_name(f"{path.name}.before-{before}-{int(time.time())}")
    target.touch(mode=0o600, exist_ok=True)
    copy = sqlite3.connect(target)
    try:
        connection.backup(copy)
    finally:
        copy.close()
