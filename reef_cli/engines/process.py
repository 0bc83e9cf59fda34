"""The engine as a child process: start, readiness, death, restart with back-off, stop of the whole process group.

Readiness is the process alive, `/model_info` answering our key alone with our launch's weight version, and one real token;
never `/health`, which a busy or paused engine fails. Keys are random per launch, so a stranger on the port is not taken for
ours: it refuses our key, or answers without one.
A death is reported with the line that names its cause and followed by a restart, later and later while it keeps dying.
What an earlier server left behind is found by a mark in its environment and ended before the first start.
"""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from reef_cli.core.errors import AuthError, EngineError, EngineUnavailable, ReefError
from reef_cli.core.ports import Sampling
from reef_cli.engines.client import EngineClient
from reef_cli.engines.output import Output

log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STEADY_S = 60.0
"""An engine that ran this long before dying restarts without delay again."""
_MARK = "REEF_ENGINE_LOG"
"""In the environment of an engine and of all it starts: the log it writes to, which no other server's engine shares."""


def new_keys() -> tuple[str, str]:
    """Random keys for normal and control routes. Hex, so that no command line takes one for a flag."""
    return secrets.token_hex(24), secrets.token_hex(24)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine. `secrets` go into the environment, never into the command."""

    command: Sequence[str]
    url: str
    weight_version: str
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)
    admin_key: str = field(default_factory=lambda: secrets.token_hex(24), repr=False)
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
        self._output: Output | None = None
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
        """Whether the current process has answered a real request and, after a restart, was filled again."""
        return self.alive and self._ready.is_set()

    @property
    def fault(self) -> str | None:
        """Why it cannot serve now, or None."""
        if self.ready:
            return None
        return f"the engine is restarting: {self.last_death}" if self.last_death else "the engine is starting"

    async def start(self) -> None:
        """Start and wait until ready. Raises `EngineUnavailable` with cause and the log's end when it dies or is too slow."""
        await asyncio.to_thread(end_leftovers, self.launch.log_path)
        await self._spawn()
        try:
            await self._until_ready()
        except BaseException:
            await self._end()
            raise
        self._ready.set()
        self._watcher = asyncio.ensure_future(self._watch())

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for a restart under way. Raises `EngineUnavailable`."""
        try:
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        except TimeoutError:
            raise EngineUnavailable("The engine is restarting and temporarily unavailable", why=self.last_death or "") from None

    async def revive(self) -> None:
        """End the process; it is started again and filled like after any death."""
        self._ready.clear()
        if self._process is not None:
            _signal(self._process.pid, signal.SIGKILL)

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
        output = self._output = Output(self.launch.log_path, (self.launch.api_key, self.launch.admin_key))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.launch.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.fd,
                stderr=output.fd,
                env=os.environ | dict(self.launch.env) | {_MARK: str(self.launch.log_path)},
                start_new_session=True,
            )
        except OSError as error:
            raise EngineUnavailable(f"Cannot start the engine: {error}", hint="check the installation") from error
        finally:
            output.started()

    async def _until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.launch.start_timeout_s
        reason = "no answer yet"
        while loop.time() < deadline:
            if not self.alive:
                await self._end()
                raise self._death()
            try:
                await self._check()
                return
            except (EngineUnavailable, EngineError, AuthError) as error:
                reason = error.message
            except TimeoutError:
                reason = "it answers, but generates no token"
            await asyncio.sleep(0.1)
        raise EngineUnavailable(
            f"The engine was not ready within {self.launch.start_timeout_s:g} s",
            why=f"{reason}; log: {self._output.cause() if self._output else ''}",
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
            await self._end()
            death = self._death()
            self.last_death = death.message
            log.error("%s\n%s", death.message, death.why)
            pause = 0.0 if loop.time() - started > _STEADY_S else min(max(_FIRST_PAUSE_S, pause * 2), _LONGEST_PAUSE_S)
            await asyncio.sleep(pause)
            await self._restart()

    async def _restart(self) -> None:
        self.restarts += 1
        try:
            await self._spawn()
            await self._until_ready()
            if self.on_restart is not None:
                await self.on_restart()
            self._ready.set()
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
        if self._output is not None:
            await asyncio.to_thread(self._output.close)

    async def _kill(self) -> None:
        """End what is left of the process group, also children that outlived their leader."""
        if self._process is not None:
            _signal(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def _death(self) -> EngineUnavailable:
        """Of an ended process: one line that says why, and the end of its log."""
        assert self._output is not None
        code = self._process.returncode if self._process else None
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        return EngineUnavailable(
            f"The engine process {how} and is temporarily unavailable: {self._output.cause()}",
            why="its log ends:\n" + "\n".join(f"  {line}" for line in self._output.tail()),
            hint=f"see {self.launch.log_path}",
        )


def end_leftovers(log_path: Path) -> list[int]:
    """Kill engines of an earlier server that wrote to the same log, and all they started; Linux only. Their process ids."""
    wanted = f"{_MARK}={log_path}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError, ValueError):  # it ended meanwhile, or is another user's
            if wanted in entry.read_bytes().split(b"\0"):
                pid = int(entry.parent.name)
                os.kill(pid, signal.SIGKILL)
                found.append(pid)
    if found:
        log.warning("ended what an earlier engine left behind: processes %s", ", ".join(map(str, found)))
    return found


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
