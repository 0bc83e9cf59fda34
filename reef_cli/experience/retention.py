"""Retention: which bodies are dropped to stay within bytes and days, and what is left of them. Runs on the writer's thread.

Only exchanges the learning ledger is done with go (all their reports consumed, dropped or refused; never completed; or of an
archived scenario), oldest first, unless the caller says `unconsumed`; an exchange of a reserved report never goes. The light
row stays for ever with its content digest, the time and the reason, so re-sent reports are still recognised and everything
evicted can be listed. Bytes that a kept record shares stay until that one goes as well.
"""

import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from reef_cli.experience.query import SETTLED

Why = Literal["bytes", "age"]
STEP = 200
"""Records per transaction, so that receipts wait milliseconds at most."""
_DAY = 86400.0
_STATES = ", ".join(f"'{state}'" for state in SETTLED)
_REPORTS = (
    "SELECT 1 FROM citations c JOIN records p ON p.seq = c.report_seq LEFT JOIN sample_state st"
    " ON st.report_id = p.id AND st.scenario = sc.name WHERE c.record_seq = r.seq"
)
_DONE = (
    f"(sc.archived_at IS NOT NULL OR ((r.complete = 0 OR EXISTS ({_REPORTS}))"
    f" AND NOT EXISTS ({_REPORTS} AND (st.state IS NULL OR st.state NOT IN ({_STATES})))))"
)
_FREE = f"NOT EXISTS ({_REPORTS} AND st.state = 'reserved')"
_FROM = (
    "FROM records r JOIN scenarios sc ON sc.id = r.scenario_id WHERE r.kind = 'inference' AND r.evicted_at IS NULL"
    " AND {condition}"
)
_CANDIDATES = f"SELECT r.seq {_FROM} AND r.seq > ? AND r.created_at < ? ORDER BY r.seq LIMIT ?"
_STILL = f"SELECT r.seq, r.scenario_id, r.created_at {_FROM} AND r.seq IN (SELECT value FROM json_each(?)) ORDER BY r.seq"
_SPENT_REPORTS = (
    "SELECT r.seq, r.scenario_id FROM records r JOIN scenarios sc ON sc.id = r.scenario_id LEFT JOIN sample_state st"
    " ON st.report_id = r.id AND st.scenario = sc.name"
    " WHERE r.kind = 'report' AND r.kind <> 'inference' AND r.evicted_at IS NULL"
    f" AND (sc.archived_at IS NOT NULL OR st.state IN ({_STATES}))"
    " AND EXISTS (SELECT 1 FROM citations c WHERE c.report_seq = r.seq) AND NOT EXISTS (SELECT 1 FROM citations c"
    " JOIN records i ON i.seq = c.record_seq WHERE c.report_seq = r.seq AND i.evicted_at IS NULL) ORDER BY r.seq LIMIT ?"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What to keep: at most so many bytes of bodies over all scenarios, and nothing begun before a moment."""

    keep_bytes: int | None = None
    keep_days: float | None = None
    unconsumed: bool = False


@dataclass(frozen=True, slots=True)
class Evicted:
    """What retention dropped; `more` says whether it is worth looking on, `held` that records beyond the limits had to stay."""

    records: int = 0
    reports: int = 0
    freed_bytes: int = 0
    more: bool = False
    held: bool = False


@dataclass(frozen=True, slots=True)
class EvictedRow:
    """An evicted record in a list."""

    sequence: int
    id: str
    kind: str
    evicted_at: float
    why: str


def candidates(connection: sqlite3.Connection, limits: Limits, now: float, after: int) -> list[int]:
    """Up to `STEP` exchanges after a sequence that may go; found on a reader, since looking may take long."""
    # Any age may have to go for bytes; a clock that was set back must not shield a record.
    before = math.inf if limits.keep_bytes is not None or limits.keep_days is None else now - limits.keep_days * _DAY
    rows = connection.execute(_CANDIDATES.format(condition=_condition(limits)), (after, before, STEP))
    return [row[0] for row in rows]


def evict_step(
    connection: sqlite3.Connection, limits: Limits, now: float, found: Sequence[int], forget: Callable[[int], None]
) -> Evicted:
    """Evict those of `found` that may still go and that the limits ask for. `forget` is told of every payload that changes."""
    oldest = now - limits.keep_days * _DAY if limits.keep_days is not None else None
    total: int = connection.execute("SELECT coalesce(sum(stored_bytes), 0) FROM scenarios").fetchone()[0]
    excess = total - limits.keep_bytes if limits.keep_bytes is not None else 0
    freed = number = 0
    rows = connection.execute(_STILL.format(condition=_condition(limits)), (json.dumps(found),)).fetchall()
    for seq, scenario, created_at in rows:
        aged = oldest is not None and created_at < oldest
        if aged or freed < excess:
            freed += _evict(connection, seq, scenario, now, "age" if aged else "bytes", forget)
            number += 1
    return Evicted(number, 0, freed, more=oldest is not None or freed < excess)


def beyond(connection: sqlite3.Connection, limits: Limits, now: float) -> bool:
    """Whether bodies are left that the limits ask to drop."""
    oldest = -math.inf if limits.keep_days is None else now - limits.keep_days * _DAY
    if limits.keep_bytes is not None:
        total: int = connection.execute("SELECT coalesce(sum(stored_bytes), 0) FROM scenarios").fetchone()[0]
        oldest = math.inf if total > limits.keep_bytes else oldest
    old = "SELECT 1 FROM records WHERE kind = 'inference' AND evicted_at IS NULL AND created_at < ? LIMIT 1"
    return connection.execute(old, (oldest,)).fetchone() is not None


def _condition(limits: Limits) -> str:
    return _FREE if limits.unconsumed else f"{_DONE} AND {_FREE}"


def evict_reports(connection: sqlite3.Connection, now: float, forget: Callable[[int], None]) -> Evicted:
    """Evict up to `STEP` reports that are settled and whose exchanges are all gone; `more` says there may be others."""
    rows = connection.execute(_SPENT_REPORTS, (STEP,)).fetchall()
    freed = sum(_evict(connection, seq, scenario, now, "age", forget) for seq, scenario in rows)
    return Evicted(0, len(rows), freed, len(rows) == STEP)


def _evict(connection: sqlite3.Connection, seq: int, scenario: int, now: float, why: Why, forget: Callable[[int], None]) -> int:
    connection.execute("UPDATE records SET evicted_at = ?, evicted_why = ? WHERE seq = ?", (now, why, seq))
    connection.execute("UPDATE scenarios SET evicted = evicted + 1 WHERE id = ?", (scenario,))
    # Others may be built on its texts; what is its own alone goes now.
    connection.execute("UPDATE payloads SET meta = x'', logprobs = NULL, mask = NULL WHERE seq = ?", (seq,))
    freed = _account(connection, seq)
    at: int | None = seq
    while at is not None:
        forget(at)
        needed = "SELECT 1 FROM payloads WHERE base = ? UNION ALL SELECT 1 FROM records WHERE seq = ? AND evicted_at IS NULL"
        if connection.execute(needed, (at, at)).fetchone():
            break
        base = connection.execute("DELETE FROM payloads WHERE seq = ? RETURNING base", (at,)).fetchone()
        freed += _account(connection, at)
        at = base[0] if base is not None else None
    return freed


def _account(connection: sqlite3.Connection, seq: int) -> int:
    """Bring a record's byte count to what its payload still holds; returns how much that freed."""
    size = "coalesce((SELECT length(meta) + coalesce(length(body), 0) + coalesce(length(talk), 0) + coalesce(length(ids), 0)"
    size += " + coalesce(length(logprobs), 0) + coalesce(length(mask), 0) FROM payloads WHERE seq = records.seq), 0)"
    before, scenario = connection.execute("SELECT stored_bytes, scenario_id FROM records WHERE seq = ?", (seq,)).fetchone()
    after: int = connection.execute(
        f"UPDATE records SET stored_bytes = {size} WHERE seq = ? RETURNING stored_bytes", (seq,)
    ).fetchone()[0]
    connection.execute("UPDATE scenarios SET stored_bytes = stored_bytes - ? WHERE id = ?", (before - after, scenario))
    return int(before - after)


def evicted(connection: sqlite3.Connection, scenario_row: int, after: int, limit: int) -> list[EvictedRow]:
    """Evicted records of a scenario after a sequence, in order."""
    rows = connection.execute(
        "SELECT seq, id, kind, evicted_at, evicted_why FROM records WHERE scenario_id = ? AND evicted_at IS NOT NULL"
        " AND seq > ? ORDER BY seq LIMIT ?",
        (scenario_row, after, limit),
    )
    return [EvictedRow(*row) for row in rows]
