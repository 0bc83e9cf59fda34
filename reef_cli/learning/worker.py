"""The learning worker: admits reports, opens jobs, and shares the trainer between scenarios, beside serving.

One pass over a scenario admits its new reports, drops what is too old, and opens a job when a batch is ready. Scenarios take
turns: the one served longest ago goes first, so a busy scenario cannot starve a quiet one. Nothing here blocks the event
loop, and nothing a client does waits for it.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reef_cli.core.clock import Clock
from reef_cli.core.errors import EngineUnavailable, JobCancelled, JobOut, ReefError
from reef_cli.core.ids import ReleaseId, new_release_id
from reef_cli.core.ports import Publishing
from reef_cli.core.types import Cadence, JobState, Operation, Release, Report, Surface
from reef_cli.experience.log import ExperienceLog
from reef_cli.learning import batching, coupling, jobs
from reef_cli.learning.cadence import steps_since_gate
from reef_cli.learning.contract import Deriving, Recipe, Refusal, Tools
from reef_cli.learning.jobs import Job, Queued
from reef_cli.learning.observing import Observing
from reef_cli.learning.runner import Progress, ReleaseStore, Runner

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""After a failed job a scenario waits, twice as long each time, so that a fault that stays does not burn the machine."""

QUEUE_WINDOW = 1024
"""Waiting samples looked at for a batch; incomplete groups beyond it must time out first."""

IDLE_TICK_S = 1.0
"""How often the worker looks around when nothing wakes it."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the deployment decides about learning."""

    slots: int = 1
    gate_idle_s: float = 60.0
    """Rolling cadence: with no new sample for this long, the steps since the last full gate are judged."""


