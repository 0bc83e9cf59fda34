"""Ad-hoc SQL over an experience log, read-only, beside a running server or without one (sqlite-utils).

Bodies are stored as differences, so plain tables do not show them. Two views and one function say what people ask for:

- `experience`: a row per record, as `GET .../records` lists them, with the names of scenario and session;
- `feedback`: a row per receipt a report cites: its score and words, and the release and model of the answer;
- `document(sequence)`: the whole record as JSON, for `json_extract`; NULL when its bodies were evicted.

An authorizer lets nothing but reading through; a statement cannot attach, write, or load.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from reef_cli.core.errors import InvalidRequest, NotFoundError, StorageError
from reef_cli.experience.codec import to_document
from reef_cli.experience.model import RecordRow
from reef_cli.experience.query import COLUMNS, FROM, get

_NAMES = ", ".join(RecordRow.__dataclass_fields__)
VIEWS = {
    "experience": f"WITH rows ({_NAMES}) AS (SELECT {COLUMNS} {FROM} WHERE sc.archived_at IS NULL) SELECT * FROM rows",
    "feedback": """
        SELECT p.seq AS sequence, p.id AS report, r.id AS receipt, sc.name AS scenario, p.created_at AS created_at,
               p.score AS score, json_extract(n.meta, '$.feedback') AS feedback,
               r.release_id AS release_id, r.model AS model, s.key AS session
        FROM citations c JOIN records p ON p.seq = c.report_seq JOIN records r ON r.seq = c.record_seq
        JOIN scenarios sc ON sc.id = p.scenario_id
        LEFT JOIN payloads n ON n.seq = p.seq LEFT JOIN sessions s ON s.id = r.session_id
        WHERE sc.archived_at IS NULL""",
}
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
_STEPS_BETWEEN_SIGNALS = 100_000


@dataclass(frozen=True, slots=True)
class Answer:
    """Columns and rows of a query; `more` when the limit cut it."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool


@contextmanager
def opened(path: Path) -> Iterator[Database]:
    """The log at `path` with its views and `document`. `NotFoundError` when there is none, `StorageError` when it is no log."""
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", why="nothing was recorded there yet", hint="start it once: reef serve")
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        with closing(_connect(uri)) as connection, closing(_connect(uri)) as bodies:
            for name, select in VIEWS.items():
                connection.execute(f"CREATE TEMP VIEW {name} AS {select}")
            database = Database(connection)
            database.register_function(_documents(bodies), name="document")
            connection.execute("PRAGMA query_only = 1")
            connection.set_authorizer(_only_reading)
            # A callback now and then lets Ctrl-C end a long query.
            connection.set_progress_handler(lambda: 0, _STEPS_BETWEEN_SIGNALS)
            yield database
    except sqlite3.DatabaseError as error:
        raise StorageError(f"cannot read {path}", why=str(error), hint="reef doctor") from error


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def query(path: Path, statement: str, limit: int) -> Answer:
    """At most `limit` rows of one SELECT over the log at `path`. `InvalidRequest` says what SQLite found wrong."""
    with opened(path) as database:
        try:
            cursor = database.conn.execute(statement)
            rows = cursor.fetchmany(limit + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            hint = "one SELECT over the tables that `reef records tables` lists"
            raise InvalidRequest("the query cannot be answered", why=str(error), hint=hint) from error
        if not cursor.description:
            raise InvalidRequest("the query is empty", hint="one SELECT, as in: SELECT count(*) FROM experience")
        columns = tuple(name for name, *_ in cursor.description)
    return Answer(columns, rows[:limit], len(rows) > limit)


def tables(path: Path) -> dict[str, list[str]]:
    """Columns of every view and table, the views first."""
    with opened(path) as database:
        names = [*VIEWS, *sorted(name for name in database.table_names() if not name.startswith(("_", "sqlite_")))]
        selects = {name: database.conn.execute(f"SELECT * FROM {name} LIMIT 0").description for name in names}
    return {name: [column for column, *_ in described] for name, described in selects.items()}


def _documents(bodies: sqlite3.Connection) -> Any:
    def document(sequence: int) -> str | None:
        row = bodies.execute(f"SELECT sc.name, r.id {FROM} WHERE r.seq = ?", (sequence,)).fetchone()
        record = get(bodies, *row) if row else None
        return None if record is None else json.dumps(to_document(record), ensure_ascii=False)

    return document


def _only_reading(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY
