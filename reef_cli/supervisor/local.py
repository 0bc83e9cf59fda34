"""The local engine of a deployment: model folder, process, client, chat template and the releases it serves."""

import asyncio
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from reef_cli.config.paths import Home, cache_at
from reef_cli.config.schema import EngineSettings
from reef_cli.core.errors import ConfigError
from reef_cli.engines.chat_format import ModelChat
from reef_cli.engines.client import EngineClient
from reef_cli.engines.models import ModelStore
from reef_cli.engines.process import EngineProcess
from reef_cli.engines.serving import LocalServing

EMBEDDED_CONTEXT = 4096
"""Longest context of the embedded engine unless the file says otherwise: its cache lives in ordinary memory."""


class LocalEngine:
    """Owns the engine process (or the connection to one that runs already)."""

    def __init__(self, settings: EngineSettings, home: Home, *, push_wait_s: float, environ: Mapping[str, str]) -> None:
        self.settings = settings
        self._home = home
        self._push_wait_s = push_wait_s
        self._environ = environ
        self.admin_key = secrets.token_urlsafe(24)
        self.api_key = secrets.token_urlsafe(24)
        self.model_dir: Path
        self.chat: ModelChat
        self.serving: LocalServing
        self.client: EngineClient
        self.process: EngineProcess | None = None

    async def prepare(self) -> None:
        """Find the model and read its template; starts nothing. Raises `ModelNotFound`, `MissingDependency`."""
        store = ModelStore(cache_at(self._environ))
        self.model_dir = await asyncio.to_thread(store.resolve, self.settings.model)
        self.chat = await asyncio.to_thread(ModelChat, self.model_dir)
        if self.settings.kind == "embedded":
            self.process = self._embedded()
            url = self.process.url
        else:
            raise ConfigError(f"engine.kind {self.settings.kind} cannot be started here")
        self.client = EngineClient(url, api_key=self.api_key, admin_key=self.admin_key)
        self.serving = LocalServing(self.client, push_wait_s=self._push_wait_s)

    @property
    def context_length(self) -> int:
        return self.settings.context_length or min(self.chat.context_length, EMBEDDED_CONTEXT)

    async def start(self) -> None:
        """Start the process and wait until it answers."""
        if self.process is not None:
            await self.process.start(self.client)

    def on_restart(self, callback: Callable[[], Awaitable[Any]]) -> None:
        """Call back after the engine died and was started again, before requests reach it."""
        if self.process is not None:
            self.process.on_restart(callback)

    async def stop(self) -> None:
        if self.process is not None:
            await self.process.stop()
        if hasattr(self, "client"):
            await self.client.close()

    def _embedded(self) -> EngineProcess:
        settings = self.settings
        argv = [sys.executable, "-m", "reef_cli.engines.embedded", "--model-path", str(self.model_dir)]
        return EngineProcess(argv, log=self._home.logs / "engine.log", start_timeout_s=settings.start_timeout_s)
