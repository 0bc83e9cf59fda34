"""The job ledger: a learning step as a durable state machine, one row per job and one event per transition.

Every function here takes the writer's connection and runs inside its transaction, so a transition, the samples it moves and
the event that tells of it become durable together or not at all. A transition is written before the side effect it names:
the row says what is being attempted, never what is hoped to be done. Knows nothing of trainers, engines or git.

    reserved -> training -> candidate -> evaluating -> decided -> publishing -> loaded -> settled
        any of them -> failed (with the cause); decided -> settled when nothing is published
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reef_cli.core.errors import ConflictError, JobNotFound
from reef_cli.core.ids import JobId, RecordId, ReleaseId, new_id
from reef_cli.core.types import JobState

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.RESERVED: frozenset({JobState.TRAINING, JobState.EVALUATING, JobState.FAILED}),
    JobState.TRAINING: frozenset({JobState.CANDIDATE, JobState.FAILED}),
    JobState.CANDIDATE: frozenset({JobState.EVALUATING, JobState.SETTLED, JobState.FAILED}),
    JobState.EVALUATING: frozenset({JobState.DECIDED, JobState.FAILED}),
    JobState.DECIDED: frozenset({JobState.PUBLISHING, JobState.SETTLED, JobState.FAILED}),
    JobState.PUBLISHING: frozenset({JobState.LOADED, JobState.FAILED}),
    JobState.LOADED: frozenset({JobState.SETTLED, JobState.FAILED}),
    JobState.SETTLED: frozenset(),
    JobState.FAILED: frozenset(),
}
TERMINAL = frozenset({JobState.SETTLED, JobState.FAILED})
MAX_ATTEMPTS = 3
"""A sample whose jobs failed this often is dropped as `failed_repeatedly`, so that a poisoned batch cannot loop for ever."""


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the ledger. `detail` gathers what the transitions added (metrics, checkpoint, verdict, expected head)."""

    seq: int
    id: JobId
    scenario: str
    recipe: str
    state: JobState
    base_release_id: ReleaseId
    created_at: float
    updated_at: float
    outcome: str | None
    reason: str | None
    content_id: str | None
    release_id: ReleaseId | None
    detail: Mapping[str, Any]

    @property
    def open(self) -> bool:
        return self.state not in TERMINAL


@dataclass(frozen=True, slots=True)
class Queued:
    """A sample waiting in the queue: which report, its place in the stream, the chain step that produced it, since when.

    `group` is the key of the group it trains with and `size` how many complete that; an empty key means alone. `harness` is the
    content of the harness that was in force when it was admitted.
    """

    report_id: RecordId
    sequence: int
    step: int
    at: float = 0.0
    group: str = ""
    size: int = 1
    harness: str = ""


_COLUMNS = (
    "seq, id, scenario, recipe, state, base_release_id, created_at, updated_at, outcome, reason, content_id, release_id, detail"
)


def _job(row: Sequence[Any]) -> Job:
    return Job(
        seq=row[0],
        id=JobId(row[1]),
        scenario=row[2],
        recipe=row[3],
        state=JobState(row[4]),
        base_release_id=ReleaseId(row[5]),
        created_at=row[6],
        updated_at=row[7],
        outcome=row[8],
        reason=row[9],
        content_id=row[10],
        release_id=ReleaseId(row[11]) if row[11] else None,
        detail=json.loads(row[12]),
    )


def get(connection: sqlite3.Connection, job_id: str) -> Job:
    """The job. Raises `JobNotFound`."""
    row = connection.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise JobNotFound(f"There is no job {job_id}.", hint="`reef jobs list` shows them.")
    return _job(row)


def open_jobs(connection: sqlite3.Connection, scenario: str | None = None) -> list[Job]:
    """Jobs that are not settled or failed, oldest first."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM jobs WHERE state NOT IN ('settled', 'failed') AND (?1 IS NULL OR scenario = ?1) ORDER BY seq",
        (scenario,),
    )
    return [_job(row) for row in rows]


def recent(connection: sqlite3.Connection, scenario: str, limit: int = 50) -> list[Job]:
    """The scenario's last jobs, newest first."""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM jobs WHERE scenario = ? ORDER BY seq DESC LIMIT ?", (scenario, limit))
    return [_job(row) for row in rows]


def reserve(
    connection: sqlite3.Connection,
    *,
    scenario: str,
    recipe: str,
    base: ReleaseId,
    release_id: ReleaseId,
    samples: Iterable[RecordId],
    at: float,
    detail: Mapping[str, Any] | None = None,
) -> Job:
    """Open a job over queued samples. `release_id` is the id its release will carry, fixed now so recovery can recognise it."""
    job_id = JobId(new_id())
    connection.execute(
        "INSERT INTO jobs (id, scenario, recipe, state, base_release_id, created_at, updated_at, release_id, detail)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (job_id, scenario, recipe, JobState.RESERVED, base, at, at, release_id, json.dumps(detail or {})),
    )
    for report_id in samples:
        changed = connection.execute(
            "UPDATE sample_state SET state = 'reserved', job_id = ?, at = ?"
            " WHERE recipe = ? AND report_id = ? AND state = 'queued'",
            (job_id, at, recipe, report_id),
        ).rowcount
        if changed != 1:
            raise ConflictError(f"Sample {report_id} is no longer queued.")
    _event(connection, job_id, scenario, at, JobState.RESERVED, {})
    return get(connection, job_id)


