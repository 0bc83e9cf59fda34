"""Reports and instructions on their way into the database. Runs on the writer's thread, inside a savepoint.

A report is checked against the very state it is stored in: its references exist, are exchanges of its scenario, and differ. The
digest of its content outlives everything else of it, so a re-sent report is recognised for ever.
"""

import sqlite3

from reef_cli.core.errors import InvalidReference
from reef_cli.core.types import Report
from reef_cli.experience.bodies import write_note
from reef_cli.experience.codec import check_report, checked_id, digest, dumps, sorted_json
from reef_cli.experience.ingest import Ingest
from reef_cli.experience.model import Instruction, Scenario
from reef_cli.experience.side import one_line

_NOTE = (
    "INSERT INTO records (seq, id, scenario_id, kind, created_at, digest, session_id, summary, score, stored_bytes)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_CITED = "SELECT seq, kind, session_id, evicted_at FROM records WHERE id = ? AND scenario_id = ?"


def store_report(ingest: Ingest, report: Report, scenario: Scenario) -> bool:
    """True when stored, False when the same report is there. Raises `InvalidReference`, `ContentConflict`, `InvalidRequest`."""
    check_report(report)
    meta = {"references": list(report.references), "feedback": report.feedback, "metadata": report.metadata}
    score = None if report.score is None else float(report.score)
    mark = digest(b"report", report.scenario.encode(), sorted_json([meta, score]))
    if ingest.known(report.id, report.scenario, mark):
        return False
    cited = _cited(ingest.connection, report, scenario)
    words = report.feedback if isinstance(report.feedback, str) else dumps(report.feedback).decode() if report.feedback else ""
    session = cited[0][1] if cited else None
    seq = _write(ingest, scenario, (report.id, "report", report.created_at, mark, session, one_line(words), score), dumps(meta))
    ingest.connection.executemany(
        "INSERT INTO citations (record_seq, report_seq, position) VALUES (?, ?, ?)",
        [(record, seq, position) for position, (record, _) in enumerate(cited)],
    )
    ingest.tally(scenario.row, "reports")
    return True


def _cited(connection: sqlite3.Connection, report: Report, scenario: Scenario) -> list[tuple[int, int | None]]:
    """`(sequence, session row)` of each reference, in order; the first bad one is named."""
    found: dict[str, tuple[int, int | None]] = {}
    for reference in report.references:
        if reference in found:
            raise InvalidReference(f"reference {reference} is cited twice", reference=reference)
        row = connection.execute(_CITED, (reference, scenario.row)).fetchone()
        if row is None:
            raise InvalidReference(
                f"reference {reference} is no record of scenario {report.scenario}",
                hint="cite the receipt from the answer's x-reef-agent-record-id header",
                reference=reference,
            )
        if row[1] != "inference":
            raise InvalidReference(f"reference {reference} is a {row[1]} record, not an inference record", reference=reference)
        if row[3] is not None:
            raise InvalidReference(
                f"reference {reference} was evicted by retention and can no longer be cited", reference=reference
            )
        found[reference] = (row[0], row[2])
    return list(found.values())


def store_instruction(ingest: Ingest, instruction: Instruction, scenario: Scenario) -> bool:
    """True when stored, False when the same instruction is there. Raises `ContentConflict`."""
    checked_id(instruction.id)
    meta = {"text": instruction.text, "session": instruction.session, "metadata": instruction.metadata}
    mark = digest(b"train", instruction.scenario.encode(), sorted_json(meta))
    if ingest.known(instruction.id, instruction.scenario, mark):
        return False
    known = ingest.placing.session(scenario.row, instruction.session) if instruction.session else None
    session = known.row if known is not None else None
    facts = (instruction.id, "train", instruction.created_at, mark, session, one_line(instruction.text), None)
    _write(ingest, scenario, facts, dumps(meta))
    ingest.tally(scenario.row, "instructions")
    return True


def _write(
    ingest: Ingest,
    scenario: Scenario,
    facts: tuple[str, str, float, bytes, int | None, str, float | None],
    meta: bytes,
) -> int:
    record_id, *rest = facts
    seq = ingest.sequence()
    ingest.connection.execute(_NOTE, (seq, record_id, scenario.row, *rest, len(meta)))
    write_note(ingest.connection, seq, meta)
    ingest.tally(scenario.row, "stored_bytes", len(meta))
    ingest.tally(scenario.row, "naive_bytes", len(meta))
    return seq
