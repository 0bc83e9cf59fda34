"""A small world for the learning room: the real log, the real chain and publisher, and a trainer that writes real files."""

import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reef_cli.core.clock import SystemClock
from reef_cli.core.errors import EngineUnavailable, TrainerError
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.ports import Reference, TrainerProgress
from reef_cli.core.types import (
    Cadence,
    Candidate,
    Inference,
    Outcome,
    Release,
    Report,
    Sample,
    Surface,
    TokenSpan,
    TokenTrace,
    Verdict,
)
from reef_cli.experience.log import ExperienceLog
from reef_cli.learning.cadence import Policy
from reef_cli.learning.contract import ProgramSpec, RecipeSettings, Refusal, Tools
from reef_cli.learning.lanes import Lane
from reef_cli.learning.runner import Runner
from reef_cli.learning.worker import LearningWorker
from reef_cli.releases.base import upstream_artifact
from reef_cli.releases.service import ReleaseService
from reef_cli.supervisor.publisher import Publisher

SCENARIO = "s"


def write_adapter(folder: Path, mark: int) -> None:
    """The smallest valid LoRA folder; `mark` makes its content its own."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<ff", mark, mark))


class PlainRecipe:
    """Every scored single receipt is a sample."""

    name = "plain"
    title = "plain"
    surface = Surface.WEIGHTS
    cadence = Cadence.GATED
    settings_type = RecipeSettings

    def __init__(self, settings: RecipeSettings) -> None:
        self.settings = settings

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        if report.score is None:
            return Refusal("needs_score")
        tokens = records[0].tokens
        assert tokens is not None
        versions = tuple(span.version for span in tokens.spans)
        step = min(step_of[version] for version in versions)
        return Sample(report.id, (records[0].id,), tokens, report.score, versions, step, report.created_at)

    def program(self) -> ProgramSpec:
        return ProgramSpec("nowhere:Program")


@dataclass
class Trainer:
    """Writes a candidate and a checkpoint; can be told to fail or to leave the policy alone."""

    steps: list[tuple[str | None, list[str]]] = field(default_factory=list)
    bases: list[tuple[str, Path | None]] = field(default_factory=list)
    references: list[Reference | None] = field(default_factory=list)
    fault: str | None = None
    updates: bool = True

    async def train(
        self,
        scenario: str,
        base: Release,
        base_directory: Path | None,
        checkpoint: Path | None,
        samples: Sequence[Sample],
        out: Path,
        on_progress: Callable[[TrainerProgress], None] | None = None,
        reference: Reference | None = None,
    ) -> Candidate:
        self.bases.append((base.release_id, base_directory))
        self.references.append(reference)
        self.steps.append(((checkpoint / "state").read_text() if checkpoint else None, [sample.id for sample in samples]))
        if self.fault:
            raise TrainerError(self.fault)
        if on_progress:
            on_progress(TrainerProgress("training", 1, 2, 0.0))
        mark = len(self.steps)
        write_adapter(out / "candidate", mark)
        (out / "checkpoint").mkdir()
        (out / "checkpoint" / "state").write_text(f"state {mark}")
        metrics = {"reward_mean": sum(sample.reward for sample in samples) / len(samples), "policy_updated": self.updates}
        return Candidate(out / "candidate", "lora", metrics, out / "checkpoint")

    async def push(self, *_: Any) -> Mapping[str, Any]:
        raise AssertionError("adapters are not pushed")

    async def stop(self) -> None:
        pass


@dataclass
class Judge:
    """Answers with scripted outcomes, `select` when the script is over."""

    gates: list[Outcome] = field(default_factory=list)
    smokes: list[Outcome] = field(default_factory=list)
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    async def smoke(self, scenario: str, candidate: Release, current: Release) -> Verdict:
        self.asked.append(("smoke", candidate.release_id, current.release_id))
        return Verdict(self.smokes.pop(0) if self.smokes else Outcome.SELECT, "smoke", {})

    async def gate(self, scenario: str, candidate: Release, current: Release, on_progress: Any = None) -> Verdict:
        self.asked.append(("gate", candidate.release_id, current.release_id))
        return Verdict(self.gates.pop(0) if self.gates else Outcome.SELECT, "gate", {})


@dataclass
class Adapters:
    """The serving half of an engine: which releases are loaded."""

    loaded: set[str] = field(default_factory=set)
    away: bool = False

    async def reachable(self) -> None:
        if self.away:
            raise EngineUnavailable("the engine is away")

    async def load(self, release: Release, directory: Path | None) -> None:
        assert directory is not None or release.kind == "base"
        self.loaded.add(release.release_id)

    async def unload(self, release: Release) -> None:
        self.loaded.discard(release.release_id)

    def servable(self, release: Release) -> bool:
        return release.kind == "base" or release.release_id in self.loaded


class World:
    """One home. `open` builds everything anew over what is on disk, as a restart does."""

    def __init__(
        self,
        home: Path,
        *,
        batch_size: int = 2,
        policy: Policy | None = None,
        max_staleness: int = 4,
        recipe: PlainRecipe | None = None,
        tools: Tools | None = None,
    ) -> None:
        self.home = home
        self.policy = policy or Policy(Cadence.GATED, review=False, gate_every=3)
        self.recipe = recipe or PlainRecipe(RecipeSettings(batch_size=batch_size, max_staleness=max_staleness))
        self.tools = tools
        self.trainer = Trainer()
        self.judge = Judge()
        self.serving: Adapters | None = None

    async def open(self) -> "World":
        clock = SystemClock()
        self.log = ExperienceLog.open(self.home / "experience.db")
        self.releases = ReleaseService(self.home)
        self.publisher = Publisher(
            log=self.log,
            releases=self.releases,
            base=upstream_artifact("http://u", "m"),
            clock=clock,
            serving=self.serving,  # type: ignore[arg-type]
        )
        self.runner = Runner(
            log=self.log,
            releases=self.releases,
            publishing=self.publisher,
            training=self.trainer,
            evaluating=self.judge,
            recipe=self.recipe,
            policy=self.policy,
            workspace=self.home / "work",
            clock=clock,
            tools=self.tools,
        )
        self.lane = Lane(
            log=self.log,
            releases=self.releases,
            publishing=self.publisher,
            recipe=self.recipe,
            runner=self.runner,
            cadence=self.policy.cadence,
            clock=clock,
            tools=self.tools or Tools(),
            gate_idle_s=0.0,
        )
        away = lambda: "the engine is away" if self.serving is not None and self.serving.away else None  # noqa: E731
        self.worker = LearningWorker(log=self.log, publishing=self.publisher, lanes=[self.lane], clock=clock, away=away)
        await self.log.scenarios.ensure(SCENARIO, "plain")
        await self.publisher.open(SCENARIO)
        return self

    async def close(self) -> None:
        await self.worker.stop()
        self.log.close()

    async def exchange(
        self,
        score: float | None = 1.0,
        *,
        release: Release | None = None,
        complete: bool = True,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> Report:
        """One answered and reported request, answered by `release` (default: the served one)."""
        receipt = await self.answer(release, complete=complete, tags=tags, usage=usage)
        report = Report(
            RecordId(new_id()), SCENARIO, 2.0, (receipt,), score, None if score is not None else "no", metadata or {}
        )
        await self.log.report(report)
        return report

    async def answer(
        self,
        release: Release | None = None,
        *,
        complete: bool = True,
        tags: Mapping[str, str] | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> RecordId:
        """One answered request, not reported."""
        release = release or self.publisher.served(SCENARIO)
        version = "base" if release.kind == "base" else f"{SCENARIO}@{release.release_id}"
        receipt = RecordId(new_id())
        trace = TokenTrace((1, 2), (3, 4), (-0.5, -0.25), (1, 1), (TokenSpan(version, 0, 2),))
        await self.log.append(
            Inference(
                id=receipt,
                scenario=SCENARIO,
                created_at=time.time(),
                dialect="chat",
                model="m",
                request=b'{"messages":[]}',
                messages=[],
                response={"role": "assistant", "content": "x"},
                finish="stop",
                tokens=trace,
                release_id=release.release_id,
                weight_version=version,
                complete=complete,
                tags=tags or {},
                usage=usage or {},
            )
        )
        return receipt

    async def step(self) -> None:
        """One turn of the worker, and the job it opened to its end. The pause after a failed job is skipped."""
        self.worker._resting.clear()
        await self.worker._turn()
        for task in list(self.worker._running.values()):
            await task

    def states(self) -> list[str]:
        with self.log.read() as connection:
            return [row[0] for row in connection.execute("SELECT state FROM sample_state ORDER BY sequence")]

    def reasons(self) -> list[str]:
        with self.log.read() as connection:
            return [row[0] for row in connection.execute("SELECT reason FROM sample_state ORDER BY sequence")]

    def jobs(self) -> list[tuple[str, str | None, str | None]]:
        with self.log.read() as connection:
            return [tuple(row) for row in connection.execute("SELECT state, outcome, reason FROM jobs ORDER BY seq")]
