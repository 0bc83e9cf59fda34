"""Learning in the metrics: read from the ledger's own rows just before each scrape, so that no room has to report twice.

Counters start at zero with the process, as Prometheus expects; rows written before the start are not counted.
"""

import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from reef_cli.experience.log import ExperienceLog
from reef_cli.telemetry.metrics import Metrics

_PAGE = 1000


class LearningMeters:
    """Feeds job, swap, staleness and drop metrics. `collect` is called in a thread, one at a time."""

    def __init__(self, log: ExperienceLog, metrics: Metrics) -> None:
        self._log = log
        self._metrics = metrics
        with log.read() as connection:
            self._jobs = _last(connection, "job_events")
            self._releases = _last(connection, "release_events")
            self._dropped = dict(self._drops(connection))
        self._since: dict[str, tuple[str, float]] = {}

    def collect(self) -> None:
        """Count what happened since the last call."""
        with self._log.read() as connection:
            jobs = connection.execute(
                "SELECT e.seq, e.job_id, e.scenario, e.at, e.state, e.detail, j.outcome FROM job_events e"
                " JOIN jobs j ON j.id = e.job_id WHERE e.seq > ? ORDER BY e.seq LIMIT ?",
                (self._jobs, _PAGE),
            ).fetchall()
            releases = connection.execute(
                "SELECT seq, event, detail FROM release_events WHERE seq > ? ORDER BY seq LIMIT ?", (self._releases, _PAGE)
            ).fetchall()
            drops = dict(self._drops(connection))
        for row in jobs:
            self._job(row)
        for seq, event, detail in releases:
            self._releases = seq
            self._swap(event, json.loads(detail))
        for key, count in drops.items():
            if (grown := count - self._dropped.get(key, 0)) > 0:
                self._metrics.dropped.inc(grown, scenario=key[0], reason=key[1])
        self._dropped = drops

    def _job(self, row: tuple[Any, ...]) -> None:
        self._jobs, job_id, scenario, at, state, detail, outcome = row
        before = self._since.pop(job_id, None)
        if before is not None:
            self._metrics.job_seconds.observe(max(0.0, at - before[1]), phase=before[0])
        if state in ("settled", "failed"):
            self._metrics.jobs.inc(scenario=scenario, outcome="failed" if state == "failed" else outcome or "settled")
            return
        self._since[job_id] = (state, at)
        lag = json.loads(detail).get("metrics", {}).get("lag_mean") if state == "candidate" else None
        if lag is not None:
            self._metrics.staleness.observe(float(lag), scenario=scenario)

    def _swap(self, event: str, detail: dict[str, Any]) -> None:
        if event == "served":
            self._metrics.swaps.inc(result="served")
            if "swap_s" in detail:
                self._metrics.swap_seconds.observe(float(detail["swap_s"]))
        elif event == "load_failed":
            self._metrics.swaps.inc(result="failed")

    @staticmethod
    def _drops(connection: sqlite3.Connection) -> Iterable[tuple[tuple[str, str], int]]:
        """`((scenario, reason), count)` of samples that will not train; the reason without its numbers."""
        rows = connection.execute(
            "SELECT scenario, reason, COUNT(*) FROM sample_state WHERE state IN ('dropped', 'refused') GROUP BY 1, 2"
        ).fetchall()
        totals: dict[tuple[str, str], int] = {}
        for scenario, reason, count in rows:
            key = (scenario, reason.partition(":")[0])
            totals[key] = totals.get(key, 0) + count
        return totals.items()


def _last(connection: sqlite3.Connection, table: str) -> int:
    return int(connection.execute(f"SELECT COALESCE(MAX(seq), 0) FROM {table}").fetchone()[0])