def advance(
    connection: sqlite3.Connection,
    job: Job,
    to: JobState,
    at: float,
    *,
    detail: Mapping[str, Any] | None = None,
    content_id: str | None = None,
    outcome: str | None = None,
    reason: str | None = None,
) -> Job:
    """Move a job along one allowed edge. Raises `ConflictError` when the row is not where the caller thinks it is."""
    if to not in TRANSITIONS[job.state]:
        raise ConflictError(f"A job cannot go from {job.state} to {to}.")
    merged = {**job.detail, **(detail or {})}
    changed = connection.execute(
        "UPDATE jobs SET state = ?, updated_at = ?, detail = ?, content_id = COALESCE(?, content_id),"
        " outcome = COALESCE(?, outcome), reason = COALESCE(?, reason) WHERE id = ? AND state = ?",
        (to, at, json.dumps(merged), content_id, outcome, reason, job.id, job.state),
    ).rowcount
    if changed != 1:
        raise ConflictError(f"Job {job.id} is no longer {job.state}.")
    _event(connection, job.id, job.scenario, at, to, {**(detail or {}), **({"reason": reason} if reason else {})})
    return get(connection, job.id)


def settle(
    connection: sqlite3.Connection, job: Job, at: float, *, outcome: str | None = None, reason: str | None = None
) -> Job:
    """End a job well: its samples are consumed in the same transaction. `outcome` is for jobs that were never judged."""
    settled = advance(connection, job, JobState.SETTLED, at, outcome=outcome, reason=reason)
    connection.execute(
        "UPDATE sample_state SET state = 'consumed', at = ? WHERE job_id = ? AND state = 'reserved'", (at, job.id)
    )
    return settled


def fail(connection: sqlite3.Connection, job: Job, at: float, reason: str, *, blame_samples: bool) -> Job:
    """End a job badly. Its samples go back to the queue; when they may be to blame, their failures are counted."""
    failed = advance(connection, job, JobState.FAILED, at, reason=reason)
    connection.execute(
        "UPDATE sample_state SET state = 'queued', job_id = NULL, at = ?, attempts = attempts + ?"
        " WHERE job_id = ? AND state = 'reserved'",
        (at, int(blame_samples), job.id),
    )
    worn = connection.execute(
        "SELECT report_id FROM sample_state WHERE scenario = ? AND recipe = ? AND state = 'queued' AND attempts >= ?",
        (job.scenario, job.recipe, MAX_ATTEMPTS),
    ).fetchall()
    drop(connection, job.recipe, at, [(row[0], "failed_repeatedly") for row in worn])
    return failed


def cursor(connection: sqlite3.Connection, scenario: str, recipe: str) -> int:
    """The stream position up to which reports were admitted or refused."""
    row = connection.execute(
        "SELECT MAX(sequence) FROM sample_state WHERE scenario = ? AND recipe = ?", (scenario, recipe)
    ).fetchone()
    return int(row[0] or 0)


@dataclass(frozen=True, slots=True)
class Entry:
    """A report's place in the queue: `step` set when it was admitted with `records`, else `reason` says why not."""

    report_id: RecordId
    sequence: int
    step: int | None
    reason: str = ""
    records: tuple[RecordId, ...] = ()
    group: str = ""
    size: int = 1
    member: str = ""
    harness: str = ""


def enqueue(connection: sqlite3.Connection, scenario: str, recipe: str, at: float, entries: Iterable[Entry]) -> None:
    """Remember admitted and refused reports. A record, or a place in a group, that is taken makes the later report refused."""
    for entry in entries:
        reason = entry.reason or _crowded(connection, scenario, recipe, entry) or _claim(connection, scenario, recipe, entry)
        state = "refused" if reason else "queued"
        connection.execute(
            "INSERT OR IGNORE INTO sample_state"
            " (recipe, report_id, scenario, sequence, state, reason, step, at, grp, grp_size, member, harness)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(recipe, entry.report_id, scenario, entry.sequence, state, reason, entry.step, at),
                *(entry.group, entry.size, entry.member, entry.harness),
            ),
        )


def _crowded(connection: sqlite3.Connection, scenario: str, recipe: str, entry: Entry) -> str:
    """`member_taken` or `group_full` when the entry's group has no place for it, else empty."""
    if not entry.group:
        return ""
    members = [
        row[0]
        for row in connection.execute(
            "SELECT member FROM sample_state WHERE scenario = ? AND recipe = ? AND grp = ? AND report_id <> ?"
            " AND state IN ('queued', 'reserved', 'consumed')",
            (scenario, recipe, entry.group, entry.report_id),
        )
    ]
    if entry.member and entry.member in members:
        return "member_taken"
    return "group_full" if len(members) >= max(entry.size, 1) else ""


