"""The learning worker: admits reports, opens jobs, and shares the trainer between scenarios, beside serving.

One pass over a scenario admits its new reports, drops what is too old, and opens a job when a batch is ready. Scenarios take
turns: the one served longest ago goes first, so a busy scenario cannot starve a quiet one; so do the lanes of a scenario whose
recipe is a composite. A scenario has one job at a time, so that no other job of it moves a head under a candidate that is being
judged. While the engine is away no job starts: none could end well. Nothing here blocks the event loop, and nothing a client
does waits for it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reef_cli.core.clock import Clock
from reef_cli.core.errors import EngineUnavailable, JobCancelled, JobOut, ReefError
from reef_cli.core.ports import Publishing
from reef_cli.core.types import JobState, Report
from reef_cli.experience.log import ExperienceLog
from reef_cli.learning import jobs
from reef_cli.learning.jobs import Job
from reef_cli.learning.lanes import Lane

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""After a failed job a lane waits, twice as long each time, so that a fault that stays does not burn the machine."""

IDLE_TICK_S = 1.0
"""How often the worker looks around when nothing wakes it."""

Place = tuple[str, str]
"""A scenario and the name of a lane."""


class LearningWorker:
    """Implements the port `LearningPort`; `run` is a task of the supervisor. `slots` jobs run at a time. `away` says why the
    engine cannot take new weights now, or None."""

    def __init__(
        self,
        *,
        log: ExperienceLog,
        publishing: Publishing,
        lanes: Sequence[Lane],
        clock: Clock,
        slots: int = 1,
        away: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._away = away
        self._log = log
        self._publishing = publishing
        self._lanes = {lane.name: lane for lane in lanes}
        self._slots = slots
        self._clock = clock
        self._wake = asyncio.Event()
        self._stopping = False
        self._running: dict[str, asyncio.Task[Job]] = {}
        self._jobs: dict[str, str] = {}
        self._last_turn: dict[str, float] = {}
        self._last_lane: dict[Place, float] = {}
        self._requested: set[str] = set()
        self._failures: dict[Place, int] = {}
        self._resting: dict[Place, float] = {}

    # -- the port ------------------------------------------------------------------------------------------------------

    def wake(self, scenario: str) -> None:
        self._wake.set()
        for lane in self._lanes.values():
            lane.woken(scenario)

    def state(self, scenario: str) -> Mapping[str, Any]:
        """What the status page says of a scenario's learning: of the lane that is at work, and of each by its surface."""
        states = {str(lane.recipe.surface): lane.state(scenario) for lane in self._lanes.values()}
        found = next((state for state in states.values() if state["job"]), None)
        found = found or max(states.values(), key=lambda state: bool(state["done"]))
        if not found["job"] and found["done"] and (fault := self._away()):
            found = {**found, "state": "waiting", "phase": fault}
        return found if len(states) == 1 else {**found, "surfaces": states}

    def eligibility(self, scenario: str, report_id: str) -> Mapping[str, str]:
        """Why each receipt of a stored report trains or does not; `eligible` when one of the lanes takes it."""
        report = self._log.get(scenario, report_id)
        if not isinstance(report, Report):
            return {}
        told = [lane.eligibility(report) for lane in self._lanes.values()]
        return {name: _best([reasons[name] for reasons in told]) for name in report.references}

    # -- what a person may ask -----------------------------------------------------------------------------------------

    def request_step(self, scenario: str) -> None:
        """Manual and hybrid modes: take a step with what is queued, batch full or not."""
        self._requested.add(scenario)
        self._wake.set()

    async def request_gate(self, scenario: str) -> Job:
        """Open a job that judges the head of the first lane in full. Raises `JobOut` while another job runs."""
        if scenario in self._running:
            raise JobOut(f"A job of {scenario} is under way.", hint="Wait for it: `reef jobs list`.")
        if fault := self._away():
            raise EngineUnavailable("No job starts while the engine is away; try again.", why=fault)
        job = await next(iter(self._lanes.values())).gate(scenario)
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
        await self._lane_of(job).runner.fail(job_id, JobCancelled("a person cancelled it"))
        return True

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Finish or abandon the jobs a crash left open, before anything new starts."""
        with self._log.read() as connection:
            left = jobs.open_jobs(connection)
        for job in left:
            ended = await self._lane_of(job).runner.recover(job)
            logger.info("job %s found %s after a restart: %s", job.id, job.state, ended.state)

    async def run(self) -> None:
        """Until stopped: take turns. A failing pass is logged and tried again; it never ends the loop."""
        watched = [lane.observing for lane in self._lanes.values() if lane.observing is not None]
        watching = [asyncio.create_task(one.run(), name="observing") for one in watched]
        try:
            await self._take_turns()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

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
            # Weights last: what comes meanwhile must not give the harness a batch first, whose release drops theirs.
            for lane in reversed(self._lanes.values()):
                if await lane.admit(scenario):
                    self._wake.set()
            if len(self._running) >= self._slots or scenario in self._running:
                continue
            if not self._log.scenarios.get(scenario).paused and self._opened(scenario) and not self._away():
                await self._give_turn(scenario)

    async def _give_turn(self, scenario: str) -> None:
        """Start the job that is due in the lane of the scenario that had none for longest."""
        requested = scenario in self._requested
        manual = self._log.scenarios.get(scenario).training_mode == "manual"
        for lane in sorted(self._lanes.values(), key=lambda lane: self._last_lane.get((scenario, lane.name), 0.0)):
            if self._rests((scenario, lane.name)) or self._stopping:
                continue
            job = await lane.next_job(scenario, requested=requested, manual=manual)
            if job is not None and not self._stopping:
                if not job.detail.get("gate_only"):
                    self._requested.discard(scenario)
                self._start(job)
                return

    def _start(self, job: Job) -> None:
        self._last_turn[job.scenario] = self._last_lane[job.scenario, job.recipe] = self._clock.monotonic()
        task = asyncio.create_task(self._lane_of(job).runner.drive(job), name=f"job {job.id}")
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
        """Count failures in a row; each doubles the pause before the lane's next job."""
        place, error = (job.scenario, job.recipe), task.exception()
        if error is not None:
            logger.error("job %s broke", job.id, exc_info=error)
        if error is None and task.result().state is JobState.SETTLED:
            self._failures.pop(place, None)
            return
        if error is None:
            logger.warning("job %s failed: %s", job.id, task.result().reason)
        count = self._failures.get(place, 0)
        self._failures[place] = count + 1
        self._resting[place] = self._clock.monotonic() + min(FIRST_PAUSE_S * 2**count, LONGEST_PAUSE_S)

    def _rests(self, place: Place) -> bool:
        return place[0] not in self._requested and self._clock.monotonic() < self._resting.get(place, 0.0)

    def _opened(self, scenario: str) -> bool:
        """Whether the scenario is served already; a new one is opened moments after its row appears."""
        try:
            self._publishing.served(scenario)
        except EngineUnavailable:
            return False
        return True

    def _lane_of(self, job: Job) -> Lane:
        """The lane that opened a job; the first for a job of a recipe this deployment had before."""
        return self._lanes.get(job.recipe) or next(iter(self._lanes.values()))


def _best(reasons: Sequence[str]) -> str:
    return "eligible" if "eligible" in reasons else reasons[0]
