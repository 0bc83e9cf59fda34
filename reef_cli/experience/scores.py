"""Scored answers in the order their reports came: what live comparisons of releases are made from."""

import sqlite3
from dataclasses import dataclass

from reef_cli.experience.scenarios import by_name


@dataclass(frozen=True, slots=True)
class Scored:
    """A report's score and the answer it cites first: when that was asked for, which release made it, in which session."""

    sequence: int
    score: float
    record_id: str
    asked_at: float
    release_id: str | None
    session: str


def scores_after(connection: sqlite3.Connection, scenario: str, sequence: int, asked_from: float, limit: int) -> list[Scored]:
    """Scores stored after a sequence whose answers were asked for at `asked_from` or later, oldest first."""
    rows = connection.execute(
        "SELECT p.seq, p.score, r.id, r.created_at, r.release_id, coalesce(s.key, r.id)"
        " FROM records p JOIN citations c ON c.report_seq = p.seq AND c.position = 0 JOIN records r ON r.seq = c.record_seq"
        " LEFT JOIN sessions s ON s.id = r.session_id"
        " WHERE p.scenario_id = ? AND p.kind = 'report' AND p.kind <> 'inference' AND p.seq > ? AND p.score IS NOT NULL"
        " AND r.created_at >= ? ORDER BY p.seq LIMIT ?",
        (by_name(connection, scenario).row, sequence, asked_from, limit),
    )
    return [Scored(*row) for row in rows]