def _claim(connection: sqlite3.Connection, scenario: str, recipe: str, entry: Entry) -> str:
    """Give the entry's records to its sample, all or none; the reason when one of them is taken."""
    taken = taken_by(connection, recipe, entry.records)
    if taken:
        return taken
    connection.executemany(
        "INSERT INTO sample_records (recipe, record_id, report_id, scenario) VALUES (?, ?, ?, ?)",
        [(recipe, record, entry.report_id, scenario) for record in entry.records],
    )
    return ""


def taken_by(connection: sqlite3.Connection, recipe: str, records: Sequence[str], besides: str = "") -> str:
    """`already_trained` or `already_sampled` when one of the records belongs to a sample of this recipe, else empty.

    The sample of the report `besides` does not count.
    """
    marks = ",".join("?" * len(records))
    states = {
        row[0]
        for row in connection.execute(
            "SELECT s.state FROM sample_records r JOIN sample_state s ON s.recipe = r.recipe AND s.report_id = r.report_id"
            f" WHERE r.recipe = ? AND r.report_id <> ? AND r.record_id IN ({marks})",
            (recipe, besides, *records),
        )
    }
    return "already_trained" if "consumed" in states else "already_sampled" if states else ""


def drop(connection: sqlite3.Connection, recipe: str, at: float, rows: Sequence[tuple[str, str]]) -> None:
    """Drop queued samples, each with its reason: rows of (report_id, reason). Their records are free again."""
    for report_id, reason in rows:
        changed = connection.execute(
            "UPDATE sample_state SET state = 'dropped', reason = ?, at = ?"
            " WHERE recipe = ? AND report_id = ? AND state = 'queued'",
            (reason, at, recipe, report_id),
        ).rowcount
        if changed:
            connection.execute("DELETE FROM sample_records WHERE recipe = ? AND report_id = ?", (recipe, report_id))


def queued(connection: sqlite3.Connection, scenario: str, recipe: str, limit: int) -> list[Queued]:
    """The oldest waiting samples."""
    rows = connection.execute(
        "SELECT report_id, sequence, step, at, grp, grp_size, harness FROM sample_state"
        " WHERE scenario = ? AND recipe = ? AND state = 'queued' ORDER BY sequence LIMIT ?",
        (scenario, recipe, limit),
    )
    return [Queued(RecordId(row[0]), *row[1:]) for row in rows]


def observed(connection: sqlite3.Connection, scenario: str, recipe: str) -> int:
    """The stream position up to which a recipe's observer needs nothing any more."""
    row = connection.execute("SELECT sequence FROM observed WHERE recipe = ? AND scenario = ?", (recipe, scenario)).fetchone()
    return int(row[0]) if row else 0


def set_observed(connection: sqlite3.Connection, scenario: str, recipe: str, sequence: int) -> None:
    """Move that position."""
    connection.execute(
        "INSERT INTO observed (recipe, scenario, sequence) VALUES (?, ?, ?)"
        " ON CONFLICT (recipe, scenario) DO UPDATE SET sequence = excluded.sequence",
        (recipe, scenario, sequence),
    )


def reserved_reports(connection: sqlite3.Connection, job_id: str) -> list[RecordId]:
    """Report ids a job holds, in stream order."""
    rows = connection.execute("SELECT report_id FROM sample_state WHERE job_id = ? ORDER BY sequence", (job_id,))
    return [RecordId(row[0]) for row in rows]


def checkpoint_for(connection: sqlite3.Connection, scenario: str, content_id: str) -> str | None:
    """Folder of the newest settled trainer state that belongs to exactly this content, or None."""
    row = connection.execute(
        "SELECT json_extract(detail, '$.checkpoint') FROM jobs WHERE scenario = ? AND content_id = ? AND state = 'settled'"
        " AND json_extract(detail, '$.checkpoint') IS NOT NULL ORDER BY seq DESC LIMIT 1",
        (scenario, content_id),
    ).fetchone()
    return str(row[0]) if row else None


def checkpoints(connection: sqlite3.Connection, scenario: str, limit: int = 200) -> list[tuple[str, str]]:
    """`(content_id, folder)` of the trainer states that settled jobs left, newest first."""
    rows = connection.execute(
        "SELECT content_id, json_extract(detail, '$.checkpoint') AS folder FROM jobs"
        " WHERE scenario = ? AND state = 'settled' AND folder IS NOT NULL ORDER BY seq DESC LIMIT ?",
        (scenario, limit),
    )
    return [(row[0], row[1]) for row in rows]


def _event(
    connection: sqlite3.Connection, job_id: str, scenario: str, at: float, state: JobState, detail: Mapping[str, Any]
) -> None:
    connection.execute(
        "INSERT INTO job_events (job_id, scenario, at, state, detail) VALUES (?, ?, ?, ?, ?)",
        (job_id, scenario, at, state, json.dumps(detail)),
    )
