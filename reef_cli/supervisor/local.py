"""The local engine of a deployment: model folder, process, client, chat template and the releases it serves."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from reef_cli.config.paths import Home, cache_at
from reef_cli.config.schema import EngineSettings, TrainerSettings
from reef_cli.core.errors import EngineUnavailable, MissingDependency
from reef_cli.engines import launch as launching
from reef_cli.engines import router, sglang_args
from reef_cli.engines.adapter_files import check_adapter, shapes
from reef_cli.engines.attached import AttachedEngine
from reef_cli.engines.client import EngineClient
from reef_cli.engines.fleet import Fleet
from reef_cli.engines.models import ModelStore
from reef_cli.engines.process import EngineProcess, Launch, new_keys
from reef_cli.engines.resident import Check
from reef_cli.engines.router import RouterProcess
from reef_cli.engines.serving import LocalServing, Push
from reef_cli.supervisor.shadow import Shadow

if TYPE_CHECKING:
    from reef_cli.engines.chat_format import ModelChat

log = logging.getLogger(__name__)
SHADOW = "shadow"
_HERE = ("127.0.0.1", "localhost", "::1")
EMBEDDED_CONTEXT = 4096
"""Longest context of the embedded engine unless the file says otherwise: its cache lives in ordinary memory."""


class LocalEngine:
    """Owns the engine processes, or the connections to SGLangs that run already; several look like one."""

    def __init__(
        self,
        settings: EngineSettings,
        home: Home,
        *,
        push_wait_s: float,
        environ: Mapping[str, str],
        push: Push | None = None,
        trainer: TrainerSettings | None = None,
    ) -> None:
        self.settings = settings
        self._tries_adapters = trainer is None or trainer.method == "lora"
        self._whole = launching.Whole(trainer.transport == "ipc", trainer.delta) if push and trainer else None
        self._reads_files = trainer is not None and trainer.transport == "disk"
        self._home = home
        self._push_wait_s = push_wait_s
        self._environ = environ
        self._push = push
        self._installed: sglang_args.Installed | None = None
        self._keys = new_keys()
        self._router: RouterProcess | None = None
        self.members: list[EngineProcess] | list[AttachedEngine]
        self.model_dir: Path
        self.chat: ModelChat
        self.client: EngineClient
        self.serving: LocalServing

    async def prepare(self) -> None:
        """Find the model and read its template, look at SGLang and the flags it is to get; starts nothing.

        Raises `ModelNotFound`, `MissingDependency`, `ConfigError`."""
        settings = self.settings
        store = ModelStore(cache_at(self._environ))
        self.model_dir = await asyncio.to_thread(store.resolve, settings.name)
        # Tokenizer and templates take 7 MB; an upstream engine needs neither.
        from reef_cli.engines.chat_format import ModelChat

        self.chat = await asyncio.to_thread(ModelChat, self.model_dir)
        self.members = await self._members()
        clients = [member.client for member in self.members]
        ready = {id(member.client): member for member in self.members}
        self.client = clients[0] if len(clients) == 1 else Fleet(clients, lambda client: ready[id(client)].ready)
        self._router = await self._find_router(clients)
        self.serving = LocalServing(
            self.client,
            push_wait_s=self._push_wait_s,
            context_length=self.context_length,
            model_dir=self.model_dir,
            push=self._push,
            check=await asyncio.to_thread(self._adapter_check),
            revive=self._revive if self.started_here else None,
            vocabulary=self.chat.vocabulary,
        )

    async def _members(self) -> "list[EngineProcess] | list[AttachedEngine]":
        """The engines, not yet started: those that run already, else our own."""
        settings = self.settings
        if settings.kind == "sglang" and (urls := [*settings.urls] or [*filter(None, [settings.url])]):
            sends = self._sends_adapters(urls)
            clients = [EngineClient(url, settings.api_key, settings.admin_key, sends_adapters=sends) for url in urls]
            return [AttachedEngine(client, self.model_dir) for client in clients]
        if settings.kind == "sglang":
            self._installed = await asyncio.to_thread(self._inspect)
        names = ["engine", *(f"engine-{number}" for number in range(2, settings.replicas + 1))]
        adapters = self._push is None
        return [EngineProcess(self._launch(name, number, adapters=adapters)) for number, name in enumerate(names)]

    def _sends_adapters(self, urls: Sequence[str]) -> bool:
        """Whether adapters travel to engines that somebody else started, or are read there from our files."""
        if self.settings.adapters != "auto":
            return self.settings.adapters == "tensors"
        return not self._reads_files and any(urlsplit(url).hostname not in _HERE for url in urls)

    async def _find_router(self, clients: list[EngineClient]) -> RouterProcess | None:
        """SGLang's router for several SGLangs, where it is installed. Raises `MissingDependency` when it must be and is not."""
        settings, python = self.settings, sglang_args.interpreter(self.settings.python)
        if settings.router == "reef" or len(clients) == 1 or settings.kind != "sglang":
            return None
        if not await asyncio.to_thread(router.installed, python):
            if settings.router == "sglang":
                raise MissingDependency(f"{python} has no sglang-router", hint="install it there, or set engine.router: reef")
            return None
        log, ports = self._home.logs / "router.log", (free_port(), free_port())
        made = router.launch(python, self.urls, ports, log, self.read_key)
        return RouterProcess(made, clients)

    @property
    def started_here(self) -> bool:
        """Whether the engines are processes of this server."""
        return isinstance(self.members[0], EngineProcess)

    @property
    def urls(self) -> list[str]:
        return [member.client.base_url for member in self.members]

    @property
    def restarts(self) -> int:
        return sum(member.restarts for member in self.members)

    def _adapter_check(self) -> Check | None:
        """SGLang does not survive what the embedded engine refuses."""
        if self.settings.kind != "sglang":
            return None
        return partial(check_adapter, base=shapes(self.model_dir), max_rank=self.settings.max_lora_rank)

    @property
    def context_length(self) -> int:
        own = self.chat.context_length
        return self.settings.context_length or (min(own, EMBEDDED_CONTEXT) if self.settings.kind == "embedded" else own)

    @property
    def admin_key(self) -> str | None:
        """The key control routes need; goes to the trainer, never into a log or a command line."""
        first = self.members[0]
        return first.launch.admin_key if isinstance(first, EngineProcess) else self.settings.admin_key or self.settings.api_key

    @property
    def read_key(self) -> str | None:
        """The key of the engines' other routes."""
        first = self.members[0]
        return first.launch.api_key if isinstance(first, EngineProcess) else self.settings.api_key

    async def start(self) -> None:
        """Start the processes and wait until all answer."""
        starting = await asyncio.gather(*(member.start() for member in self.members), return_exceptions=True)
        for failure in starting:
            if failure is not None:
                raise failure
        if not self.started_here:
            await self.serving.take_over()
        if self._router is not None and isinstance(self.client, Fleet):
            await self._start_router(self._router, self.client)

    async def _start_router(self, process: RouterProcess, fleet: Fleet) -> None:
        """Requests go through it from now on; where it does not start, round by ourselves."""
        try:
            await process.start()
            fleet.router = process
        except EngineUnavailable as error:
            if self.settings.router == "sglang":
                raise
            log.warning("SGLang's router does not start, requests go round without it: %s %s", error.message, error.why)

    def on_restart(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call back after an engine died and was started again, before requests reach it."""
        for member in self.members:
            member.on_restart = callback if len(self.members) == 1 else self._refill

    async def _refill(self) -> None:
        """After one of several came back: once all answer, since weights reach all of them or none."""
        deadline = asyncio.get_running_loop().time() + self.settings.start_timeout_s
        while True:
            try:
                await self.client.model_info()
                break
            except EngineUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(0.5)
        await self.serving.restore(meanwhile=True)

    def fault(self) -> str | None:
        """Why no engine can serve now, or None."""
        return None if any(member.ready for member in self.members) else self.members[0].fault

    def away(self) -> str | None:
        """Why new weights cannot reach every engine now, or None."""
        return next((member.fault for member in self.members if not member.ready), None)

    async def _revive(self) -> None:
        """End every engine; each starts again with its own weights and is filled."""
        for member in self.members:
            if isinstance(member, EngineProcess):
                await member.revive()

    async def stop(self) -> None:
        if self._router is not None:
            await self._router.stop()
        if hasattr(self, "members"):
            await asyncio.gather(*(member.stop() for member in self.members))

    def shadow(self) -> Shadow:
        """A second engine for candidates; starts nothing yet. Beside engines that run elsewhere it is an embedded one, unless
        `engine.python` names an SGLang here."""
        embedded = not self.started_here and self.settings.python is None
        settings = replace(self.settings, kind="embedded", url=None, urls=()) if embedded else self.settings
        process = EngineProcess(self._launch(SHADOW, 0, adapters=self._tries_adapters, settings=settings))
        check = self._adapter_check()
        return Shadow(process, self.serving, context_length=self.context_length, model_dir=self.model_dir, check=check)

    def _launch(self, name: str, number: int, *, adapters: bool, settings: EngineSettings | None = None) -> Launch:
        """The engine `name`, the `number`th of its kind; all have the keys of the first."""
        log, port, settings = self._home.logs / f"{name}.log", free_port(), settings or self.settings
        if settings.kind == "sglang":
            config = self._home.run / f"{name}.yaml"
            return launching.sglang(
                launching.placed(settings, number),
                self.model_dir,
                port,
                log,
                config,
                installed=self._installed,
                adapters=adapters,
                whole=None if adapters or name == SHADOW else self._whole,
                keys=self._keys,
            )
        return launching.embedded(settings, self.model_dir, port, log, keys=self._keys)

    def _inspect(self) -> sglang_args.Installed:
        """The installed SGLang, with every native flag checked against it."""
        settings = self.settings
        installed = sglang_args.inspect(
            sglang_args.interpreter(settings.python),
            cache_at(self._environ),
            launching.sglang_env(settings),
            options=bool(settings.sglang),
        )
        sglang_args.check(settings.sglang, installed)
        return installed


def free_port() -> int:
    """A loopback port that is free now. Raises `EngineUnavailable` when there is none."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise EngineUnavailable("No loopback port is free; the engine is unavailable.", why=str(error)) from error
