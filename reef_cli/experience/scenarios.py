"""The scenario registry: which workloads exist, their recipe, mode and pause. Reads come from memory, since every request asks.

A scenario is bound for life to its recipe; one that was only recorded may be given its first recipe later. Archiving moves a
scenario and its learning ledger under a label that no live scenario can have, which frees the name for an empty stream.
"""

import sqlite3
import threading
from collections.abc import Callable, Sequence

from reef_cli.core.clock import Clock
from reef_cli.core.errors import ConflictError, InvalidRequest, InvalidScenario, JobOut, ScenarioNotFound
from reef_cli.core.ids import valid_scenario
from reef_cli.experience.model import Scenario, TrainingMode
from reef_cli.experience.writer import Writer

_SELECT = "SELECT id, name, recipe, mode, paused, created_at, archived_at FROM scenarios"
_MODES = ("auto", "manual", "hybrid")


def _scenario(row: tuple[int, str, str | None, TrainingMode, int, float, float | None]) -> Scenario:
    return Scenario(row[0], row[1], row[2], row[3], bool(row[4]), row[5], row[6])


class ScenarioRegistry:
    """Async writers, sync readers; the memory copy changes right after each commit, before the caller is told."""

    def __init__(self, connection: sqlite3.Connection, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._live: dict[str, Scenario] = {}
        for row in connection.execute(f"{_SELECT} WHERE archived_at IS NULL ORDER BY id"):
            self._live[row[1]] = _scenario(row)

    def attach(self, writer: Writer) -> None:
        """The writer through which changes go; called once, while the log opens."""
        self._writer = writer

    def find(self, name: str) -> Scenario | None:
        """The live scenario of that name, or None."""
        return self._live.get(name)

    def get(self, name: str) -> Scenario:
        """The live scenario of that name. Raises `ScenarioNotFound`."""
        if (scenario := self._live.get(name)) is None:
            raise ScenarioNotFound(f"there is no scenario {name!r}", hint="`reef scenario list` shows those there are")
        return scenario

    def list(self) -> Sequence[Scenario]:
        """Live scenarios, oldest first."""
        return [*self._live.values()]

    async def ensure(self, name: str, recipe: str | None = None, *, mode: TrainingMode = "auto") -> Scenario:
        """The scenario, made if need be with `mode`. Raises `InvalidScenario`, or `ConflictError` for another recipe."""
        scenario = self._live.get(name)
        if scenario is not None and (recipe is None or scenario.recipe == recipe):
            return scenario
        if not valid_scenario(name):
            raise InvalidScenario(
                f"{name!r} is no scenario name",
                hint="1 to 64 of letters, digits, '.', '_' and '-', beginning with a letter or digit",
            )
        at = self._clock.now()
        return await self._change(lambda connection: _ensure(connection, name, recipe, mode, at))

    async def set_mode(self, name: str, mode: TrainingMode) -> Scenario:
        """When its jobs start: by themselves, on instruction, or both."""
        if mode not in _MODES:
            raise InvalidRequest(f"unknown training mode {mode!r}", hint="auto, manual or hybrid")
        return await self._change(lambda connection: _update(connection, name, "mode", mode))

    async def pause(self, name: str) -> Scenario:
        """No new jobs until `resume`; serving and recording go on."""
        return await self._change(lambda connection: _update(connection, name, "paused", 1))

    async def resume(self, name: str) -> Scenario:
        return await self._change(lambda connection: _update(connection, name, "paused", 0))

    async def archive(self, name: str) -> Scenario:
        """Free the name; what was recorded stays readable under the returned label. Raises `JobOut`."""
        at = self._clock.now()
        return await self._change(lambda connection: _archive(connection, name, at), gone=name)

    async def _change(self, work: Callable[[sqlite3.Connection], Scenario], gone: str | None = None) -> Scenario:
        if self._writer is None:
            raise RuntimeError("the registry is not attached to a writer")
        return await self._writer.call(work, after=lambda scenario: self._remember(scenario, gone))

    def _remember(self, scenario: Scenario, gone: str | None) -> None:
        """Copy on write: readers hold no lock."""
        with self._lock:
            live = dict(self._live)
            if gone is not None:
                live.pop(gone, None)
            else:
                live[scenario.name] = scenario
            self._live = live


def archived(connection: sqlite3.Connection) -> list[Scenario]:
    """Archived scenarios under their labels, oldest first."""
    return [_scenario(row) for row in connection.execute(f"{_SELECT} WHERE archived_at IS NOT NULL ORDER BY archived_at, id")]


def by_name(connection: sqlite3.Connection, name: str) -> Scenario:
    """A scenario by name or archive label. Raises `ScenarioNotFound`."""
    row = connection.execute(f"{_SELECT} WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise ScenarioNotFound(f"there is no scenario {name!r}", hint="`reef scenario list` shows those there are")
    return _scenario(row)


def _ensure(connection: sqlite3.Connection, name: str, recipe: str | None, mode: TrainingMode, at: float) -> Scenario:
    row = connection.execute(f"{_SELECT} WHERE name = ?", (name,)).fetchone()
    if row is None:
        connection.execute(
            "INSERT INTO scenarios (name, recipe, mode, paused, created_at) VALUES (?, ?, ?, 0, ?)", (name, recipe, mode, at)
        )
    elif recipe is not None and row[2] is None:
        connection.execute("UPDATE scenarios SET recipe = ? WHERE name = ?", (recipe, name))
    elif recipe is not None and row[2] != recipe:
        raise ConflictError(
            f"scenario {name!r} belongs to recipe {row[2]}, not {recipe}",
            why="a scenario keeps its recipe for life",
            hint="use another scenario name, or archive this one",
        )
    return by_name(connection, name)


def _update(connection: sqlite3.Connection, name: str, column: str, value: object) -> Scenario:
    connection.execute(f"UPDATE scenarios SET {column} = ? WHERE name = ? AND archived_at IS NULL", (value, name))
    return by_name(connection, name)


def _archive(connection: sqlite3.Connection, name: str, at: float) -> Scenario:
    scenario = by_name(connection, name)
    out = connection.execute(
        "SELECT id, state FROM jobs WHERE scenario = ? AND state NOT IN ('settled', 'failed') LIMIT 1", (name,)
    ).fetchone()
    if out is not None:
        raise JobOut(f"job {out[0]} of scenario {name!r} is {out[1]}", hint="wait for it or cancel it, then archive again")
    label = f"{name}~{scenario.row}"
    connection.execute("UPDATE scenarios SET name = ?, archived_at = ? WHERE id = ?", (label, at, scenario.row))
    for table in ("jobs", "job_events", "release_events", "observed", "shadow_answers"):
        connection.execute(f"UPDATE {table} SET scenario = ? WHERE scenario = ?", (label, name))
    # Keyed by record ids, which the freed name may see again.
    connection.execute(
        "UPDATE sample_records SET scenario = ?, record_id = ? || '/' || record_id, report_id = ? || '/' || report_id"
        " WHERE scenario = ?",
        (label, label, label, name),
    )
    connection.execute(
        "UPDATE sample_state SET scenario = ?, report_id = ? || '/' || report_id WHERE scenario = ?", (label, label, name)
    )
    return by_name(connection, label)
