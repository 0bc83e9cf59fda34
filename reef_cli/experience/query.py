"""Reading experience: whole records, light pages, reports in order, counts. Functions over one connection's snapshot."""

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from reef_cli.core.errors import InvalidRequest
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Eligibility, Inference, RecordKind, Report
from reef_cli.experience.bodies import Reader
from reef_cli.experience.codec import Record
from reef_cli.experience.eligibility import eligible
from reef_cli.experience.model import Instruction, RecordRow
from reef_cli.experience.scenarios import by_name
from reef_cli.experience.schema import COUNTERS

COLUMNS = (
    "r.seq, r.id, sc.name, r.kind, r.created_at, s.key, r.parent, r.role, r.retry_of, r.dialect, r.model, r.release_id,"
    " r.weight_version, r.summary, r.score, r.complete, r.finish, r.error, r.prompt_tokens, r.output_tokens,"
    " r.trainable_tokens, r.evicted_at"
)
FROM = "FROM records r JOIN scenarios sc ON sc.id = r.scenario_id LEFT JOIN sessions s ON s.id = r.session_id"
PAGE_LIMIT = 1000
SETTLED = ("consumed", "dropped", "refused")
"""States of the learning ledger in which a report asks for nothing more."""


def record_row(row: Sequence[Any]) -> RecordRow:
    """A row of `COLUMNS`."""
    fields = dict(zip(RecordRow.__dataclass_fields__, row, strict=True))
    fields["complete"] = bool(fields["complete"])
    return RecordRow(**fields)


def get(connection: sqlite3.Connection, scenario: str, record_id: str) -> Record | None:
    """The record, byte for byte; None when there is none or its bodies were evicted."""
    row = connection.execute(
        f"SELECT r.seq, r.kind, r.created_at, r.score, r.evicted_at {FROM} WHERE r.id = ? AND sc.name = ?",
        (record_id, scenario),
    ).fetchone()
    if row is None or row[4] is not None:
        return None
    seq, kind, created_at, score, _ = row
    reader = Reader(connection)
    if kind == "inference":
        return reader.inference(seq, record_id, scenario, created_at)
    meta = reader.meta(seq)
    if meta is None:
        return None
    if kind == "report":
        return _report(record_id, scenario, created_at, score, meta)
    return Instruction(id=RecordId(record_id), scenario=scenario, created_at=created_at, **orjson.loads(meta))


def _report(record_id: str, scenario: str, created_at: float, score: float | None, meta: bytes) -> Report:
    fields = orjson.loads(meta)
    fields["references"] = tuple(fields["references"])
    return Report(id=RecordId(record_id), scenario=scenario, created_at=created_at, score=score, **fields)


def page(
    connection: sqlite3.Connection, scenario: str, after: int, limit: int, kind: RecordKind | None, newest: bool
) -> list[RecordRow]:
    """Light rows after a sequence, oldest first; with `newest` the latest ones, newest first."""
    terms, parameters = "", []
    if kind is not None:
        terms = " AND r.kind = ?" + ("" if kind == "inference" else " AND r.kind <> 'inference'")
        parameters = [kind]
    order = "DESC" if newest else "ASC"
    rows = connection.execute(
        f"SELECT {COLUMNS} {FROM} WHERE r.scenario_id = ? AND r.seq > ?{terms} ORDER BY r.seq {order} LIMIT ?",
        (by_name(connection, scenario).row, after, *parameters, checked_limit(limit)),
    )
    return [record_row(row) for row in rows]


def checked_limit(limit: int) -> int:
    if not 0 < limit <= PAGE_LIMIT:
        raise InvalidRequest(f"limit must be 1 to {PAGE_LIMIT}")
    return limit


def references(connection: sqlite3.Connection, receipts: Sequence[str]) -> list[Inference]:
    """The exchanges behind receipts of live scenarios, in the given order; unknown and evicted ones are left out."""
    reader = Reader(connection)
    found: list[Inference] = []
    for receipt in receipts:
        row = connection.execute(
            "SELECT r.seq, sc.name, r.created_at FROM records r JOIN scenarios sc ON sc.id = r.scenario_id"
            " WHERE r.id = ? AND r.kind = 'inference' AND r.evicted_at IS NULL AND sc.archived_at IS NULL",
            (receipt,),
        ).fetchone()
        record = reader.inference(row[0], receipt, row[1], row[2]) if row is not None else None
        if record is not None:
            found.append(record)
    return found


