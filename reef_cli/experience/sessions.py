"""Sessions as trees: lists of them, and one as branches with turns, scores and trainable tokens.

Every exchange knows the one it continues (`records.parent`), so a tree is built in one pass over its rows. Where several
continue the same one, the largest following carries the branch on and the others fork from it.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from reef_cli.core.errors import RecordNotFound
from reef_cli.experience.model import Branch, RecordRow, SessionRow, SessionTree, Turn
from reef_cli.experience.query import COLUMNS, FROM, checked_limit, record_row
from reef_cli.experience.scenarios import by_name


def sessions(connection: sqlite3.Connection, scenario: str, limit: int, before: str | None) -> list[SessionRow]:
    """Sessions, latest begun first; `before` continues a list after that session."""
    row = by_name(connection, scenario).row
    edge = 2**62
    if before is not None:
        edge = _session_row(connection, scenario, before)
    found = connection.execute(
        "SELECT key, source, started_at, last_at, records, turns, output_tokens, trainable_tokens, summary FROM sessions"
        " WHERE scenario_id = ? AND id < ? ORDER BY id DESC LIMIT ?",
        (row, edge, checked_limit(limit)),
    )
    return [SessionRow(*values) for values in found]


def _session_row(connection: sqlite3.Connection, scenario: str, session: str) -> int:
    row = connection.execute(
        "SELECT id FROM sessions WHERE scenario_id = ? AND key = ?", (by_name(connection, scenario).row, session)
    ).fetchone()
    if row is None:
        raise RecordNotFound(f"there is no session {session!r} in scenario {scenario}")
    return int(row[0])


def session_tree(connection: sqlite3.Connection, scenario: str, session: str) -> SessionTree:
    """The branches of a session. Raises `RecordNotFound`."""
    where = _session_row(connection, scenario, session)
    rows = [
        record_row(values)
        for values in connection.execute(
            f"SELECT {COLUMNS} {FROM} WHERE r.session_id = ? AND r.kind = 'inference' ORDER BY r.seq", (where,)
        )
    ]
    scores = _scores(connection, where)
    turns = {row.sequence: Turn(row, *scores.get(row.sequence, (0, None))) for row in rows}
    branches = tuple(_branches(rows, turns))
    in_branch = {turn.row.sequence for branch in branches for turn in branch.turns}
    retries = tuple(turns[row.sequence] for row in rows if row.sequence not in in_branch)
    return SessionTree(scenario, session, branches, retries)


def _scores(connection: sqlite3.Connection, session: int) -> dict[int, tuple[int, float | None]]:
    """Number of reports and latest score per exchange."""
    found: dict[int, tuple[int, float | None]] = {}
    for seq, score in connection.execute(
        "SELECT r.seq, p.score FROM records r JOIN citations c ON c.record_seq = r.seq JOIN records p ON p.seq = c.report_seq"
        " WHERE r.session_id = ? ORDER BY p.seq",
        (session,),
    ):
        number, last = found.get(seq, (0, None))
        found[seq] = (number + 1, score if score is not None else last)
    return found


def _branches(rows: Sequence[RecordRow], turns: Mapping[int, Turn]) -> list[Branch]:
    """Cut the forest into branches, in order of their first turn. Parents come before their children."""
    children: dict[int | None, list[RecordRow]] = defaultdict(list)
    size: dict[int, int] = {row.sequence: 1 for row in rows}
    for row in reversed(rows):
        parent = row.parent if row.parent in size else None
        children[parent].append(row)
        if parent is not None:
            size[parent] += size[row.sequence]
    # A retry that nothing continues adds no branch: it is listed apart.
    kept = {key: [row for row in reversed(group) if not _idle_retry(row, size)] for key, group in children.items()}
    starts: list[tuple[RecordRow, int | None]] = [(row, None) for row in kept.get(None, [])]
    home: dict[int, int] = {}
    found: list[Branch] = []
    while starts:
        starts.sort(key=lambda start: -start[0].sequence)
        first, origin = starts.pop()
        path = [first]
        while following := kept.get(path[-1].sequence):
            heir = max(following, key=lambda row: (row.role in ("turn", "retry"), size[row.sequence], -row.sequence))
            starts.extend((row, path[-1].sequence) for row in following if row is not heir)
            path.append(heir)
        index = len(found)
        home.update((row.sequence, index) for row in path)
        found.append(_branch(index, path, origin, home, turns))
    return found


def _idle_retry(row: RecordRow, size: Mapping[int, int]) -> bool:
    return row.role == "retry" and size[row.sequence] == 1


def _branch(
    index: int, path: Sequence[RecordRow], origin: int | None, home: Mapping[int, int], turns: Mapping[int, Turn]
) -> Branch:
    side = all(row.role not in ("turn", "retry") for row in path)
    kind: Literal["main", "fork", "root", "side"] = (
        "side" if side else "fork" if origin is not None else "root" if index else "main"
    )
    return Branch(
        index=index,
        parent=None if origin is None else home[origin],
        forked_from=None if origin is None else turns[origin].row.id,
        kind=kind,
        turns=tuple(turns[row.sequence] for row in path),
        trainable_tokens=sum(row.trainable_tokens for row in path),
    )
