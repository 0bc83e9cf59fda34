"""The archive of a run: every solution and every rollout, durable before anything else hears of it.

One SQLite file. A step's parents are written before its first rollout, a rollout with its solution in one transaction, so that
a run killed at any moment goes on where it was and loses no solution. Visits are counted from the rollouts, never stored. A run
belongs to one problem and one space; one process works in it at a time. Knows neither models nor HTTP.
"""

import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from reef_cli.core.errors import AlreadyRunning, ConfigError, StorageError
from reef_cli.discovery import puct
from reef_cli.discovery.problem import Made, State, Verdict
from reef_cli.discovery.puct import Node

CHILDREN_PER_PARENT = 2
MOST_STATES = 1000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS states (
  id INTEGER PRIMARY KEY, parent INTEGER, initial INTEGER NOT NULL, value REAL NOT NULL, strict REAL NOT NULL,
  solution TEXT NOT NULL, text TEXT NOT NULL, summary TEXT NOT NULL, step INTEGER NOT NULL, at REAL NOT NULL,
  live INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE TABLE IF NOT EXISTS steps (
  step INTEGER PRIMARY KEY, parents TEXT NOT NULL, head TEXT, committed_head TEXT, committed INTEGER NOT NULL DEFAULT 0,
  started_at REAL NOT NULL, ended_at REAL, detail TEXT NOT NULL DEFAULT '{}') STRICT;
CREATE TABLE IF NOT EXISTS rollouts (
  step INTEGER NOT NULL, grp INTEGER NOT NULL, rollout INTEGER NOT NULL, parent INTEGER NOT NULL, state INTEGER,
  text TEXT NOT NULL, score REAL NOT NULL, valid INTEGER NOT NULL, reason TEXT NOT NULL, receipt TEXT,
  reported INTEGER NOT NULL DEFAULT 0, at REAL NOT NULL, PRIMARY KEY (step, grp, rollout)) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its parents in group order, the head it ran against, and whether its training is known to be over."""

    step: int
    parents: tuple[int, ...]
    head: str | None
    committed_head: str | None
    committed: bool
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One try. `score` is what is reported: the value of a new valid solution, else 0."""

    step: int
    group: int
    rollout: int
    parent: int
    text: str
    score: float
    valid: bool
    reason: str
    receipt: str | None = None
    state: int | None = None
    reported: bool = False
    at: float = 0.0


class Archive:
    """One run's file. Methods may be called from several threads of one process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self._lock = threading.Lock()
        self._owner = _own(path.with_suffix(".lock"))
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            self._owner.close()
            raise StorageError(f"the archive {path} cannot be opened", why=str(error)) from error

    def close(self) -> None:
        self._db.close()
        self._owner.close()

    # -- the run -------------------------------------------------------------------------------------------------------

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Bind the archive to a run's unchangeable facts, or check that it is the same run. `ConfigError` if it is not."""
        stored = self.facts()
        for name, value in facts.items():
            if name in stored and stored[name] != value:
                raise ConfigError(
                    f"this archive was begun with {name} {stored[name]}, not {value}",
                    why=str(self.path),
                    hint="name another run with --run, or take the same settings",
                )
        with self._lock, self._db:
            for name, value in facts.items():
                self._db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def stamp(self) -> str:
        """What tells this archive from every other one, even of the same name."""
        with self._lock, self._transaction():
            self._db.execute("INSERT OR IGNORE INTO facts VALUES ('stamp', ?)", (json.dumps(os.urandom(16).hex()),))
        return str(self.facts()["stamp"])

    def facts(self) -> dict[str, Any]:
        return {name: json.loads(value) for name, value in self._rows("SELECT name, value FROM facts")}

    def add_starts(self, starts: Sequence[tuple[Made, Verdict]]) -> None:
        """The initial states, once."""
        with self._lock, self._transaction():
            if self._db.execute("SELECT count(*) FROM states WHERE initial = 1").fetchone()[0]:
                return
            for made, verdict in starts:
                self._insert(made, verdict, None, True, 0)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def next_step(
        self,
        groups: int,
        head: str | None,
        *,
        c: float = 1.0,
        initial_only: bool = False,
        detail: Mapping[str, Any] | None = None,
    ) -> Step:
        """The step under way, else a new one with parents chosen and written down. `detail` is kept with a new step."""
        latest = self.latest()
        if latest is not None and not latest.committed:
            return latest
        nodes, total = self.nodes()
        if initial_only:
            nodes = [node for node in nodes if node.initial]
            parents = tuple(nodes[i % len(nodes)].id for i in range(groups))
        else:
            parents = tuple(puct.choose(nodes, total, groups, c))
        step = Step((latest.step if latest else 0) + 1, parents, head, None, False, dict(detail or {}))
        with self._lock, self._transaction():
            self._db.execute(
                "INSERT INTO steps (step, parents, head, detail, started_at) VALUES (?, ?, ?, ?, ?)",
                (step.step, json.dumps(parents), head, json.dumps(step.detail), time.time()),
            )
        return step

    def latest(self) -> Step | None:
        """The newest step."""
        rows = self._rows("SELECT step, parents, head, committed_head, committed, detail FROM steps ORDER BY step DESC LIMIT 1")
        return next((Step(s, tuple(json.loads(p)), h, ch, bool(c), json.loads(d)) for s, p, h, ch, c, d in rows), None)

    def commit(self, step: int, head: str | None, detail: Mapping[str, Any]) -> None:
        """The step is over: what was found enters the choice of parents, and the run is paired with `head`."""
        with self._lock, self._transaction():
            self._db.execute(
                "UPDATE steps SET committed = 1, committed_head = ?, ended_at = ?, detail = ? WHERE step = ?",
                (head, time.time(), json.dumps(dict(detail)), step),
            )
            rows = self._db.execute("SELECT id, parent, value, initial FROM states").fetchall()
            found = {row[0]: row[2] for row in rows if not row[3]}
            live = puct.kept(
                found,
                {row[0]: row[1] for row in rows},
                per_parent=CHILDREN_PER_PARENT,
                most=MOST_STATES - (len(rows) - len(found)),
            )
            self._db.execute("UPDATE states SET live = initial")
            self._db.executemany("UPDATE states SET live = 1 WHERE id = ?", [(state,) for state in live])

    def history(self) -> list[dict[str, Any]]:
        """Every step with the best strict value known after it, oldest first."""
        best = self._rows("SELECT max(strict) FROM states WHERE initial = 1")[0][0]
        out = []
        for step, detail, committed, head in self._rows(
            "SELECT step, detail, committed, committed_head FROM steps ORDER BY step"
        ):
            counts = self._rows("SELECT count(*), sum(valid), max(score), avg(score) FROM rollouts WHERE step = ?", (step,))[0]
            found = self._rows("SELECT max(strict) FROM states WHERE step = ? AND initial = 0", (step,))[0][0]
            best = max(value for value in (best, found, 0.0) if value is not None)
            out.append(
                {
                    "step": step, "rollouts": counts[0], "valid": counts[1] or 0, "top": counts[2] or 0.0,
                    "mean": counts[3] or 0.0, "best": best, "committed": bool(committed), "head": head, **json.loads(detail),
                }
            )  # fmt: skip
        return out

    # -- rollouts ------------------------------------------------------------------------------------------------------

    def rollouts(self, step: int) -> list[Rollout]:
        """What the step has so far, in order."""
        rows = self._rows(
            "SELECT step, grp, rollout, parent, text, score, valid, reason, receipt, state, reported, at"
            " FROM rollouts WHERE step = ? ORDER BY grp, rollout",
            (step,),
        )
        return [_rollout(row) for row in rows]

    def record(self, rollout: Rollout, found: tuple[Made, Verdict] | None) -> None:
        """Write a try, and the solution it found, for good. A try written before stays as it was."""
        with self._lock, self._transaction():
            taken = self._db.execute(
                "SELECT 1 FROM rollouts WHERE step = ? AND grp = ? AND rollout = ?",
                (rollout.step, rollout.group, rollout.rollout),
            ).fetchone()
            if taken:
                return
            state = self._insert(*found, rollout.parent, False, rollout.step) if found else None
            self._db.execute(
                "INSERT INTO rollouts (step, grp, rollout, parent, state, text, score, valid, reason, receipt, at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (rollout.step, rollout.group, rollout.rollout, rollout.parent, state, rollout.text, rollout.score,
                 int(rollout.valid), rollout.reason, rollout.receipt, time.time()),
            )  # fmt: skip

    def reported(self, rollout: Rollout) -> None:
        """The server has this try's report."""
        with self._lock, self._transaction():
            self._db.execute(
                "UPDATE rollouts SET reported = 1 WHERE step = ? AND grp = ? AND rollout = ?",
                (rollout.step, rollout.group, rollout.rollout),
            )

    # -- states --------------------------------------------------------------------------------------------------------

    def nodes(self) -> tuple[list[Node], int]:
        """The states search may start from, oldest first, and the number of all rollouts."""
        rows = self._rows("SELECT id, parent, value, initial, live FROM states ORDER BY id")
        parents: dict[int, int | None] = {row[0]: row[1] for row in rows}
        visits = dict.fromkeys(parents, 0)
        total = 0
        for parent, count in self._rows("SELECT parent, count(*) FROM rollouts GROUP BY parent"):
            total += count
            for state in (parent, *puct.ancestors(parent, parents)):
                visits[state] += count
        best: dict[int, float] = {}
        for _, parent, value, _, _ in rows:
            if parent is not None:
                best[parent] = max(value, best.get(parent, value))
        return [
            Node(row[0], row[2], bool(row[3]), visits[row[0]], best.get(row[0]), frozenset(puct.ancestors(row[0], parents)))
            for row in rows
            if row[3] or row[4]
        ], total

    def state(self, number: int) -> State:
        return self._states("WHERE id = ?", (number,))[0]

    def origin(self, number: int) -> dict[str, Any] | None:
        """The try that found a state: its place and receipt; None for a first solution."""
        rows = self._rows("SELECT step, grp, rollout, receipt, parent FROM rollouts WHERE state = ?", (number,))
        return next((dict(zip(("step", "group", "rollout", "receipt", "parent"), row, strict=True)) for row in rows), None)

    def values(self) -> list[float]:
        """Values of all states, found ones of the step under way included."""
        return [row[0] for row in self._rows("SELECT value FROM states")]

    def best(self) -> State | None:
        """The state with the largest strict value."""
        return next(iter(self._states("ORDER BY strict DESC, id LIMIT 1")), None)

    def _states(self, rest: str, values: Sequence[Any] = ()) -> list[State]:
        rows = self._rows(f"SELECT id, parent, value, initial, solution, text, summary FROM states {rest}", values)
        return [State(row[0], row[1], row[2], bool(row[3]), json.loads(row[4]), row[5], row[6]) for row in rows]

    def _insert(self, made: Made, verdict: Verdict, parent: int | None, initial: bool, step: int) -> int:
        cursor = self._db.execute(
            "INSERT INTO states (parent, initial, value, strict, solution, text, summary, step, at, live)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (parent, int(initial), verdict.value, verdict.strict, json.dumps(made.solution), made.text, made.summary, step,
             time.time(), int(initial)),
        )  # fmt: skip
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._db)


def _rollout(row: Sequence[Any]) -> Rollout:
    step, group, rollout, parent, text, score, valid, reason, receipt, state, reported, at = row
    return Rollout(step, group, rollout, parent, text, score, bool(valid), reason, receipt, state, bool(reported), at)


class _Transaction:
    """`BEGIN IMMEDIATE` to `COMMIT`; rolled back on any exception."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        self._db.execute("ROLLBACK" if kind else "COMMIT")


def _own(path: Path) -> IO[str]:
    """A lock that lives and dies with this process. `AlreadyRunning` when another holds it."""
    handle = path.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise AlreadyRunning("another process works in this run", why=str(path), hint="name another run with --run") from error
    os.set_inheritable(handle.fileno(), False)
    return handle