def scenario_of(connection: sqlite3.Connection, receipt: str) -> str | None:
    """The live scenario a record belongs to."""
    row = connection.execute(
        "SELECT sc.name FROM records r JOIN scenarios sc ON sc.id = r.scenario_id WHERE r.id = ? AND sc.archived_at IS NULL",
        (receipt,),
    ).fetchone()
    return None if row is None else str(row[0])


def reports_after(connection: sqlite3.Connection, scenario: str, sequence: int, limit: int) -> list[tuple[int, Report]]:
    """Stored reports with their sequences, in order."""
    rows = connection.execute(
        "SELECT r.seq, r.id, r.created_at, r.score, p.meta FROM records r JOIN payloads p ON p.seq = r.seq"
        " WHERE r.scenario_id = ? AND r.kind = 'report' AND r.kind <> 'inference' AND r.seq > ? AND r.evicted_at IS NULL"
        " ORDER BY r.seq LIMIT ?",
        (by_name(connection, scenario).row, sequence, limit),
    )
    return [(row[0], _report(row[1], scenario, row[2], row[3], row[4])) for row in rows]


def counts(connection: sqlite3.Connection, scenario: str) -> Mapping[str, int]:
    """Records by kind, sizes, and the learning ledger's states; `dropped:<reason>` says why."""
    row = connection.execute(f"SELECT {', '.join(COUNTERS)} FROM scenarios WHERE name = ?", (scenario,)).fetchone()
    totals: Counter[str] = Counter(dict(zip(COUNTERS, row or (0,) * len(COUNTERS), strict=True)))
    totals["records"] = totals["inferences"] + totals["reports"] + totals["instructions"]
    totals.update(dict.fromkeys(("queued", "reserved", "consumed", "dropped"), 0))
    ledger = connection.execute(
        "SELECT state, CASE WHEN state IN ('dropped', 'refused') THEN reason ELSE '' END AS why, count(*) FROM sample_state"
        " WHERE scenario = ? GROUP BY state, why",
        (scenario,),
    )
    for state, why, number in ledger:
        totals[state] += number
        if why:
            totals[f"{state}:{why}"] += number
    return totals


def eligibility(
    connection: sqlite3.Connection, scenario: str, receipts: Sequence[str], *, recipe: str | None, needs_tokens: bool
) -> list[Eligibility]:
    """Per receipt whether it can still train, for reasons that hold for every recipe."""
    reader = Reader(connection)
    return [
        Eligibility(RecordId(receipt), reason == "eligible", reason)
        for receipt in receipts
        for reason in [_reason(connection, reader, scenario, receipt, recipe, needs_tokens)]
    ]


def _reason(
    connection: sqlite3.Connection, reader: Reader, scenario: str, receipt: str, recipe: str | None, needs_tokens: bool
) -> str:
    row = connection.execute(
        f"SELECT r.seq, r.created_at, r.evicted_at {FROM} WHERE r.id = ? AND sc.name = ? AND r.kind = 'inference'",
        (receipt, scenario),
    ).fetchone()
    if row is None:
        return "unknown"
    if row[2] is not None:
        return "evicted"
    # By way of the reports that cite it: `sample_records` is keyed by recipe first, and any recipe may be meant.
    sampled = connection.execute(
        "SELECT st.state FROM citations c JOIN records p ON p.seq = c.report_seq"
        " JOIN sample_records sr ON sr.report_id = p.id AND sr.record_id = ?"
        " JOIN sample_state st ON st.recipe = sr.recipe AND st.report_id = sr.report_id"
        " WHERE c.record_seq = ? AND (? IS NULL OR sr.recipe = ?)",
        (receipt, row[0], recipe, recipe),
    )
    states = {state for (state,) in sampled}
    if states:
        return "already_trained" if "consumed" in states else "already_sampled"
    record = reader.inference(row[0], receipt, scenario, row[1])
    return "evicted" if record is None else eligible(record, needs_tokens=needs_tokens)[1]
