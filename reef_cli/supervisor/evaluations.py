"""Evaluations a person asks for: any releases on any suite, answered like clients are answered.

`POST /reef/scenarios/{s}/evaluate` and `reef eval` come here. Weights are asked by themselves, a harness by episodes of an
agent that works with it; an evaluation is of one of the two. One evaluation runs at a time; serving goes on beside it. Answers
are kept under `<home>/evaluations`, one file per suite and sampling: a run that was cut goes on where it stopped, and a further
release costs only its own answers.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core import surfaces
from reef_cli.core.errors import InvalidRequest, ReleaseNotServable, SuiteNotFound
from reef_cli.core.ids import ReleaseId
from reef_cli.core.ports import Answering, Publishing
from reef_cli.core.types import Operation, Release, Surface
from reef_cli.evaluation.asking import Asker, Bench
from reef_cli.evaluation.gate import budget_of
from reef_cli.evaluation.run import Report, header_of, run_suite
from reef_cli.evaluation.suite import Suite
from reef_cli.releases.service import ReleaseService

# So many releases stand in an engine at once and are asked in turns; more are asked one after another.
TOGETHER = 3
# Points of a chain that are evaluated by default; a longer one is sampled evenly, both ends included.
POINTS = 12


@dataclass(frozen=True, slots=True)
class Asked:
    """Who answers an evaluation, and what is asked unless the request says otherwise."""

    answering: Answering
    suite: Suite | None


@dataclass(slots=True)
class UnderWay:
    """The evaluation that runs now: `done` of `total` answers, kept ones included."""

    scenario: str
    suite: str
    releases: int
    total: int
    done: int = 0

    def part(self, index: int, parts: int) -> Callable[[int, int], None]:
        """Progress of the `index`-th of `parts` equal parts, as a run reports it."""

        def told(done: int, total: int) -> None:
            self.done = round(self.total * (index + done / total) / parts)

        return told


class Evaluations:
    """Runs suites against releases of this deployment; `agents` are asked about a harness, None where none can be."""

    def __init__(
        self,
        asked: Asked,
        publishing: Publishing,
        settings: EvaluationSettings,
        bench: Bench,
        releases: ReleaseService,
        folder: Path,
        agents: Asked | None = None,
    ) -> None:
        self._asked = asked
        self._agents = agents
        self._publishing = publishing
        self._settings = settings
        self._bench = bench
        self._releases = releases
        self._folder = folder
        self._lock = asyncio.Lock()
        self._under_way: UnderWay | None = None

    def under_way(self) -> Mapping[str, Any] | None:
        """`{scenario, suite, releases, done, total}` of the evaluation that runs now, for `GET /reef/status`."""
        return asdict(self._under_way) if self._under_way else None

    async def evaluate(self, scenario: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """`{release_id | releases | since, against?, suite?, split?, limit?, points?, again?}` -> the report as JSON.

        The first release, or `against`, is what the others are compared with; `score` and `interval` are the last one's.
        """
        names, skipped = await self._named(scenario, body)
        releases = [await self._release(scenario, name) for name in names]
        asked = self._who(releases)
        suite = await self._chosen(asked, body)
        async with self._lock:
            self._under_way = UnderWay(scenario, suite.name, len(names), len(names) * len(suite.items))
            try:
                report = await self._run(asked, suite, releases, self._under_way, again=bool(body.get("again")))
            finally:
                self._under_way = None
        judged = report.summaries[-1]
        return {
            "scenario": scenario,
            "release_id": names[-1],
            "suite": report.suite,
            "digest": report.digest,
            "split": report.split,
            "alpha": report.alpha,
            "items": judged.items,
            "missing": judged.missing,
            "score": judged.mean,
            "interval": judged.interval,
            "releases": [asdict(summary) for summary in report.summaries],
            "differences": [asdict(difference) for difference in report.differences],
            "rows": [asdict(row) for row in report.rows],
            "missing_items": [dict(zip(("release", "item", "why"), row, strict=True)) for row in report.missing],
            "skipped": skipped,
            "spent": report.spent,
            "budget_spent": report.budget_spent,
        }

    def _who(self, releases: Sequence[Release]) -> Asked:
        """Who answers for these releases. The creation release stands for its model, or for an agent without a harness."""
        harness = [release.release_id for release in releases if release.surface is Surface.HARNESS]
        rest = [r for r in releases if r.surface is not Surface.HARNESS and r.operation is not Operation.CREATION]
        if not harness:
            return self._asked
        if rest:
            raise InvalidRequest(
                "an evaluation is of weights or of harnesses",
                why=f"{harness[0]} is a harness, {rest[0].release_id} is not",
                hint="ask for each by itself",
            )
        if self._agents is None:
            raise ReleaseNotServable(
                f"{harness[0]} is a harness, and no agent works here with it",
                why="a harness answers nothing itself",
                hint="serve a recipe that evolves harnesses",
            )
        return self._agents

    async def _run(self, asked: Asked, suite: Suite, releases: Sequence[Release], watched: UnderWay, *, again: bool) -> Report:
        settings, answering = self._settings, asked.answering
        budget = budget_of(settings)
        asker = Asker(answering, settings.max_new_tokens, settings.temperature, suite.digest, bench=self._bench, budget=budget)
        # The creation release may be asked by itself, and as an agent without a harness: those are different answers.
        whom = {"asked": "agents"} if asked is self._agents and asked is not self._asked else {}
        state = self._state(releases[0].scenario, {**header_of(suite, asker, releases[0].release_id), **whom})
        if again:
            state.unlink(missing_ok=True)
        facts: dict[str, Any] = {"alpha": settings.alpha, "concurrency": settings.concurrency, "state": state, "asker": asker}
        inside = asked is not self._agents
        if inside and (len(releases) > TOGETHER or any([not await self._beside(release) for release in releases])):
            # One after another fills the state; the run over all of them then asks nothing and reports.
            for index, release in enumerate(releases):
                first = [releases[0]] if index else []
                await self._publishing.stage(release)
                try:
                    part = watched.part(index, len(releases))
                    await run_suite(answering, suite, [*first, release], on_progress=part, **facts)
                finally:
                    await self._publishing.unstage(release)
            return await run_suite(answering, suite, releases, **facts)
        return await run_suite(answering, suite, releases, on_progress=watched.part(0, 1), **facts)

    async def _release(self, scenario: str, name: str) -> Release:
        return await asyncio.to_thread(self._releases.get, scenario, ReleaseId(name))

    async def _beside(self, release: Release) -> bool:
        """Whether the engine can serve the release beside its head; it does from now on."""
        try:
            await self._publishing.resolve(release.scenario, release.release_id, None)
        except ReleaseNotServable:
            if not release.restorable:
                raise
            return False
        return True

    def _state(self, scenario: str, header: Mapping[str, Any]) -> Path:
        key = hashlib.sha256(json.dumps([scenario, header], sort_keys=True).encode()).hexdigest()[:24]
        return self._folder / f"{key}.jsonl"

    async def _named(self, scenario: str, body: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The releases to evaluate, what they are compared with first, and those of the chain that cannot be."""
        if since := body.get("since"):
            chain = await asyncio.to_thread(self._releases.list, scenario)
            return chain_since(chain, str(since), int(body.get("points") or POINTS))
        wanted = [body.get("against"), body.get("release_id") or body.get("candidate"), *(body.get("releases") or ())]
        return list(dict.fromkeys(str(name) for name in wanted if name)), []

    async def _chosen(self, asked: Asked, body: Mapping[str, Any]) -> Suite:
        if (source := body.get("suite")) is not None:
            suite = await asyncio.to_thread(Suite.load, str(source))
        elif asked.suite is not None:
            suite = asked.suite
        else:
            raise SuiteNotFound("No suite is configured.", hint="Name one with --suite, or set evaluation.suite in serve.yaml.")
        return suite.select(str(body.get("split") or self._settings.split), body.get("limit") or self._settings.limit)


