"""Puts harness evolution together: proposer, episodes, suite and gate around a recipe of the surface harness.

A candidate is judged by the same gate as weights are; only what answers differs: an answer is the end of an episode that an
agent with the candidate's tree ran.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from reef_cli.config.paths import Home
from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.errors import ConfigError
from reef_cli.core.ports import Answering, Sampling
from reef_cli.core.types import Cadence, Outcome, Release, Verdict
from reef_cli.evaluation.gate import Gate
from reef_cli.evaluation.graders import build
from reef_cli.evaluation.suite import Item, Suite
from reef_cli.experience.log import ExperienceLog
from reef_cli.gateway.auth import Scope
from reef_cli.harness import discovery, sandbox
from reef_cli.harness.episodes import Caps
from reef_cli.harness.evolution import Evolution, Sources
from reef_cli.harness.pool import Executor, LocalPool
from reef_cli.harness.promotion import Promoted, Promotions
from reef_cli.harness.proposing import Ask, OnlyReasoning, Past, load
from reef_cli.harness.ray_pool import RayPool
from reef_cli.harness.trials import Gateway, Setting, Trials
from reef_cli.learning import jobs
from reef_cli.learning.contract import Recipe
from reef_cli.learning.evolving import Evolution as Wanted
from reef_cli.learning.evolving import Evolving
from reef_cli.supervisor.answering import UpstreamAnswering
from reef_cli.supervisor.episodes import EpisodeAnswering, gather
from reef_cli.supervisor.pointers import beside, upstream_key
from reef_cli.supervisor.wishes import Wishes

if TYPE_CHECKING:
    import aiohttp

    from reef_cli.supervisor.stack import Stack

TOKEN_GRACE_S = 60.0
"""An episode's token is good for this much longer than the episode may last."""

HISTORY = 20
"""Earlier proposals a proposer is shown."""


class EvolutionGate:
    """The port `Evaluating`: the usual gate over episodes, and the mutation on trial kept or undone as it says."""

    def __init__(self, evolution: Evolution, make: Callable[[str], Gate], ended: Callable[[], Awaitable[None]]) -> None:
        self._evolution = evolution
        self._make = make
        self._ended = ended

    async def smoke(self, scenario: str, candidate: Release, current: Release) -> Verdict:
        gate = await asyncio.to_thread(self._make, scenario)
        return await self._concluded(scenario, gate.smoke(scenario, candidate, current))

    async def gate(
        self, scenario: str, candidate: Release, current: Release, on_progress: Callable[[int, int], None] | None = None
    ) -> Verdict:
        gate = await asyncio.to_thread(self._make, scenario)
        return await self._concluded(scenario, gate.gate(scenario, candidate, current, on_progress))

    async def _concluded(self, scenario: str, judging: Coroutine[Any, Any, Verdict]) -> Verdict:
        kept = False
        try:
            verdict = await judging
            kept = verdict.outcome is Outcome.SELECT
            return verdict
        finally:
            await self._evolution.conclude(scenario, kept=kept)
            await self._ended()


def with_promoted(base: Suite | None, promoted: Sequence[Promoted], grader: Mapping[str, Any]) -> Suite | None:
    """A suite and the prompts that were promoted to tasks."""
    if not promoted:
        return base
    items = tuple(
        Item(item.id, ({"role": "user", "content": item.prompt},), build(dict(grader)), tags=("promoted",)) for item in promoted
    )
    mark = "".join([base.digest if base else "", *(item.id for item in promoted)])
    digest = f"sha256:{hashlib.sha256(mark.encode()).hexdigest()}"
    name = f"{base.name} and {len(items)} promoted prompts" if base else f"{len(items)} promoted prompts"
    return Suite(name, digest, (*(base.items if base else ()), *items))


@dataclass(frozen=True, slots=True)
class Evolved:
    """The parts of a deployment that evolves harnesses."""

    training: Evolution
    evaluating: EvolutionGate
    answering: EpisodeAnswering
    suite: Suite | None
    wishes: Wishes
    pool: Executor


