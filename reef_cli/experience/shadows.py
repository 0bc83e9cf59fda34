"""What shadows answered, beside the records of what clients got. No record of experience: it cannot be cited and never trains.

`text` is None where records are redacted, since a shadow's words pass no hook. The newest `KEPT` rows of a scenario are kept.
"""

import sqlite3
from dataclasses import asdict, dataclass
from typing import Any

KEPT = 10_000
TEXT_LIMIT = 4000
_COLUMNS = (
    *("scenario", "record_id", "answered_by", "release_id", "at", "text", "finish", "output_tokens", "agreement", "seconds"),
    "error",
)


@dataclass(frozen=True, slots=True)
class ShadowAnswer:
    """One answer of the shadow `release_id` to what `answered_by` answered for the client.

    `agreement` is the part of the longer answer that both began with, token by token: 1 means the same answer.
    """

    scenario: str
    record_id: str
    answered_by: str
    release_id: str
    at: float
    text: str | None = None
    finish: str | None = None
    output_tokens: int = 0
    agreement: float | None = None
    seconds: float = 0.0
    error: str | None = None


def create(connection: sqlite3.Connection) -> None:
    connection.execute("""
        CREATE TABLE shadow_answers (
            seq INTEGER PRIMARY KEY,
            scenario TEXT NOT NULL,
            record_id TEXT NOT NULL,
            answered_by TEXT NOT NULL,
            release_id TEXT NOT NULL,
            at REAL NOT NULL,
            text TEXT,
            finish TEXT,
            output_tokens INTEGER NOT NULL,
            agreement REAL,
            seconds REAL NOT NULL,
            error TEXT
        )""")
    connection.execute("CREATE INDEX shadow_answers_scenario ON shadow_answers (scenario, seq)")


def store(connection: sqlite3.Connection, answer: ShadowAnswer) -> None:
    """Add an answer; the oldest beyond those kept go."""
    values = asdict(answer)
    connection.execute(
        f"INSERT INTO shadow_answers ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})",
        [values[name] for name in _COLUMNS],
    )
    connection.execute(
        "DELETE FROM shadow_answers WHERE scenario = ? AND seq <= (SELECT seq FROM shadow_answers WHERE scenario = ?"
        " ORDER BY seq DESC LIMIT 1 OFFSET ?)",
        (answer.scenario, answer.scenario, KEPT),
    )


def latest(connection: sqlite3.Connection, scenario: str, limit: int) -> list[ShadowAnswer]:
    """Answers, newest first."""
    rows = connection.execute(
        f"SELECT {', '.join(_COLUMNS)} FROM shadow_answers WHERE scenario = ? ORDER BY seq DESC LIMIT ?", (scenario, limit)
    )
    return [ShadowAnswer(*row) for row in rows]


def summary(connection: sqlite3.Connection, scenario: str) -> list[dict[str, Any]]:
    """Per shadow release: how many answers, how many equal the client's, how far they agree, how many failed."""
    rows = connection.execute(
        "SELECT release_id, count(*), sum(agreement = 1), avg(agreement), avg(output_tokens), sum(error IS NOT NULL)"
        " FROM shadow_answers WHERE scenario = ? GROUP BY release_id ORDER BY max(seq) DESC",
        (scenario,),
    )
    names = ("release_id", "answers", "same", "agreement", "output_tokens", "failed")
    return [dict(zip(names, (row[0], row[1], row[2] or 0, *row[3:]), strict=True)) for row in rows]
