"""One job from its current state to its end. Each step does the side effect its state names, then writes the next state.

Because the row is always written first, a job found open after a crash can simply be driven on: training that was cut short
is abandoned (its samples return to the queue), everything after the candidate is stored is finished exactly once. The chain
itself tells whether a publication happened: a job's release id is fixed when it is reserved.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from reef_cli.core import surfaces
from reef_cli.core.clock import Clock
from reef_cli.core.errors import ConflictError, ReefError, ReleaseNotFound, TrainerError
from reef_cli.core.ids import ContentId, RecordId, ReleaseId
from reef_cli.core.ports import Evaluating, Publishing, Reference, TrainerProgress, Training
from reef_cli.core.types import (
    Artifact,
    Cadence,
    Draft,
    JobState,
    Operation,
    Outcome,
    Release,
    Report,
    Sample,
    Surface,
    Verdict,
)
from reef_cli.experience.log import ExperienceLog
from reef_cli.learning import batching, coupling, jobs
from reef_cli.learning.cadence import Policy, last_gated, steps_since_gate
from reef_cli.learning.contract import Assembling, Recipe, Tools
from reef_cli.learning.jobs import Job


class ReleaseStore(Protocol):
    """What the runner needs of the releases room."""

    def store(self, directory: Path, kind: str, *, take: bool = False) -> Artifact: ...

    def directory(self, content_id: ContentId) -> Path | None: ...

    def list(self, scenario: str) -> list[Release]: ...

    def get(self, scenario: str, release_id: ReleaseId) -> Release: ...

    def tip(self, scenario: str) -> Release | None: ...


@dataclass
class Progress:
    """What the status page shows of a running job; lives in memory only."""

    phase: str = ""
    done: int = 0
    total: int = 0


class Runner:
    """Drives jobs of one deployment; stateless between calls but for the shared progress board."""

    def __init__(
        self,
        *,
        log: ExperienceLog,
        releases: ReleaseStore,
        publishing: Publishing,
        training: Training,
        evaluating: Evaluating,
        recipe: Recipe,
        policy: Policy,
        workspace: Path,
        clock: Clock,
        tools: Tools | None = None,
    ) -> None:
        self._tools = tools or Tools()
        self._log = log
        self._releases = releases
        self._publishing = publishing
        self._training = training
        self._evaluating = evaluating
        self._recipe = recipe
        self._policy = policy
        self._workspace = workspace
        self._clock = clock
        self.progress: dict[str, Progress] = {}
        self._handlers: Mapping[JobState, Callable[[Job], Awaitable[Job]]] = {
            JobState.RESERVED: self._begin,
            JobState.TRAINING: self._train,
            JobState.CANDIDATE: self._to_evaluation,
            JobState.EVALUATING: self._evaluate,
            JobState.DECIDED: self._act,
            JobState.PUBLISHING: self._publish,
            JobState.LOADED: self._settle,
        }

    async def drive(self, job: Job) -> Job:
        """Run the job to its end. An anticipated failure ends it as `failed` with its cause; the server goes on."""
        self.progress[job.id] = Progress()
        try:
            while job.open:
                job = await self._handlers[job.state](job)
        except ReefError as error:
            job = await self.fail(job.id, error)
        finally:
            self.progress.pop(job.id, None)
            await asyncio.to_thread(shutil.rmtree, self._scratch(job), True)
        return job

    async def recover(self, job: Job) -> Job:
        """Finish or abandon a job found open after a restart; exactly one of the two happens, once."""
        if job.state in (JobState.RESERVED, JobState.TRAINING):
            return await self._log.write(lambda c: jobs.fail(c, job, self._clock.now(), "interrupted", blame_samples=False))
        return await self.drive(job)

    async def fail(self, job_id: str, error: ReefError) -> Job:
        """Write the failure down. A lost race or an outage is not the samples' fault; a broken step may be."""
        blame = isinstance(error, TrainerError)
        reason = f"{error.code}: {error.message}" + (f" ({error.why})" if error.why else "")

        def write(connection: Any) -> Job:
            job = jobs.get(connection, job_id)
            return jobs.fail(connection, job, self._clock.now(), reason, blame_samples=blame) if job.open else job

        return await self._log.write(write)

    # -- states --------------------------------------------------------------------------------------------------------

    async def _begin(self, job: Job) -> Job:
        gate_only = bool(job.detail.get("gate_only"))
        return await self._advance(job, JobState.EVALUATING if gate_only else JobState.TRAINING)

    async def _train(self, job: Job) -> Job:
        samples, harness = await asyncio.to_thread(self._samples, job)
        base = self._releases.get(job.scenario, job.base_release_id)
        base_directory = await asyncio.to_thread(self._releases.directory, base.content_id)
        checkpoint = await asyncio.to_thread(self._checkpoint_of, base)
        candidate = await self._training.train(
            job.scenario,
            base,
            base_directory,
            checkpoint,
            samples,
            self._scratch(job),
            lambda progress: self._note(job, progress),
            await asyncio.to_thread(self._reference, job.scenario),
        )
        metrics = dict(candidate.metrics)
        checkpoint = await self._keep_checkpoint(job, candidate.checkpoint)
        detail: dict[str, Any] = {"metrics": metrics, "harness": harness, "checkpoint": checkpoint and str(checkpoint)}
        if metrics.get("policy_updated") is False:
            detail["kind"] = base.kind
            return await self._advance(job, JobState.CANDIDATE, detail=detail, content_id=base.content_id)
        # The trainer never writes to a finished candidate again: a repeated step makes a folder of its own.
        artifact = await asyncio.to_thread(self._releases.store, candidate.directory, candidate.kind, take=True)
        detail["kind"] = artifact.kind
        return await self._advance(job, JobState.CANDIDATE, detail=detail, content_id=artifact.content_id)

    async def _to_evaluation(self, job: Job) -> Job:
        base = self._releases.get(job.scenario, job.base_release_id)
        if job.content_id == base.content_id:
            metrics = job.detail.get("metrics", {})
            outcome, reason = metrics.get("outcome", "unchanged"), metrics.get("reason") or "the policy was not updated"
            return await self._log.write(lambda c: jobs.settle(c, job, self._clock.now(), outcome=outcome, reason=reason))
        return await self._advance(job, JobState.EVALUATING)

    async def _evaluate(self, job: Job) -> Job:
        candidate = self._as_release(job)
        staged = not job.detail.get("gate_only")
        if staged:
            await self._publishing.stage(candidate)
        try:
            verdict, full = await self._judge(job, candidate)
            if verdict.outcome is Outcome.INCONCLUSIVE:
                await self._publishing.reachable()  # answers that an engine owes are no verdict on the samples
        except BaseException:
            if staged:
                await self._publishing.unstage(candidate)
            raise
        if staged and verdict.outcome is not Outcome.SELECT:
            await self._publishing.unstage(candidate)
        detail = {"verdict": {"outcome": verdict.outcome, "evidence": dict(verdict.evidence)}, "full_gate": full}
        return await self._advance(job, JobState.DECIDED, detail=detail, outcome=verdict.outcome, reason=verdict.reason)

    async def _judge(self, job: Job, candidate: Release) -> tuple[Verdict, bool]:
        """The verdict, and whether the full evaluation gave it."""
        lane = await asyncio.to_thread(self._lane, job.scenario)

        def on_progress(done: int, total: int) -> None:
            self._note(job, TrainerProgress("evaluating", done, total, self._clock.now()))

        if self._policy.cadence is Cadence.GATED:
            current = self._served(job.scenario)
            return await self._evaluating.gate(job.scenario, candidate, current, on_progress), True
        gated = self._comparable(last_gated(lane), job.scenario)
        await self._publishing.stage(gated)
        try:
            return await self._judge_rolling(job, candidate, gated, steps_since_gate(lane), on_progress)
        finally:
            await self._publishing.unstage(gated)

    async def _judge_rolling(
        self, job: Job, candidate: Release, gated: Release, ungated: int, on_progress: Callable[[int, int], None]
    ) -> tuple[Verdict, bool]:
        if not job.detail.get("gate_only"):
            smoke = await self._evaluating.smoke(job.scenario, candidate, gated)
            if smoke.outcome is not Outcome.SELECT or (ungated + 1) % self._policy.gate_every:
                return smoke, False
        verdict = await self._evaluating.gate(job.scenario, candidate, gated, on_progress)
        if verdict.outcome is Outcome.INCONCLUSIVE:
            # Rolling: only a shown loss goes back; an undecided step is released and judged again at the next gate.
            return Verdict(Outcome.SELECT, f"undecided against {gated.release_id}: {verdict.reason}", verdict.evidence), False
        return verdict, True

    def _comparable(self, gated: Release, scenario: str) -> Release:
        """The release a candidate is compared with; the served one where a second full checkpoint would have to be loaded."""
        return self._served(scenario) if gated.kind == "checkpoint" else gated

    def _served(self, scenario: str) -> Release:
        return self._publishing.served(scenario, self._recipe.surface)

    def _lane(self, scenario: str) -> list[Release]:
        """The releases of the recipe's surface, newest first, down to the creation release."""
        return surfaces.lane(self._releases.list(scenario), self._recipe.surface)

    async def _act(self, job: Job) -> Job:
        outcome = Outcome(job.outcome or Outcome.INCONCLUSIVE)
        if outcome is Outcome.SELECT and not self._policy.review:
            if job.detail.get("gate_only") and not job.detail.get("full_gate"):
                return await self._settle(job)
            return await self._advance(job, JobState.PUBLISHING)
        if outcome in (Outcome.SELECT, Outcome.HOLD):
            if not self._exists(job):
                await self._publishing.hold(job.scenario, self._draft(job), job.base_release_id)
            return await self._settle(job)
        if outcome is Outcome.REJECT and job.detail.get("full_gate") and self._policy.cadence is Cadence.ROLLING:
            await self._return_to_gated(job)
        return await self._settle(job)

    async def _return_to_gated(self, job: Job) -> None:
        """Rolling cadence: a shown loss drops the run since the last gated release, by a rollback release."""
        lane = await asyncio.to_thread(self._lane, job.scenario)
        gated, head, author = last_gated(lane), lane[0], f"gate of job {job.id}"
        if head.content_id != gated.content_id:
            surface = self._recipe.surface
            await self._publishing.rollback(job.scenario, gated.release_id, head.release_id, author, surface=surface)

    async def _publish(self, job: Job) -> Job:
        if not self._exists(job):
            await self._publishing.publish(job.scenario, self._draft(job), job.base_release_id)
        if not job.detail.get("gate_only"):
            await self._publishing.unstage(self._as_release(job))
        return await self._advance(job, JobState.LOADED)

    def _exists(self, job: Job) -> bool:
        """Whether this job's release is in the chain (or held) already: it was, if a crash cut the job short after it."""
        try:
            self._releases.get(job.scenario, self._release_id(job))
        except ReleaseNotFound:
            return False
        return True

    async def _settle(self, job: Job) -> Job:
        settled = await self._log.write(lambda c: jobs.settle(c, job, self._clock.now()))
        await asyncio.to_thread(self._prune, job.scenario)
        return settled

    def _prune(self, scenario: str) -> None:
        """Delete trainer states no later step can start from soon; a rollback to an older release starts from its weights."""
        lane = self._lane(scenario)
        live = {release.content_id for release in self._releases.list(scenario) if release.pending}
        live |= {last_gated(lane).content_id, lane[0].content_id}
        with self._log.read() as connection:
            kept = jobs.checkpoints(connection, scenario)
        spare = [folder for content_id, folder in kept if content_id not in live][self._policy.keep_checkpoints :]
        newest: set[str] = set()
        for content_id, folder in kept:
            if content_id in live and content_id in newest:
                spare.append(folder)
            newest.add(content_id)
        for folder in spare:
            shutil.rmtree(folder, ignore_errors=True)

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def _advance(
        self,
        job: Job,
        to: JobState,
        *,
        detail: Mapping[str, Any] | None = None,
        content_id: str | None = None,
        outcome: Outcome | None = None,
        reason: str | None = None,
    ) -> Job:
        self.progress.setdefault(job.id, Progress()).phase = to
        return await self._log.write(
            lambda c: jobs.advance(
                c, job, to, self._clock.now(), detail=detail, content_id=content_id, outcome=outcome, reason=reason
            )
        )

    def _samples(self, job: Job) -> tuple[list[Sample], str | None]:
        """The job's samples, rebuilt from their records and completed by the recipe; and the harness weights learn under.

        Their `step` is moved so that its distance to the base counts changes of weights only, as staleness does.
        """
        with self._log.read() as connection:
            ids = jobs.reserved_reports(connection, job.id)
        reports = [report for report in (self._log.get(job.scenario, id_) for id_ in ids) if isinstance(report, Report)]
        chain = self._releases.list(job.scenario)
        known = batching.by_id(chain)
        samples, lost = batching.rebuild(self._recipe, self._log, reports, known)
        if any(reason == coupling.REASON for _, reason in lost):
            raise ConflictError("The harness was replaced while these samples waited to be trained.")
        if lost or not samples:
            raise TrainerError(
                f"{len(lost)} of {len(ids)} samples can no longer be rebuilt.", why=", ".join(reason for _, reason in lost[:3])
            )
        base = known[job.base_release_id].step
        lane = surfaces.lane(chain, self._recipe.surface)
        samples = [replace(sample, step=base - batching.lag(lane, sample.step, base)) for sample in samples]
        if isinstance(self._recipe, Assembling):
            samples = list(self._recipe.assemble(samples, self._tools))
        return samples, coupling.in_force(chain) if self._recipe.surface is Surface.WEIGHTS else None

    def _note(self, job: Job, progress: TrainerProgress) -> None:
        self.progress[job.id] = Progress(progress.phase, progress.done, progress.total)

    def _scratch(self, job: Job) -> Path:
        return self._workspace / "scratch" / job.id

    def _reference(self, scenario: str) -> Reference | None:
        """Rolling cadence: the weights a step must not run far away from."""
        if self._policy.cadence is not Cadence.ROLLING:
            return None
        gated = last_gated(self._lane(scenario))
        if gated.kind not in ("base", "lora"):
            return None
        return Reference(self._releases.directory(gated.content_id))

    def _checkpoint_of(self, base: Release) -> Path | None:
        """The trainer's state that belongs to a release's content, if it is still on disk."""
        with self._log.read() as connection:
            folder = jobs.checkpoint_for(connection, base.scenario, base.content_id)
        return Path(folder) if folder and Path(folder).is_dir() else None

    async def _keep_checkpoint(self, job: Job, checkpoint: Path | None) -> Path | None:
        """Move the trainer's state out of the scratch folder to where later steps find it."""
        if checkpoint is None:
            return None
        target = self._workspace / "checkpoints" / job.scenario / job.id
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        await asyncio.to_thread(checkpoint.rename, target)
        return target

    def _release_id(self, job: Job) -> ReleaseId:
        if job.release_id is None:
            raise TrainerError(f"Job {job.id} has no release id.")
        return job.release_id

    def _draft(self, job: Job) -> Draft:
        with self._log.read() as connection:
            consumed = [RecordId(id_) for id_ in jobs.reserved_reports(connection, job.id)]
        evidence = {
            "metrics": job.detail.get("metrics", {}),
            "verdict": job.detail.get("verdict", {}),
            "reason": job.reason,
            "recipe": self._recipe.name,
            "consumed": consumed,
        }
        if harness := job.detail.get("harness"):
            evidence["harness"] = harness
        return Draft(
            content_id=ContentId(job.content_id or ""),
            kind=str(job.detail.get("kind", "lora")),
            surface=Surface(self._recipe.surface),
            operation=Operation.PROMOTE if job.detail.get("gate_only") else Operation.TRAINING,
            author=f"recipe {self._recipe.name}",
            evidence=evidence,
            job_id=job.id,
            gated=bool(job.detail.get("full_gate")),
            release_id=self._release_id(job),
        )

    def _as_release(self, job: Job) -> Release:
        """The candidate in the shape of the release it would become, so that it can be served to the evaluation."""
        base = self._releases.get(job.scenario, job.base_release_id)
        if job.detail.get("gate_only"):
            return base
        draft = self._draft(job)
        return Release(
            release_id=self._release_id(job),
            scenario=job.scenario,
            parent_release_id=base.release_id,
            content_id=draft.content_id,
            kind=draft.kind,
            surface=draft.surface,
            operation=draft.operation,
            step=base.step + 1,
            recorded_at=self._clock.now(),
            author=draft.author,
            evidence=draft.evidence,
            job_id=job.id,
            pending=True,
        )