def evolve(stack: "Stack", recipe: Recipe, suite: Suite | None, own: Answering) -> Evolved:
    """Evolution for a recipe of this deployment. Raises `ConfigError` or `MissingDependency` when it cannot run. Blocks."""
    assert isinstance(recipe, Evolving)
    wanted, settings, home, service = recipe.evolution(), stack.settings, stack.home, stack.harness
    if not wanted.unsafe:
        sandbox.require()
    folder = Path(beside(wanted.tasks, stack.loaded.file)) if wanted.tasks else None
    tasks = gather(suite, folder, wanted.attempts)
    pool: Executor = LocalPool(wanted.at_once) if wanted.ray is None else RayPool(wanted.at_once, wanted.ray or None)
    trials = Trials(_setting(wanted, home, settings.evaluation), _gateway(stack, wanted.seconds), pool)
    promotions = Promotions(home.root / "evolution", wanted.promote)
    prompts = tasks.prompts()
    sources = Sources(
        service,
        lambda scenario: _history(stack.log, scenario),
        _asking(_proposer_engine(wanted.engine, stack.session) or own),
        lambda scenario, evidence: promotions.add(scenario, evidence, prompts),
    )
    spec = recipe.program()
    training = Evolution(load(spec.path, spec.settings), sources, trials, stack.clock)
    answering = EpisodeAnswering(trials, service, tasks)
    cadence = Cadence(settings.reef.cadence or recipe.cadence)

    def gate(scenario: str) -> Gate:
        judged = with_promoted(tasks.suite, promotions.tasks(scenario), wanted.promote_grader)
        return Gate(answering, judged, settings.evaluation, cadence=cadence, clock=stack.clock, bench=stack.bench)

    wishes = Wishes(stack.log, service, recipe.name, stack.clock, stack.request_step)
    return Evolved(training, EvolutionGate(training, gate, trials.prune), answering, tasks.suite, wishes, pool)


def _setting(wanted: Wanted, home: Home, evaluation: EvaluationSettings) -> Setting:
    adapter = discovery.adapter(wanted.adapter)
    version = adapter.version(wanted.version)
    price = (evaluation.price_prompt, evaluation.price_output)
    caps = Caps(wanted.seconds, wanted.requests, wanted.tokens, wanted.cost, price)
    return Setting(adapter, home.root / "agents", home.episodes, version, caps, wanted.unsafe)


def _gateway(stack: "Stack", seconds: float) -> Gateway:
    def url() -> str:
        assert stack.server is not None
        return stack.server.url

    def issue(scenario: str, episode: str) -> str:
        return stack.tokens.issue({Scope.INFER}, scenario=scenario, episode=episode, ttl_s=seconds + TOKEN_GRACE_S)

    return Gateway(url, stack.settings.engine.name, issue, stack.tokens.revoke)


def _asking(answering: Answering) -> Ask:
    async def ask(messages: Sequence[Mapping[str, Any]], max_tokens: int, temperature: float) -> str:
        sampling = Sampling(max_new_tokens=max_tokens, temperature=temperature)
        answer = await answering.answer(messages, sampling, None)
        if answer.only_reasoning:
            raise OnlyReasoning(max_tokens)
        return answer.text

    return ask


def _proposer_engine(given: Mapping[str, Any], session: "Callable[[], aiohttp.ClientSession]") -> Answering | None:
    """An engine of the proposer's own, when one is named."""
    if not given:
        return None
    if not {"url", "model"} <= set(given):
        raise ConfigError("reef.proposer_engine needs url and model", hint="or leave it out to ask the deployment's own engine")
    key = upstream_key(SimpleNamespace(api_key=None, api_key_file=given.get("api_key_file")))
    return UpstreamAnswering(str(given["url"]), str(given["model"]), key, session)


def _history(log: ExperienceLog, scenario: str) -> list[Past]:
    """Earlier proposals of a scenario, newest first."""
    with log.read() as connection:
        rows = jobs.recent(connection, scenario, HISTORY)
    told = [(row, row.detail.get("metrics", {}).get("mutations")) for row in rows if not row.open]
    return [Past(tuple(edits), row.outcome or "failed", row.reason or "") for row, edits in told if edits]
