"""Everything that runs in one `reef serve`, started in order and stopped in reverse.

The gateway listens first, so that health checks answer at once; readiness waits for the engine, the heads of all scenarios
and the jobs a crash left open. A part that fails to start takes down what was started before it.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reef_cli import __version__
from reef_cli.config.load import Loaded
from reef_cli.core.clock import SystemClock
from reef_cli.core.errors import ConfigError, ReefError
from reef_cli.core.ids import new_id
from reef_cli.core.ports import Answering
from reef_cli.core.types import Artifact, Held, Surface
from reef_cli.evaluation.suite import Suite
from reef_cli.experience.log import ExperienceLog
from reef_cli.gateway import app as gateway_app
from reef_cli.gateway.auth import TokenBook
from reef_cli.gateway.backends import Backend
from reef_cli.gateway.backends.local import LocalBackend
from reef_cli.gateway.backends.upstream import UpstreamBackend
from reef_cli.gateway.deps import Deps, DrainFlag
from reef_cli.harness import episodes
from reef_cli.learning.contract import Recipe, members_of
from reef_cli.learning.evolving import Evolving
from reef_cli.learning.worker import LearningWorker
from reef_cli.releases.base import base_artifact, upstream_artifact
from reef_cli.releases.service import ReleaseService
from reef_cli.supervisor.answering import ModelAnswering, UpstreamAnswering, bench_of
from reef_cli.supervisor.compaction import compact
from reef_cli.supervisor.drift import open_drift
from reef_cli.supervisor.evaluations import Asked, Evaluations
from reef_cli.supervisor.evolution import Evolved, evolve
from reef_cli.supervisor.harness import open_harness, open_service
from reef_cli.supervisor.learning import contract_of, open_worker, push_weights, pushes_whole_weights
from reef_cli.supervisor.meters import LearningMeters
from reef_cli.supervisor.pointers import beside, dotted, upstream_key
from reef_cli.supervisor.publisher import Publisher
from reef_cli.supervisor.retention import retain
from reef_cli.supervisor.routing import open_routing
from reef_cli.supervisor.status import Status
from reef_cli.supervisor.tracking import Tracking
from reef_cli.telemetry.metrics import Metrics
from reef_cli.telemetry.traces import open_tracer
from reef_cli.trainer.handle import TrainerHandle

if TYPE_CHECKING:
    import aiohttp

    from reef_cli.supervisor.local import LocalEngine
    from reef_cli.supervisor.shadow import Shadow

logger = logging.getLogger(__name__)

FOLLOW_EVERY_S = 2.0
"""How often the chains are looked at for heads that other processes moved."""


class Stack:
    """One running deployment. `start` returns when requests can be served."""

    def __init__(self, loaded: Loaded, tokens: TokenBook, metrics: Metrics) -> None:
        self.loaded = loaded
        self.settings = loaded.settings
        self.home = loaded.home
        self.instance = new_id()
        self.clock = SystemClock()
        self.tokens = tokens
        self.metrics = metrics
        self.draining = DrainFlag()
        self.server: gateway_app.Server | None = None
        self.engine: LocalEngine | None = None
        self.shadow: Shadow | None = None
        self.trainer: TrainerHandle | None = None
        self.worker: LearningWorker | None = None
        self.evolved: Evolved | None = None
        self.fault: str | None = "the service is starting"
        self.listening = asyncio.Event()
        self._mirrored: dict[str, str] = {}
        self.drain_timeout_s = 30.0
        self._drain: asyncio.Task[bool] | None = None
        self._exits = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Bring everything up. On failure what was started is stopped again and the cause is raised."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        settings = self.settings
        self.recipe: Recipe | None = self.loaded.make_recipe()
        self.members = members_of(self.recipe)
        self.log = await asyncio.to_thread(self._open_log)
        self._exits.callback(self.log.close)
        self.releases = ReleaseService(self.home.root, clock=self.clock, lfs=settings.storage.lfs)
        if swept := await asyncio.to_thread(episodes.sweep, self.home.episodes):
            logger.info("removed %d episodes that a crash left behind", swept)
        if settings.engine.kind != "upstream":
            await self._prepare_engine()
        base = await asyncio.to_thread(self._base)
        serving = self.engine.serving if self.engine else None
        self.publisher = Publisher(
            log=self.log,
            releases=self.releases,
            base=base,
            clock=self.clock,
            serving=serving,
            apart=self.shadow,
        )
        self.routing = open_routing(self)
        own = Asked(self.answering(), self._suite())
        self.bench = bench_of(settings.evaluation, own.answering, self.session)
        self.harness = await asyncio.to_thread(open_service, settings, self.home, self.releases)
        agents = await self._evolve(own)
        drift = open_drift(self, own.answering, own.suite)
        # Without a recipe that trains weights it is the agents who are evaluated.
        self.evaluations = Evaluations(
            own if agents is None or len(self.members) > 1 else agents,
            self.publisher,
            settings.evaluation,
            self.bench,
            self.releases,
            self.home.evaluations,
            agents,
        )
        if self.members:
            self._build_worker(own.suite)
        self.status = Status(self)
        self.metrics.collect(LearningMeters(self.log, self.metrics).collect)
        await self._listen()
        if self.engine is not None:
            await self.engine.start()
            self.engine.on_restart(self.engine.serving.restore)
        await self._open_scenarios()
        if self.worker is not None:
            await self.worker.recover()
            self._spawn(self.worker.run(), "learning")
            self._spawn(self.tracking.run(), "tracking")
        if self.evolved is not None:
            self._spawn(self.evolved.wishes.run(), "wishes")
        self._spawn(self._follow(), "follow")
        self._spawn(compact(self.releases), "compact")
        for name, watch in (*self.routing.watches(), *drift):
            self._spawn(watch, name)
        if self.settings.storage.keep_bytes is not None or self.settings.storage.keep_days is not None:
            self._spawn(retain(self.log, self.settings.storage), "retain")
        self.fault = None

    async def stop(self) -> None:
        """Stop in reverse order: no new requests, running ones end, jobs stop where they are, processes end, the log closes."""
        self.fault = "the service is stopping"
        if self.server is not None:
            self._drain = asyncio.create_task(self.server.drain(self.drain_timeout_s))
            await asyncio.wait({self._drain})
        if self.worker is not None:
            await self.worker.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.server is not None:
            await self.server.close()
        if self.trainer is not None:
            await self.trainer.stop()
        await self._exits.aclose()

    def force(self) -> None:
        """A second signal: running requests are cut off."""
        self.drain_timeout_s = 0.0
        if self._drain is not None:
            self._drain.cancel()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _open_log(self) -> ExperienceLog:
        redact = None
        if self.settings.reef.redact:
            redact = dotted(self.settings.reef.redact)
        return ExperienceLog.open(
            self.home.experience, durability=self.settings.reef.durability, redact=redact, clock=self.clock
        )

    def _base(self) -> Artifact:
        """What the creation release of every scenario stands for: the model folder, or the name of an upstream model."""
        if self.engine is not None:
            return base_artifact(self.engine.model_dir)
        return upstream_artifact(self.settings.engine.url or "", self.settings.engine.model or "")

    async def _evolve(self, own: Asked) -> Asked | None:
        """What a recipe that evolves harnesses is judged by, when there is one."""
        recipe = next((member for member in self.members if isinstance(member, Evolving)), None)
        if recipe is None:
            return None
        self.evolved = await asyncio.to_thread(evolve, self, recipe, own.suite, own.answering)
        self._exits.push_async_callback(self.evolved.pool.close)
        self._exits.push_async_callback(self.evolved.training.stop)
        return Asked(self.evolved.answering, self.evolved.suite)

    def answering(self) -> Answering:
        """Answers of the deployment's own engine, or of its provider."""
        engine = self.settings.engine
        if self.engine is not None:
            return ModelAnswering(self.shadow or self.engine.serving, self.engine.chat)
        return UpstreamAnswering(engine.url or "", engine.model, upstream_key(engine), self.session)

    def session(self) -> "aiohttp.ClientSession":
        """One pooled client for the upstream, closed with the stack."""
        if not hasattr(self, "_pool"):
            import aiohttp

            self._pool = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            self._exits.push_async_callback(self._pool.close)
        return self._pool

    def _suite(self) -> Suite | None:
        source = self.settings.evaluation.suite
        return None if source is None else Suite.load(beside(source, self.loaded.file))

    async def _prepare_engine(self) -> None:
        """The local engine, not yet started; with a recipe that replaces whole weights, its way in and a second engine too."""
        from reef_cli.supervisor.local import LocalEngine  # a provider's deployments start without it

        settings = self.settings
        trains = any(member.surface is Surface.WEIGHTS for member in self.members)
        whole = trains and pushes_whole_weights(settings.trainer)
        self.engine = LocalEngine(
            settings.engine,
            self.home,
            push_wait_s=settings.reef.push_wait_s,
            environ=os.environ,
            push=self._push if whole else None,
            trainer=settings.trainer,
        )
        self._exits.push_async_callback(self.engine.stop)
        await self.engine.prepare()
        if whole:
            self.shadow = self.engine.shadow()
            self._exits.push_async_callback(self.shadow.stop)

    async def _push(self, directory: Path, label: str, held: Held | None) -> None:
        assert self.trainer is not None and self.engine is not None
        phases = await push_weights(self.trainer, self.engine.urls, directory, label, held)
        logger.info("pushed %s: %s", label, dict(phases))

    def _build_worker(self, suite: Suite | None) -> None:
        self.worker = open_worker(self, suite)
        self.tracking = Tracking(self.log, self.home.metrics, self.settings.telemetry.trackers)
        self._exits.callback(self.tracking.close)
        self.log.subscribe(self._wake_learning(self.worker))

    def _wake_learning(self, worker: LearningWorker) -> Any:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop closed while the writer made its last commit
                loop.call_soon_threadsafe(worker.wake, "")

        return wake

    def _backend(self) -> Backend:
        engine = self.settings.engine
        if self.engine is not None:
            length, shadows = self.engine.context_length, self.routing.shadow_answers
            return LocalBackend(
                self.engine.serving, self.engine.chat, model=engine.name, context_length=length, shadows=shadows
            )
        if not engine.url:
            raise ConfigError(
                "engine.url is missing", why="an upstream engine needs the provider's address", hint="set engine.url"
            )
        return UpstreamBackend(engine.url, engine.api, upstream_key(engine), model=engine.model)

    async def _listen(self) -> None:
        reef = self.settings.reef
        backend = self._backend()
        self._exits.push_async_callback(backend.close)
        wishes = self.evolved.wishes if self.evolved else None
        queue = wishes.edit if wishes else None
        harness = open_harness(self.settings, self.harness, self.releases, self.publisher, queue)
        deps = Deps(
            settings=reef,
            engine_kind=self.settings.engine.kind,
            model=self.settings.engine.name,
            log=self.log,
            releases=self.releases,
            publishing=self.publisher,
            backend=backend,
            tokens=self.tokens,
            metrics=self.metrics,
            learning=self.worker,
            chat=self.engine.chat if self.engine else None,
            status=self.status.snapshot,
            ready=self.not_ready,
            clock=self.clock,
            draining=self.draining,
            recipe_name=self.recipe.name if self.recipe else None,
            home=self.home.root,
            create_scenario=self.create_scenario,
            delete_scenario=self.delete_scenario,
            evaluate=self.evaluations.evaluate,
            cancel_job=self._cancel if self.worker else None,
            request_step=wishes.asked if wishes else self.request_step if self.worker else None,
            request_gate=self._request_gate if self.worker else None,
            contract=self._contract if self.recipe else None,
            metrics_on=self.settings.telemetry.metrics,
            tracer=open_tracer(self.settings.telemetry.tracing),
            extra_routes=harness.routes(),
            admits=harness.admits,
            routing=self.routing,
        )
        self.server = await gateway_app.serve(gateway_app.build_app(deps), reef.host, reef.port)
        self.listening.set()

    def not_ready(self) -> str | None:
        """Why requests cannot be served now, or None."""
        return self.fault or (self.engine.fault() if self.engine else None)

    # -- scenarios -----------------------------------------------------------------------------------------------------

    async def create_scenario(self, scenario: str) -> None:
        """Registry row, creation release, engine. Idempotent."""
        await self.log.scenarios.ensure(
            scenario, self.recipe.name if self.recipe else None, mode=self.settings.reef.training_mode
        )
        await self.publisher.open(scenario)

    async def delete_scenario(self, scenario: str) -> None:
        """Archive: the name becomes free, the records and the chain stay on disk under another name."""
        await self.log.scenarios.archive(scenario)
        await asyncio.to_thread(self.releases.archive, scenario)
        await self.publisher.close(scenario)

    async def _open_scenarios(self) -> None:
        names = {row.name for row in self.log.scenarios.list()}
        if self.settings.reef.default_scenario:
            names.add(self.settings.reef.default_scenario)
        for name in sorted(names):
            await self.create_scenario(name)

    def request_step(self, scenario: str) -> None:
        if self.worker is not None:
            self.worker.request_step(scenario)

    async def _cancel(self, scenario: str, job_id: str) -> None:
        if self.worker is not None:
            await self.worker.cancel(scenario, job_id)

    async def _request_gate(self, scenario: str) -> str:
        assert self.worker is not None
        return (await self.worker.request_gate(scenario)).id

    def _contract(self, _scenario: str) -> Mapping[str, Any]:
        """What the recipes say of themselves, for `GET /reef/scenarios/{s}/contract`."""
        told = [contract_of(member) for member in self.members]
        return told[0] if len(told) == 1 else {"title": getattr(self.recipe, "title", ""), "members": told}

    async def _mirror(self, scenario: str) -> None:
        """Push a chain that grew to `storage.remote`; a remote that is away is tried again with the next look."""
        remote = self.settings.storage.remote
        tip = await asyncio.to_thread(self.releases.tip, scenario) if remote is not None else None
        if remote is not None and tip is not None and self._mirrored.get(scenario) != tip.release_id:
            await asyncio.to_thread(self.releases.push, remote, [scenario])
            self._mirrored[scenario] = tip.release_id

    async def _follow(self) -> None:
        """Serve heads that an offline command or another process moved."""
        while True:
            await asyncio.sleep(FOLLOW_EVERY_S)
            for row in self.log.scenarios.list():
                try:
                    await self.publisher.follow(row.name)
                    await self._mirror(row.name)
                except ReefError as error:
                    logger.warning("scenario %s: %s", row.name, error)

    def _spawn(self, coroutine: Any, name: str) -> None:
        self._tasks.append(asyncio.create_task(coroutine, name=name))

    def facts(self) -> Mapping[str, Any]:
        """What the start banner and the status page say of the deployment."""
        return {"version": __version__, "instance": self.instance, "home": str(self.home.root)}
