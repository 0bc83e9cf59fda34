"""An SGLang that somebody else started, watched from here: is it there, and was it away, so that it must be filled again."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ConfigError, EngineUnavailable, ReefError
from reef_cli.engines.client import EngineClient

log = logging.getLogger(__name__)
EVERY_S = 2.0
"""How often it is looked at; a server of this kind takes longer than that to come back."""


class AttachedEngine:
    """Watches the engine of `client`. `on_restart` runs when it answers again, before `fault` says that all is well."""

    restarts = 0
    """Whoever started it counts those."""

    def __init__(self, client: EngineClient, model_dir: Path) -> None:
        self.client = client
        self.fault: str | None = "the engine has not answered yet"
        self.on_restart: Callable[[], Awaitable[None]] | None = None
        self._model_dir = model_dir
        self._watcher: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.fault is None

    async def start(self) -> None:
        """Look at it, and from now on. Raises `EngineUnavailable`, and `ConfigError` when it serves another kind of model."""
        _check_model(await self.client.model_info(), self._model_dir)
        self.fault = None
        self._watcher = asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        await self.client.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.client.model_info()
                if self.fault is not None and self.on_restart is not None:
                    log.warning("the engine at %s answers again and is filled", self.client.base_url)
                    await self.on_restart()
                self.fault = None
            except EngineUnavailable as error:
                self.fault = f"the engine is away: {error.message}"
            except ReefError as error:
                self.fault = f"the engine could not be filled: {error.message}"


def _check_model(info: Mapping[str, Any], model_dir: Path) -> None:
    """The engine's architecture is that of the model this server renders prompts and trains for."""
    try:
        own = json.loads((model_dir / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError):
        return
    theirs = info.get("architectures")
    if own and theirs and own != theirs:
        raise ConfigError(
            f"The engine at engine.url serves a {theirs[0]}, engine.model is a {own[0]}", hint="give the model it serves"
        )
