"""What the dashboard shows, read once from the API's JSON: frozen rows of harmless one-line text and numbers.

Pure and tolerant: a missing fact is None or empty, never an error, so that a dashboard survives a newer or older server.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reef_cli.control.plain import one_line


@dataclass(frozen=True, slots=True)
class ScenarioRow:
    """One workload. `rewards` are mean rewards per step, oldest first."""

    name: str
    state: str
    phase: str = ""
    done: int = 0
    total: int = 0
    paused: bool = False
    head: str | None = None
    served: str | None = None
    rewards: tuple[float, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    outcome: str = ""
    job_id: str | None = None
    mode: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseRow:
    """One release; `mark` says what it is to a person: served, held, gone or nothing special."""

    release_id: str
    operation: str
    step: int
    recorded_at: float
    content_id: str
    surface: str
    evidence: str
    current: bool = False
    pending: bool = False
    gated: bool = False
    restorable: bool = True

    @property
    def mark(self) -> str:
        return "●" if self.current else "?" if self.pending else "" if self.restorable else "×"


@dataclass(frozen=True, slots=True)
class RecordRow:
    """One record."""

    sequence: int
    record_id: str
    kind: str
    created_at: float
    text: str
    score: float | None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything on the first screen at one moment. `releases` and `records` belong to the `selected` scenario."""

    server: str = ""
    scenarios: tuple[ScenarioRow, ...] = ()
    selected: str | None = None
    releases: tuple[ReleaseRow, ...] = ()
    records: tuple[RecordRow, ...] = ()
    live: bool = False

    def scenario(self) -> ScenarioRow | None:
        """The selected scenario's row."""
        return next((row for row in self.scenarios if row.name == self.selected), None)

    def head(self, surface: str | None = None) -> ReleaseRow | None:
        """The release at a surface's head, the creation release before there is one; without a surface what moved last."""
        heads = [row for row in self.releases if row.current and surface in (None, row.surface)]
        return next(iter(heads), None) or next((row for row in self.releases if row.operation == "creation"), None)

    def replaced_by(self, target: ReleaseRow) -> ReleaseRow | None:
        """The head that a move to `target` replaces."""
        return self.head(None if target.operation == "creation" else target.surface)

    def held(self) -> ReleaseRow | None:
        """The newest release that waits for a person."""
        return next((row for row in self.releases if row.pending), None)

    def previous(self) -> ReleaseRow | None:
        """What a rollback goes back to by default: the nearest earlier content of the surface that moved last."""
        head = self.head()
        if head is None:
            return None
        earlier = self.releases[self.releases.index(head) + 1 :]
        own = (row for row in earlier if row.surface == head.surface or row.operation == "creation")
        usable = (row for row in own if not row.pending and row.restorable)
        return next((row for row in usable if row.content_id != head.content_id), None)


def scenario_rows(status: Mapping[str, Any]) -> tuple[ScenarioRow, ...]:
    """Rows of `/reef/status`."""
    return tuple(_scenario(raw) for raw in _rows(status.get("scenarios")))


def server_line(status: Mapping[str, Any], url: str) -> str:
    """Version, address, engine and readiness, for the top line."""
    engine = _mapping(status.get("engine"))
    kind = " ".join(filter(None, (_text(engine.get("kind")), _text(engine.get("model")))))
    state = _text(engine.get("state")) or ("ready" if status.get("ready", True) else _text(status.get("not_ready")))
    parts = [f"reef {status.get('version', '?')}", url, kind, state]
    if status.get("draining"):
        parts.append("draining")
    uptime = _number(status.get("uptime_s"))
    if uptime is not None:
        parts.append(f"up {uptime / 60:.0f} min")
    return "  ·  ".join(one_line(part) for part in parts if part)


def release_rows(answer: Any) -> tuple[ReleaseRow, ...]:
    """Rows of `/reef/scenarios/{s}/releases`, newest first."""
    return tuple(_release(raw) for raw in _rows(_mapping(answer).get("releases")))


def record_rows(answer: Any) -> tuple[RecordRow, ...]:
    """Rows of `/reef/scenarios/{s}/records`, oldest first."""
    rows = (_record(raw) for raw in _rows(_mapping(answer).get("records")))
    return tuple(sorted(rows, key=lambda row: row.sequence))


def evidence_line(evidence: Any) -> str:
    """A release's reason, else its first numbers."""
    facts = _mapping(evidence)
    if facts.get("reason"):
        return one_line(facts["reason"], 200)
    numbers = [f"{one_line(name)} {value:.3g}" for name, value in facts.items() if _number(value) is not None]
    return one_line("  ".join(numbers[:4]), 200)


def _scenario(raw: Mapping[str, Any]) -> ScenarioRow:
    job = _mapping(raw.get("job"))
    rewards = raw.get("rewards") if isinstance(raw.get("rewards"), list) else []
    return ScenarioRow(
        name=_text(raw.get("scenario") or raw.get("name")),
        state=_text(raw.get("state")) or "idle",
        phase=_text(raw.get("phase")),
        done=int(_number(raw.get("done")) or 0),
        total=int(_number(raw.get("total")) or 0),
        paused=bool(raw.get("paused")),
        head=_release_id(raw.get("head")),
        served=_release_id(raw.get("served")),
        rewards=tuple(value for value in map(_number, rewards or []) if value is not None),
        counts=tuple((one_line(name), count) for name, count in _mapping(raw.get("counts")).items() if isinstance(count, int)),
        outcome=_outcome(_mapping(raw.get("last_outcome"))),
        job_id=_text(job.get("job_id") or job.get("id")) or None,
        mode=_text(raw.get("training_mode") or raw.get("mode")),
    )


def _outcome(raw: Mapping[str, Any]) -> str:
    reason = _text(raw.get("reason"))
    return ": ".join(filter(None, [_text(raw.get("outcome")), reason]))


def _release(raw: Mapping[str, Any]) -> ReleaseRow:
    return ReleaseRow(
        release_id=_text(raw.get("release_id")),
        operation=_text(raw.get("operation")),
        step=int(_number(raw.get("step")) or 0),
        recorded_at=_number(raw.get("recorded_at")) or 0.0,
        content_id=_text(raw.get("content_id")),
        surface=_text(raw.get("surface")),
        evidence=evidence_line(raw.get("evidence")),
        current=bool(raw.get("current")),
        pending=bool(raw.get("pending")),
        gated=bool(raw.get("gated")),
        restorable=bool(raw.get("restorable", True)),
    )


def _record(raw: Mapping[str, Any]) -> RecordRow:
    text = raw.get("error") or raw.get("summary") or raw.get("feedback") or raw.get("text") or ""
    return RecordRow(
        sequence=int(_number(raw.get("sequence")) or 0),
        record_id=_text(raw.get("agent_record_id") or raw.get("id")),
        kind=_text(raw.get("request_type") or raw.get("kind")),
        created_at=_number(raw.get("created_at")) or 0.0,
        text=one_line(text, 200),
        score=_number(raw.get("score")),
        failed=bool(raw.get("error")) or raw.get("complete") is False,
    )


def _rows(value: Any) -> Sequence[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return "" if value is None else one_line(value, 200)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _release_id(value: Any) -> str | None:
    found = value.get("release_id") if isinstance(value, Mapping) else value
    return _text(found) or None
