"""Hands the numbers of ended jobs to the experiment trackers, in the order of the ledger, each tracker at its own pace.

The ledger is the source: a tracker that is away gets what it missed later, also after a restart. `metrics/steps.jsonl` in the
home is always kept and has each point exactly once; the other trackers get a point at least once.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reef_cli.core.ids import ReleaseId, release_step
from reef_cli.experience.log import ExperienceLog
from reef_cli.telemetry.trackers import JsonlTracker, Point, Tracker, numbers, open_trackers

logger = logging.getLogger(__name__)

FOLLOW_EVERY_S = 2.0
"""How often the ledger is looked at for jobs that ended."""

_PAGE = 200


class Tracking:
    """The chosen trackers and how far each has come. `follow` blocks and belongs in a thread."""

    def __init__(self, log: ExperienceLog, folder: Path, names: Sequence[str]) -> None:
        self._log = log
        self._jsonl = JsonlTracker(folder / "steps.jsonl")
        self._trackers: dict[str, Tracker] = {"jsonl": self._jsonl, **open_trackers(names, folder)}
        self._cursors = folder / "cursors.json"
        kept = json.loads(self._cursors.read_text()) if self._cursors.exists() else {}
        self._last = {name: int(kept.get(name, 0)) for name in self._trackers} | {"jsonl": self._jsonl.last}
        self._failing: set[str] = set()
        self._one_at_a_time = threading.Lock()

    async def run(self) -> None:
        """Follow the ledger until cancelled."""
        while True:
            await asyncio.to_thread(self.follow)
            await asyncio.sleep(FOLLOW_EVERY_S)

    def follow(self) -> None:
        """Give every tracker the points it has not had. One that fails is named once and tried again at the next look."""
        with self._one_at_a_time:
            self._follow()

    def _follow(self) -> None:
        for name, tracker in self._trackers.items():
            try:
                while self._feed(name, tracker):
                    pass
            except Exception as error:  # a tracker is foreign code over a network: whatever it raises, learning goes on
                if name not in self._failing:
                    logger.warning("tracker %s cannot be written, trying again: %s", name, error)
                self._failing.add(name)
            else:
                self._failing.discard(name)

    def _feed(self, name: str, tracker: Tracker) -> bool:
        """Write one page; whether there may be more."""
        rows = list(self._ended(self._last[name]))
        for point in rows:
            tracker.write(point)
            self._last[name] = point.sequence
        if rows:
            self._keep()
        return len(rows) == _PAGE

    def _ended(self, after: int) -> Iterator[Point]:
        with self._log.read() as connection:
            rows = connection.execute(
                "SELECT e.seq, j.id, j.scenario, j.release_id, e.at, e.state, j.outcome, j.detail FROM job_events e"
                " JOIN jobs j ON j.id = e.job_id WHERE e.seq > ? AND e.state IN ('settled', 'failed') ORDER BY e.seq LIMIT ?",
                (after, _PAGE),
            ).fetchall()
        return map(_point, rows)

    def _keep(self) -> None:
        beside = self._cursors.with_suffix(".new")
        beside.write_text(json.dumps(self._last))
        beside.replace(self._cursors)

    def close(self) -> None:
        """Give the trackers what is left, and end them."""
        self.follow()
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                logger.warning("tracker %s did not close: %s", name, error)


def _point(row: tuple[Any, ...]) -> Point:
    sequence, job, scenario, release, at, state, outcome, raw = row
    detail = json.loads(raw)
    evidence = (detail.get("verdict") or {}).get("evidence") or {}
    values = numbers(detail.get("metrics") or {}) | numbers(evidence, "gate/")
    step = release_step(ReleaseId(release)) if release else None
    named = "failed" if state == "failed" else outcome or "settled"
    return Point(int(sequence), scenario, step or 0, job, named, float(at), values)