def chain_since(releases: Sequence[Release], since: str, points: int) -> tuple[list[str], list[str]]:
    """Ids from `since` to the head, oldest first, each content once, at most `points` of them; and those that are lost.

    Only the surface of `since` counts, and where that is the creation the surface that was released: weights before a harness.
    """
    first = next((release for release in releases if release.release_id == since), None)
    own = first is not None and first.operation is not Operation.CREATION
    chain = surfaces.lane(releases, first.surface if own and first is not None else surfaces.moved(releases)[0])[::-1]
    start = next((index for index, release in enumerate(chain) if release.release_id == since), None)
    if start is None:
        raise InvalidRequest(f"{since} is not in the chain", hint="list it: reef release list")
    seen: dict[str, Release] = {}
    for release in chain[start:]:
        seen.setdefault(release.content_id, release)
    lost = [release.release_id for release in seen.values() if not release.restorable]
    kept = [release.release_id for release in seen.values() if release.restorable]
    if not kept:
        raise InvalidRequest(f"no release since {since} can be served any more", why="their bytes were dropped")
    if len(kept) > points:
        last = len(kept) - 1
        kept = [kept[round(last * point / (max(2, points) - 1))] for point in range(max(2, points))]
    return [str(name) for name in kept], [str(name) for name in lost]