class LearningWorker:
    """Implements the port `LearningPort`; `run` is a task of the supervisor."""

    def __init__(
        self,
        *,
        log: ExperienceLog,
        releases: ReleaseStore,
        publishing: Publishing,
        recipe: Recipe,
        runner: Runner,
        cadence: Cadence,
        settings: WorkerSettings,
        clock: Clock,
        tools: Tools | None = None,
    ) -> None:
        self._log = log
        self._releases = releases
        self._publishing = publishing
        self._recipe = recipe
        self._runner = runner
        self._cadence = cadence
        self._settings = settings
        self._clock = clock
        self._observing = Observing(log, recipe, tools or Tools()) if isinstance(recipe, Deriving) else None
        self._wake = asyncio.Event()
        self._stopping = False
        self._running: dict[str, asyncio.Task[Job]] = {}
        self._jobs: dict[str, str] = {}
        self._last_turn: dict[str, float] = {}
        self._last_sample: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        self._requested: set[str] = set()
        self._failures: dict[str, int] = {}
        self._resting: dict[str, float] = {}
        self._idle_gated: dict[str, str] = {}

    # -- the port ------------------------------------------------------------------------------------------------------

    def wake(self, scenario: str) -> None:
        self._last_sample.setdefault(scenario, self._clock.monotonic())
        self._wake.set()
        if self._observing is not None:
            self._observing.wake()

    def state(self, scenario: str) -> Mapping[str, Any]:
        """What the status page says of a scenario's learning; reads the ledger, never waits."""
        with self._log.read() as connection:
            history = jobs.recent(connection, scenario, 40)
            waiting = len(jobs.queued(connection, scenario, self._recipe.name, self._recipe.settings.batch_size))
        running = next((job for job in history if job.open), None)
        ended = next((job for job in history if not job.open), None)
        progress = self._runner.progress.get(running.id, Progress()) if running else Progress()
        wanted = self._recipe.settings.batch_size
        return {
            "state": running.state if running else ("collecting" if waiting else "idle"),
            "phase": progress.phase or (running.state if running else ""),
            "done": progress.done if running else waiting,
            "total": progress.total if running else wanted,
            "job": job_view(running) if running else None,
            "last_outcome": _outcome(ended) if ended else None,
            "rewards": _rewards(history),
        }

    def eligibility(self, scenario: str, report_id: str) -> Mapping[str, str]:
        """Why each receipt of a stored report trains or does not, as the recipe sees it."""
        report = self._log.get(scenario, report_id)
        if not isinstance(report, Report):
            return {}
        known = batching.by_id(self._releases.list(scenario))
        fate = batching.admit(self._recipe, self._log, report, known)
        if isinstance(fate, Refusal):
            return dict.fromkeys(report.references, fate.reason)
        with self._log.read() as connection:
            taken = jobs.taken_by(connection, self._recipe.name, fate.records, besides=report_id)
        return dict.fromkeys(report.references, taken or "eligible")

    # -- what a person may ask -----------------------------------------------------------------------------------------

    def request_step(self, scenario: str) -> None:
        """Manual and hybrid modes: take a step with what is queued, batch full or not."""
        self._requested.add(scenario)
        self._wake.set()

    async def request_gate(self, scenario: str) -> Job:
        """Open a job that judges the head with the full evaluation. Raises `JobOut` while another job runs."""
        if scenario in self._running:
            raise JobOut(f"A job of {scenario} is under way.", hint="Wait for it: `reef jobs list`.")
        head = self._head(scenario)
        job = await self._open(scenario, head, [], {"gate_only": True}, content_id=head.content_id)
        self._idle_gated[scenario] = head.release_id
        self._start(job)
        return job

    async def cancel(self, scenario: str, job_id: str) -> bool:
        """Stop a running job; its samples return to the queue. False when it had already ended. Raises `JobNotFound`."""
        with self._log.read() as connection:
            job = jobs.get(connection, job_id)
        task = self._running.get(scenario)
        if not job.open or task is None or self._jobs.get(scenario) != job_id:
            return False
        task.cancel()
        await asyncio.wait([task])
        await self._runner.fail(job_id, JobCancelled("a person cancelled it"))
        return True

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Finish or abandon the jobs a crash left open, before anything new starts."""
        with self._log.read() as connection:
            left = jobs.open_jobs(connection)
        for job in left:
            ended = await self._runner.recover(job)
            logger.info("job %s found %s after a restart: %s", job.id, job.state, ended.state)

    async def run(self) -> None:
        """Until stopped: take turns. A failing pass is logged and tried again; it never ends the loop."""
        watching = asyncio.create_task(self._observing.run(), name="observing") if self._observing else None
        try:
            await self._take_turns()
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _take_turns(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                await self._turn()
            except ReefError as error:
                logger.warning("learning pass failed: %s", error)
            try:
                # Not `wait_for`: in Python 3.11 it swallows a cancellation that meets the event.
                async with asyncio.timeout(IDLE_TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """Stop running jobs where they are and start no more; the ledger lets the next start finish or abandon them."""
        self._stopping = True
        for task in list(self._running.values()):
            task.cancel()
        if self._running:
            await asyncio.wait(list(self._running.values()))

    async def _turn(self) -> None:
        names = [row.name for row in self._log.scenarios.list()]
        for scenario in sorted(names, key=lambda name: self._last_turn.get(name, 0.0)):
            await self._admit(scenario)
            if len(self._running) >= self._settings.slots or scenario in self._running:
                continue
            if self._log.scenarios.get(scenario).paused or not self._opened(scenario) or self._rests(scenario):
                continue
            job = None if self._stopping else await self._next_job(scenario)
            if job is not None and not self._stopping:
                self._last_turn[scenario] = self._clock.monotonic()
                self._start(job)

    async def _admit(self, scenario: str) -> None:
        """Give every new report its fate, in stream order."""
        with self._log.read() as connection:
            after = jobs.cursor(connection, scenario, self._recipe.name)
        known = batching.by_id(await asyncio.to_thread(self._releases.list, scenario))
        while True:
            page = await asyncio.to_thread(batching.admit_new, self._recipe, self._log, scenario, after, known)
            if not page:
                return
            await self._enqueue(scenario, page)
            self._last_sample[scenario] = self._clock.monotonic()
            after = page[-1].sequence

    async def _enqueue(self, scenario: str, page: list[jobs.Entry]) -> None:
        await self._log.write(lambda c: jobs.enqueue(c, scenario, self._recipe.name, self._clock.now(), page))

    async def _next_job(self, scenario: str) -> Job | None:
        """Open a job when a batch (or an idle gate) is due."""
        head = self._head(scenario)
        size = self._recipe.settings.batch_size
        with self._log.read() as connection:
            waiting = jobs.queued(connection, scenario, self._recipe.name, max(size * 4, QUEUE_WINDOW))
        waiting = await self._dropped(scenario, head, waiting)
        requested = scenario in self._requested
        manual = self._log.scenarios.get(scenario).training_mode == "manual"
        chosen = batching.choose(waiting, size, short=requested)
        if chosen and (requested or not manual):
            self._requested.discard(scenario)
            return await self._open(scenario, head, [item.report_id for item in chosen], {})
        return await self._idle_gate(scenario, head)

    async def _dropped(self, scenario: str, head: Release, waiting: list[Queued]) -> list[Queued]:
        """Drop what is too old and groups that stay incomplete; returns what still waits."""
        settings = self._recipe.settings
        rows = batching.stale(waiting, head.step, settings.max_staleness)
        weights = self._recipe.surface is Surface.WEIGHTS
        if rows or (waiting and weights):
            chain = await asyncio.to_thread(self._releases.list, scenario)
            rows = batching.stale(waiting, head.step, settings.max_staleness, chain)
            rows += coupling.moved(waiting, chain, head.step) if weights else []
        rows += batching.timed_out(waiting, self._clock.now(), getattr(settings, "group_timeout_s", math.inf))
        if not rows:
            return waiting
        await self._log.write(lambda c: jobs.drop(c, self._recipe.name, self._clock.now(), rows))
        gone = {report_id for report_id, _ in rows}
        return [item for item in waiting if item.report_id not in gone]

    async def _idle_gate(self, scenario: str, head: Release) -> Job | None:
        """Rolling cadence: judge the steps since the last gate once the stream has gone quiet, once per head."""
        if self._cadence is not Cadence.ROLLING or head.operation is not Operation.TRAINING or head.gated:
            return None
        quiet = self._clock.monotonic() - self._last_sample.get(scenario, self._clock.monotonic())
        if quiet < self._settings.gate_idle_s or self._idle_gated.get(scenario) == head.release_id:
            return None
        if not steps_since_gate(await asyncio.to_thread(self._releases.list, scenario)):
            return None
        self._idle_gated[scenario] = head.release_id
        return await self._open(scenario, head, [], {"gate_only": True}, content_id=head.content_id)

    async def _open(
        self, scenario: str, head: Release, reports: list[Any], detail: Mapping[str, Any], content_id: str | None = None
    ) -> Job:
        release_id = new_release_id(head.step + 1)
        detail = {**detail, "kind": head.kind} if content_id else detail

        def write(connection: Any) -> Job:
            job = jobs.reserve(
                connection,
                scenario=scenario,
                recipe=self._recipe.name,
                base=ReleaseId(head.release_id),
                release_id=release_id,
                samples=reports,
                at=self._clock.now(),
                detail=detail,
            )
            if content_id:
                connection.execute("UPDATE jobs SET content_id = ? WHERE id = ?", (content_id, job.id))
            return jobs.get(connection, job.id)

        return await self._log.write(write)

    def _start(self, job: Job) -> None:
        task = asyncio.create_task(self._runner.drive(job), name=f"job {job.id}")
        self._running[job.scenario] = task
        self._jobs[job.scenario] = job.id

        def done(finished: asyncio.Task[Job]) -> None:
            self._running.pop(job.scenario, None)
            self._jobs.pop(job.scenario, None)
            if not finished.cancelled():
                self._ended(job, finished)
            self._wake.set()

        task.add_done_callback(done)

    def _ended(self, job: Job, task: asyncio.Task[Job]) -> None:
        """Count failures in a row; each doubles the pause before the scenario's next job."""
        error = task.exception()
        if error is not None:
            logger.error("job %s broke", job.id, exc_info=error)
        if error is None and task.result().state is JobState.SETTLED:
            self._failures.pop(job.scenario, None)
            return
        if error is None:
            logger.warning("job %s failed: %s", job.id, task.result().reason)
        count = self._failures.get(job.scenario, 0)
        self._failures[job.scenario] = count + 1
        pause = min(FIRST_PAUSE_S * 2**count, LONGEST_PAUSE_S)
        self._resting[job.scenario] = self._clock.monotonic() + pause

    def _rests(self, scenario: str) -> bool:
        return scenario not in self._requested and self._clock.monotonic() < self._resting.get(scenario, 0.0)

    def _opened(self, scenario: str) -> bool:
        """Whether the scenario is served already; a new one is opened moments after its row appears."""
        try:
            self._publishing.served(scenario)
        except EngineUnavailable:
            return False
        return True

    def _head(self, scenario: str) -> Release:
        return self._publishing.served(scenario)


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
