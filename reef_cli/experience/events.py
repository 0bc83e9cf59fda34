"""What happened, as one stream over records, job transitions and release events, resumable exactly without a table of its own.

A cursor holds one position per table (`12.3.4`). Each table's rows become visible in the order of its sequence, since there is
one writer, so what lies after a position is exactly what has not been seen. Between tables the order is by time.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

import orjson

from reef_cli.core.errors import InvalidRequest
from reef_cli.experience.model import Event
from reef_cli.experience.query import COLUMNS, FROM, checked_limit, record_row

Position = tuple[int, int, int]
_KINDS: tuple[Literal["record", "job", "release"], ...] = ("record", "job", "release")


def parse_cursor(cursor: str | None) -> Position:
    """Positions of a cursor; None is before everything. Raises `InvalidRequest`."""
    if cursor is None:
        return (0, 0, 0)
    parts = cursor.split(".")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise InvalidRequest("the event cursor is malformed", hint="send the last event's id unchanged, or none")
    return (int(parts[0]), int(parts[1]), int(parts[2]))


def tip(connection: sqlite3.Connection) -> str:
    """The cursor after everything there is now."""
    tables = (("seq", "records"), ("seq", "job_events"), ("seq", "release_events"))
    values = (connection.execute(f"SELECT coalesce(max({c}), 0) FROM {t}").fetchone()[0] for c, t in tables)
    return ".".join(map(str, values))


def events(connection: sqlite3.Connection, cursor: str | None, limit: int, scenario: str | None) -> tuple[list[Event], str]:
    """Up to `limit` events after `cursor`, and the cursor after the last of them."""
    checked_limit(limit)
    position = list(parse_cursor(cursor))
    queues = [
        list(_records(connection, position[0], limit, scenario)),
        list(_jobs(connection, position[1], limit, scenario)),
        list(_releases(connection, position[2], limit, scenario)),
    ]
    found: list[Event] = []
    heads = [0, 0, 0]
    while len(found) < limit:
        ready = [table for table in range(3) if heads[table] < len(queues[table])]
        if not ready:
            break
        table = min(ready, key=lambda index: queues[index][heads[index]][2])
        seq, name, at, data = queues[table][heads[table]]
        heads[table] += 1
        position[table] = seq
        found.append(Event(".".join(map(str, position)), _KINDS[table], name, at, data))
    return found, ".".join(map(str, position))


_Row = tuple[int, str, float, dict[str, Any]]


def _records(connection: sqlite3.Connection, after: int, limit: int, scenario: str | None) -> Iterator[_Row]:
    term, parameters = _filter("r.scenario_id = (SELECT id FROM scenarios WHERE name = ?)", scenario)
    rows = connection.execute(
        f"SELECT {COLUMNS} {FROM} WHERE r.seq > ?{term} ORDER BY r.seq LIMIT ?", (after, *parameters, limit)
    )
    for values in rows:
        row = record_row(values)
        yield row.sequence, row.scenario, row.created_at, asdict(row)


def _jobs(connection: sqlite3.Connection, after: int, limit: int, scenario: str | None) -> Iterator[_Row]:
    term, parameters = _filter("scenario = ?", scenario)
    rows = connection.execute(
        f"SELECT seq, scenario, at, job_id, state, detail FROM job_events WHERE seq > ?{term} ORDER BY seq LIMIT ?",
        (after, *parameters, limit),
    )
    for seq, name, at, job, state, detail in rows:
        yield seq, name, at, {"job_id": job, "state": state, "detail": orjson.loads(detail)}


def _releases(connection: sqlite3.Connection, after: int, limit: int, scenario: str | None) -> Iterator[_Row]:
    term, parameters = _filter("scenario = ?", scenario)
    rows = connection.execute(
        f"SELECT seq, scenario, at, release_id, event, detail FROM release_events WHERE seq > ?{term} ORDER BY seq LIMIT ?",
        (after, *parameters, limit),
    )
    for seq, name, at, release, event, detail in rows:
        yield seq, name, at, {"release_id": release, "event": event, "detail": orjson.loads(detail)}


def _filter(term: str, scenario: str | None) -> tuple[str, Sequence[str]]:
    return ("", ()) if scenario is None else (f" AND {term}", (scenario,))
