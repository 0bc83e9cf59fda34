"""Evolution: the port `Training` for the surface harness, from a window of experience to a candidate tree.

propose -> mount in the compose engine -> load test of the real agent -> candidate. A mutation that fails on the way is undone
and never reaches the evaluation; one that was evaluated is kept or undone by its verdict. Nothing of a trial outlives the
process: after a crash the workbench is loaded afresh from the harness in force. Does not know jobs, suites, or publishing.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from reef_cli.core.clock import Clock
from reef_cli.core.errors import ProposalConflict, ReefError, ReleaseNotFound, TrainerError, UnsupportedArtifact
from reef_cli.core.ports import Reference, TrainerProgress
from reef_cli.core.types import Candidate, Release, Sample
from reef_cli.harness import merge, pages
from reef_cli.harness import tree as trees
from reef_cli.harness.proposing import Ask, Evidence, OnlyReasoning, Past, Proposed, Proposer, Window
from reef_cli.harness.service import HarnessService
from reef_cli.harness.tree import Tree
from reef_cli.harness.workbench import Mounted, Workbench


class LoadTest(Protocol):
    """What admission needs of the trials."""

    async def load_test(self, tree: Tree) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Sources:
    """Where evolution looks: harnesses in force, earlier proposals, a model to ask; and who is told of failures."""

    service: HarnessService
    history: Callable[[str], Sequence[Past]]
    ask: Ask
    failed: Callable[[str, Sequence[Evidence]], object] = lambda *_: None


@dataclass(slots=True)
class _Scenario:
    bench: Workbench = field(default_factory=Workbench)
    trial: Mounted | None = None


class Refused(Exception):
    """A proposal that goes no further; its text is the verdict's reason."""


