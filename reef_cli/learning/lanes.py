"""One recipe of a deployment and what it does with a scenario's stream: admit, drop what is too old, open jobs.

A deployment has one lane, a composite recipe one per surface. Lanes read the same stream, each by its own cursor, and each
gives a record to at most one of its samples. Knows nothing of turns, slots or running jobs; those are the worker's.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reef_cli.core import surfaces
from reef_cli.core.clock import Clock
from reef_cli.core.ids import ReleaseId, new_release_id
from reef_cli.core.ports import Publishing
from reef_cli.core.types import Cadence, Operation, Release, Report, Surface
from reef_cli.experience.log import ExperienceLog
from reef_cli.learning import batching, coupling, jobs
from reef_cli.learning.cadence import steps_since_gate
from reef_cli.learning.contract import Deriving, Recipe, Refusal, Tools
from reef_cli.learning.jobs import Job, Queued
from reef_cli.learning.observing import Observing
from reef_cli.learning.runner import Progress, ReleaseStore, Runner

QUEUE_WINDOW = 1024
"""Waiting samples looked at for a batch; incomplete groups beyond it must time out first."""

PAGES = 4
"""Pages of reports admitted in one turn: a scenario with a long backlog lets the others have theirs in between."""


@dataclass
class Lane:
    """A recipe with the runner of its jobs. `gate_idle_s`: rolling steps are judged once no sample came for this long."""

    log: ExperienceLog
    releases: ReleaseStore
    publishing: Publishing
    recipe: Recipe
    runner: Runner
    cadence: Cadence
    clock: Clock
    tools: Tools = field(default_factory=Tools)
    gate_idle_s: float = 60.0

    def __post_init__(self) -> None:
        self.observing = Observing(self.log, self.recipe, self.tools) if isinstance(self.recipe, Deriving) else None
        self._last_sample: dict[str, float] = {}
        self._idle_gated: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.recipe.name

    def head(self, scenario: str) -> Release:
        """What is in force of the surface this recipe changes."""
        return self.publishing.served(scenario, self.recipe.surface)

    def woken(self, scenario: str) -> None:
        """New records are visible."""
        self._last_sample.setdefault(scenario, self.clock.monotonic())
        if self.observing is not None:
            self.observing.wake()

    # -- what it says --------------------------------------------------------------------------------------------------

    def state(self, scenario: str) -> Mapping[str, Any]:
        """What the status page says of this lane; reads the ledger, never waits."""
        wanted = self.recipe.settings.batch_size
        with self.log.read() as connection:
            history = [job for job in jobs.recent(connection, scenario, 40) if job.recipe == self.name]
            waiting = len(jobs.queued(connection, scenario, self.name, wanted))
        running = next((job for job in history if job.open), None)
        ended = next((job for job in history if not job.open), None)
        progress = self.runner.progress.get(running.id, Progress()) if running else Progress()
        return {
            "state": running.state if running else ("collecting" if waiting else "idle"),
            "phase": progress.phase or (running.state if running else ""),
            "done": progress.done if running else waiting,
            "total": progress.total if running else wanted,
            "job": job_view(running) if running else None,
            "last_outcome": _outcome(ended) if ended else None,
            "rewards": _rewards(history),
        }

    def eligibility(self, report: Report) -> Mapping[str, str]:
        """Why each receipt of a stored report trains or does not, as the recipe sees it."""
        known = batching.by_id(self.releases.list(report.scenario))
        fate = batching.admit(self.recipe, self.log, report, known)
        if isinstance(fate, Refusal):
            return dict.fromkeys(report.references, fate.reason)
        with self.log.read() as connection:
            taken = jobs.taken_by(connection, self.name, fate.records, besides=report.id)
        return dict.fromkeys(report.references, taken or "eligible")

    # -- what it does --------------------------------------------------------------------------------------------------

    async def admit(self, scenario: str) -> bool:
        """Give new reports their fate, in stream order; whether there may be more than one turn takes."""
        with self.log.read() as connection:
            after = jobs.cursor(connection, scenario, self.name)
        known = batching.by_id(await asyncio.to_thread(self.releases.list, scenario))
        for _ in range(PAGES):
            page = await asyncio.to_thread(batching.admit_new, self.recipe, self.log, scenario, after, known)
            if not page:
                return False
            await self._enqueue(scenario, page)
            self._last_sample[scenario] = self.clock.monotonic()
            after = page[-1].sequence
        return True

    async def _enqueue(self, scenario: str, page: list[jobs.Entry]) -> None:
        await self.log.write(lambda c: jobs.enqueue(c, scenario, self.name, self.clock.now(), page))

    async def next_job(self, scenario: str, *, requested: bool, manual: bool) -> Job | None:
        """Open a job when a batch (or an idle gate) is due."""
        head, size = self.head(scenario), self.recipe.settings.batch_size
        with self.log.read() as connection:
            waiting = jobs.queued(connection, scenario, self.name, max(size * 4, QUEUE_WINDOW))
        waiting = await self._dropped(scenario, head, waiting)
        chosen = batching.choose(waiting, size, short=requested)
        if chosen and (requested or not manual):
            if (await self._chain(scenario))[0].release_id != head.release_id:
                return None  # a step from what the chain has left could never be published; what it has now is served soon
            return await self._open(scenario, head, [item.report_id for item in chosen], {})
        return await self._idle_gate(scenario, head)

    async def _chain(self, scenario: str) -> list[Release]:
        """The releases of the recipe's surface, newest first."""
        return surfaces.lane(await asyncio.to_thread(self.releases.list, scenario), self.recipe.surface)

    async def gate(self, scenario: str) -> Job:
        """Open a job that judges the head with the full evaluation."""
        head = self.head(scenario)
        self._idle_gated[scenario] = head.release_id
        return await self._open(scenario, head, [], {"gate_only": True}, content_id=head.content_id)

    async def _dropped(self, scenario: str, head: Release, waiting: list[Queued]) -> list[Queued]:
        """Drop what is too old and groups that stay incomplete; returns what still waits."""
        settings = self.recipe.settings
        rows = batching.stale(waiting, head.step, settings.max_staleness)
        weights = self.recipe.surface is Surface.WEIGHTS
        if rows or (waiting and weights):
            chain = await asyncio.to_thread(self.releases.list, scenario)
            lane = surfaces.lane(chain, self.recipe.surface)
            rows = batching.stale(waiting, head.step, settings.max_staleness, lane)
            rows += coupling.moved(waiting, chain) if weights else []
        rows += batching.timed_out(waiting, self.clock.now(), getattr(settings, "group_timeout_s", math.inf))
        if not rows:
            return waiting
        await self.log.write(lambda c: jobs.drop(c, self.name, self.clock.now(), rows))
        gone = {report_id for report_id, _ in rows}
        return [item for item in waiting if item.report_id not in gone]

    async def _idle_gate(self, scenario: str, head: Release) -> Job | None:
        """Rolling cadence: judge the steps since the last gate once the stream has gone quiet, once per head."""
        if self.cadence is not Cadence.ROLLING or head.operation is not Operation.TRAINING or head.gated:
            return None
        quiet = self.clock.monotonic() - self._last_sample.get(scenario, self.clock.monotonic())
        if quiet < self.gate_idle_s or self._idle_gated.get(scenario) == head.release_id:
            return None
        lane = await self._chain(scenario)
        return await self.gate(scenario) if lane[0].release_id == head.release_id and steps_since_gate(lane) else None

    async def _open(
        self, scenario: str, head: Release, reports: list[Any], detail: Mapping[str, Any], content_id: str | None = None
    ) -> Job:
        tip = await asyncio.to_thread(self.releases.tip, scenario)
        release_id = new_release_id((tip or head).step + 1)
        detail = {**detail, "kind": head.kind} if content_id else detail

        def write(connection: Any) -> Job:
            job = jobs.reserve(
                connection,
                scenario=scenario,
                recipe=self.name,
                base=ReleaseId(head.release_id),
                release_id=release_id,
                samples=reports,
                at=self.clock.now(),
                detail=detail,
            )
            if content_id:
                connection.execute("UPDATE jobs SET content_id = ? WHERE id = ?", (content_id, job.id))
            return jobs.get(connection, job.id)

        return await self.log.write(write)


def job_view(job: Job) -> dict[str, Any]:
    """A job as JSON for people and programs."""
    return {
        "job_id": job.id,
        "scenario": job.scenario,
        "recipe": job.recipe,
        "state": job.state,
        "outcome": job.outcome,
        "reason": job.reason,
        "base_release_id": job.base_release_id,
        "release_id": job.release_id,
        "content_id": job.content_id,
        "created_at": job.created_at,
        "updated_at": job.updated_at,
        "detail": dict(job.detail),
    }


def _outcome(job: Job) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "outcome": job.outcome if job.state == "settled" else "failed",
        "reason": job.reason,
        "at": job.updated_at,
    }


def _rewards(history: list[Job]) -> list[float]:
    """Mean reward of each past step, oldest first."""
    values = [job.detail.get("metrics", {}).get("reward_mean") for job in reversed(history)]
    return [float(value) for value in values if value is not None]
