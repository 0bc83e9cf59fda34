"""The engine as a child process: start, readiness, death, restart with back-off, stop of the whole process group.

Readiness is the process alive, `/model_info` answering our key alone with our launch's weight version, and one real token;
never `/health`, which a busy or paused engine fails. Keys are random per launch, so a stranger on the port is not taken for
ours: it refuses our key, or answers without one.
A death is reported with the last line of the log and followed by a restart, later and later while it keeps dying.
"""

import asyncio
import logging
import os
import secrets
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from reef_cli.core.errors import AuthError, EngineError, EngineUnavailable, ReefError
from reef_cli.core.ports import Sampling
from reef_cli.engines.client import EngineClient

log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STEADY_S = 60.0
"""An engine that ran this long before dying restarts without delay again."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine. `secrets` go into the environment, never into the command."""

    command: Sequence[str]
    url: str
    weight_version: str
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    admin_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    start_timeout_s: float = 300.0
    stop_timeout_s: float = 10.0


class EngineProcess:
    """Supervises one engine. `on_restart` runs after each restart, once the new process is ready."""

    def __init__(self, launch: Launch, on_restart: Callable[[], Awaitable[None]] | None = None) -> None:
        self.launch = launch
        self.client = EngineClient(launch.url, launch.api_key, launch.admin_key)
        self.on_restart = on_restart
        self.restarts = 0
        self.last_death: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._log: BinaryIO | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def ready(self) -> bool:
        """Whether the current process has answered a real request."""
        return self.alive and self._ready.is_set()

    async def start(self) -> None:
        """Start and wait until ready. Raises `EngineUnavailable` with the log's last line when it dies or takes too long."""
        await self._spawn()
        try:
            await self._until_ready()
        except BaseException:
            await self._end()
            raise
        self._watcher = asyncio.ensure_future(self._watch())

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for a restart under way. Raises `EngineUnavailable`."""
        try:
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        except TimeoutError:
            raise EngineUnavailable("The engine is restarting and temporarily unavailable", why=self.last_death or "") from None

    async def stop(self) -> None:
        """SIGTERM, a wait, SIGKILL to the whole process group. Idempotent."""
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        await self._end()
        await self.client.close()

    async def _spawn(self) -> None:
        self._ready.clear()
        self.launch.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.launch.log_path.open("ab")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.launch.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=os.environ | dict(self.launch.env),
                start_new_session=True,
            )
        except OSError as error:
            raise EngineUnavailable(f"Cannot start the engine: {error}", hint="check the installation") from error

    async def _until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.launch.start_timeout_s
        reason = "no answer yet"
        while loop.time() < deadline:
            if not self.alive:
                raise self._death()
            try:
                await self._check()
                self._ready.set()
                return
            except (EngineUnavailable, EngineError, AuthError) as error:
                reason = error.message
            await asyncio.sleep(0.1)
        raise EngineUnavailable(
            f"The engine was not ready within {self.launch.start_timeout_s:g} s",
            why=f"{reason}; log: {self._tail()}",
            hint=f"see {self.launch.log_path}, or raise engine.start_timeout_s",
        )

    async def _check(self) -> None:
        if await self.client.open_to_all():
            raise EngineError(f"Another engine listens on {self.launch.url}")
        found = (await self.client.model_info())["weight_version"]
        if found != self.launch.weight_version:
            raise EngineError(f"{self.launch.url} serves weights {found!r}, not {self.launch.weight_version!r}")
        await asyncio.wait_for(self.client.generate([0], Sampling(temperature=0.0), max_new_tokens=1), 60)

    async def _watch(self) -> None:
        """Restart for as long as it takes; a failure to restart is one more death."""
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            assert self._process is not None
            started = loop.time()
            await self._process.wait()
            self._ready.clear()
            self.last_death = self._death().message
            log.error("%s", self.last_death)
            pause = 0.0 if loop.time() - started > _STEADY_S else min(max(_FIRST_PAUSE_S, pause * 2), _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
            await self._end()
            await self._restart()

    async def _restart(self) -> None:
        self.restarts += 1
        try:
            await self._spawn()
            await self._until_ready()
            if self.on_restart is not None:
                await self.on_restart()
        except ReefError as error:
            log.error("engine restart failed: %s %s", error.message, error.why)
            await self._kill()

    async def _end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), self.launch.stop_timeout_s)
            except TimeoutError:
                log.warning("engine %d ignored SIGTERM for %g s", process.pid, self.launch.stop_timeout_s)
        await self._kill()
        if self._log is not None:
            self._log.close()
            self._log = None

    async def _kill(self) -> None:
        """End what is left of the process group, also children that outlived their leader."""
        if self._process is not None:
            _signal(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def _death(self) -> EngineUnavailable:
        code = self._process.returncode if self._process else None
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return EngineUnavailable(
            f"The engine process {how} and is temporarily unavailable: {self._tail()}", hint=f"see {self.launch.log_path}"
        )

    def _tail(self) -> str:
        """The last line of the log that says something."""
        try:
            with self.launch.log_path.open("rb") as file:
                file.seek(max(0, self.launch.log_path.stat().st_size - 8192))
                lines = deque((line.strip() for line in file if line.strip()), maxlen=1)
        except OSError:
            return "no log"
        return lines[-1].decode(errors="replace")[:400] if lines else "empty log"


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