class Evolution:
    """See the module. One job of a scenario runs at a time; different scenarios have workbenches of their own."""

    def __init__(self, proposer: Proposer, sources: Sources, trials: LoadTest, clock: Clock) -> None:
        self._proposer = proposer
        self._sources = sources
        self._trials = trials
        self._clock = clock
        self._scenarios: dict[str, _Scenario] = {}

    async def train(
        self,
        scenario: str,
        base: Release,  # noqa: ARG002 - the port's
        base_directory: Path | None,  # noqa: ARG002 - the port's
        checkpoint: Path | None,  # noqa: ARG002 - the port's
        samples: Sequence[Sample],
        out: Path,
        on_progress: Callable[[TrainerProgress], None] | None = None,
        reference: Reference | None = None,  # noqa: ARG002 - the port's
    ) -> Candidate:
        """A candidate tree below `out`. With `policy_updated` false in the metrics there is none, and `reason` says why."""

        def phase(name: str, done: int) -> None:
            if on_progress is not None:
                on_progress(TrainerProgress(name, done, 3, self._clock.now()))

        service = self._sources.service
        tree = await asyncio.to_thread(service.tree, scenario)
        scores = [sample.extras["score"] for sample in samples if sample.extras.get("score") is not None]
        facts: dict[str, Any] = {"samples": len(samples)}
        if scores:
            facts["reward_mean"] = sum(scores) / len(scores)
        try:
            phase("proposing", 0)
            proposed = await self._propose(scenario, tree, samples)
            facts |= {"reason": proposed.reason, "mutations": [mutation.wire() for mutation in proposed.mutations]}
            if not proposed.mutations:
                why = f"no proposal: {proposed.reason}" if proposed.reason else "no proposal"
                return Candidate(out, "harness", {**facts, "policy_updated": False, "reason": why})
            phase("mounting", 1)
            trial = await self._mount(scenario, tree, proposed)
            phase("load test", 2)
            await self._admit(scenario, trial)
        except Refused as refusal:
            return Candidate(out, "harness", {**facts, "policy_updated": False, "outcome": "reject", "reason": str(refusal)})
        await asyncio.to_thread(trees.write, trial.tree, out / "tree")
        facts["changed"] = pages.summary(merge.diff(tree, trial.tree))
        facts["touched"] = sorted(trial.touched)
        return Candidate(out / "tree", "harness", facts)

    async def push(self, scenario: str, directory: Path, version: str, engine_url: str) -> Mapping[str, Any]:  # noqa: ARG002
        raise TrainerError("a harness is installed by its users, not pushed into an engine")

    async def stop(self) -> None:
        """Take every workbench down."""
        for name in list(self._scenarios):
            await self._scenarios.pop(name).bench.close_all()

    async def conclude(self, scenario: str, *, kept: bool) -> None:
        """The verdict on the scenario's trial, if there is one: kept it stays mounted, else it is undone exactly."""
        held = self._scenarios.get(scenario)
        if held is None or held.trial is None:
            return
        trial, held.trial = held.trial, None
        if kept:
            trial.keep()
        else:
            await trial.undo()

    async def _propose(self, scenario: str, tree: Tree, samples: Sequence[Sample]) -> Proposed:
        asked = next((sample for sample in samples if sample.extras.get("kind") != "failure"), None)
        if asked is not None and asked.extras.get("mark") != wish_mark(self._sources.service, asked.extras):
            raise Refused("it did not come through the routes for requests and proposals")
        if asked is not None and asked.extras.get("kind") == "proposal":
            return await asyncio.to_thread(self._carried_over, scenario, asked)
        evidence = tuple(Evidence.of(sample) for sample in samples)
        await asyncio.to_thread(self._sources.failed, scenario, evidence)
        window = Window(tree, evidence, tuple(self._sources.history(scenario)))
        try:
            return await self._proposer.propose(window, self._sources.ask)
        except OnlyReasoning as spent:
            return Proposed(reason=str(spent))

    def _carried_over(self, scenario: str, sample: Sample) -> Proposed:
        """Somebody's own edit, carried over onto the harness in force. Raises `Refused`."""
        given = sample.extras
        try:
            edit = self._sources.service.propose(scenario, given["mutations"], given.get("base_release_id"), given["feedback"])
        except (UnsupportedArtifact, ProposalConflict, ReleaseNotFound) as error:
            raise Refused(_sentence(error)) from error
        return Proposed(tuple(merge.mutations(edit.changes)), given["feedback"])

    async def _mount(self, scenario: str, tree: Tree, proposed: Proposed) -> Mounted:
        """The mutation on trial, over the harness in force. Raises `Refused` with nothing changed."""
        held = self._scenarios.setdefault(scenario, _Scenario())
        await self.conclude(scenario, kept=False)  # a job that was cut short left its trial behind
        await held.bench.load(tree)
        before = held.bench.failures()
        try:
            held.trial = await held.bench.mount(proposed.mutations)
        except UnsupportedArtifact as error:
            raise Refused(_sentence(error)) from error
        broken = {name: why for name, why in held.bench.failures().items() if before.get(name) != why}
        if broken:
            await self.conclude(scenario, kept=False)
            name, why = next(iter(broken.items()))
            raise Refused(f"entry {name} would not live: {why}")
        return held.trial

    async def _admit(self, scenario: str, trial: Mounted) -> None:
        """Start the real agent with the candidate once. Raises `Refused`; whatever goes wrong, the mutation is undone."""
        try:
            fault = await self._trials.load_test(trial.tree)
        except UnsupportedArtifact as error:
            fault = _sentence(error)
        except BaseException:
            await self.conclude(scenario, kept=False)
            raise
        if fault is not None:
            await self.conclude(scenario, kept=False)
            raise Refused(f"the agent does not start with it: {fault}")


def wish_mark(service: HarnessService, wish: Mapping[str, Any]) -> str:
    """The mark of what somebody asked for or edited, over everything in it that matters."""
    names = ("kind", "text", "mutations", "base_release_id", "origin")
    return service.mark(json.dumps([wish.get(name) for name in names], sort_keys=True))


def _sentence(error: ReefError) -> str:
    return f"{error.message}: {error.why}" if error.why else error.message
