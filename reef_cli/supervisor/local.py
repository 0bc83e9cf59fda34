"""The local engine of a deployment: model folder, process, client, chat template and the releases it serves."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reef_cli.config.paths import Home, cache_at
from reef_cli.config.schema import EngineSettings
from reef_cli.core.errors import EngineUnavailable
from reef_cli.engines import launch as launching
from reef_cli.engines import sglang_args
from reef_cli.engines.adapter_files import check_adapter, shapes
from reef_cli.engines.client import EngineClient
from reef_cli.engines.models import ModelStore
from reef_cli.engines.process import EngineProcess, Launch
from reef_cli.engines.serving import Check, LocalServing, Push
from reef_cli.supervisor.shadow import Shadow

if TYPE_CHECKING:
    from reef_cli.engines.chat_format import ModelChat

EMBEDDED_CONTEXT = 4096
"""Longest context of the embedded engine unless the file says otherwise: its cache lives in ordinary memory."""


class LocalEngine:
    """Owns the engine process, or the connection to an SGLang that runs already."""

    def __init__(
        self, settings: EngineSettings, home: Home, *, push_wait_s: float, environ: Mapping[str, str], push: Push | None = None
    ) -> None:
        self.settings = settings
        self._home = home
        self._push_wait_s = push_wait_s
        self._environ = environ
        self._push = push
        self._installed: sglang_args.Installed | None = None
        self.process: EngineProcess | None = None
        self.model_dir: Path
        self.chat: ModelChat
        self.client: EngineClient
        self.serving: LocalServing

    async def prepare(self) -> None:
        """Find the model and read its template, look at SGLang and the flags it is to get; starts nothing.

        Raises `ModelNotFound`, `MissingDependency`, `ConfigError`."""
        settings = self.settings
        store = ModelStore(cache_at(self._environ))
        self.model_dir = await asyncio.to_thread(store.resolve, settings.model)
        # Tokenizer and templates take 7 MB; an upstream engine needs neither.
        from reef_cli.engines.chat_format import ModelChat

        self.chat = await asyncio.to_thread(ModelChat, self.model_dir)
        if settings.kind == "sglang" and settings.url:
            self.client = EngineClient(settings.url, settings.api_key, settings.api_key)
        else:
            if settings.kind == "sglang":
                self._installed = await asyncio.to_thread(self._inspect)
            self.process = EngineProcess(self._launch("engine"))
            self.client = self.process.client
        self.serving = LocalServing(
            self.client,
            push_wait_s=self._push_wait_s,
            context_length=self.context_length,
            model_dir=self.model_dir,
            push=self._push,
            check=await asyncio.to_thread(self._adapter_check),
            vocabulary=self.chat.vocabulary,
        )

    def _adapter_check(self) -> Check | None:
        """SGLang does not survive what the embedded engine refuses."""
        if self.settings.kind != "sglang" or self._push is not None:
            return None
        return partial(check_adapter, base=shapes(self.model_dir), max_rank=self.settings.max_lora_rank)

    @property
    def context_length(self) -> int:
        own = self.chat.context_length
        return self.settings.context_length or (min(own, EMBEDDED_CONTEXT) if self.settings.kind == "embedded" else own)

    @property
    def admin_key(self) -> str | None:
        """The key control routes need; goes to the trainer, never into a log or a command line."""
        return self.process.launch.admin_key if self.process else self.settings.api_key

    @property
    def read_key(self) -> str | None:
        """The key of the engine's other routes."""
        return self.process.launch.api_key if self.process else self.settings.api_key

    async def start(self) -> None:
        """Start the process and wait until it answers."""
        if self.process is not None:
            await self.process.start()
        else:
            await self.client.model_info()

    def on_restart(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call back after the engine died and was started again, before requests reach it."""
        if self.process is not None:
            self.process.on_restart = callback

    def fault(self) -> str | None:
        """Why the engine cannot serve now, or None."""
        if self.process is None or self.process.ready:
            return None
        return f"the engine is restarting: {self.process.last_death}" if self.process.last_death else "the engine is starting"

    async def stop(self) -> None:
        if self.process is not None:
            await self.process.stop()
        elif hasattr(self, "client"):
            await self.client.close()

    def shadow(self) -> Shadow:
        """A second engine for candidates; starts nothing yet."""
        process = EngineProcess(self._launch("shadow"))
        return Shadow(process, self.serving, context_length=self.context_length, model_dir=self.model_dir)

    def _launch(self, name: str) -> Launch:
        log = self._home.logs / f"{name}.log"
        port = free_port()
        if self.settings.kind == "sglang":
            config = self._home.run / f"{name}.yaml"
            return launching.sglang(
                self.settings, self.model_dir, port, log, config, installed=self._installed, adapters=self._push is None
            )
        return launching.embedded(self.settings, self.model_dir, port, log)

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
