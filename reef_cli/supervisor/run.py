"""`reef serve` as a process: one owner per home, signals, the banner, and an exit code.

The first SIGINT or SIGTERM drains; a second one forces. `kill -9` is always safe: whatever was acknowledged is on disk, and
the next start finishes or abandons what was under way.
"""

import asyncio
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import uvloop

from reef_cli.config.load import Loaded
from reef_cli.config.paths import Home
from reef_cli.control.discovery import Running, first_token
from reef_cli.core.errors import AlreadyRunning, MissingDependency
from reef_cli.gateway.auth import TokenBook, open_tokens
from reef_cli.supervisor import memory
from reef_cli.supervisor.stack import Stack
from reef_cli.telemetry import logs
from reef_cli.telemetry.metrics import Metrics


def run(loaded: Loaded) -> int:
    """Serve until told to stop; 0 after a clean drain. Raises the core errors for what cannot start."""
    home = loaded.home.prepare()
    with _owner(home):
        fresh = not home.token.exists()
        tokens = open_tokens(loaded.settings.reef, home.root)
        made = first_token(home.token.read_text(encoding="utf-8")) if fresh and home.token.exists() else None
        handler = logs.setup(home.root, loaded.settings.telemetry.log_level, _secrets(loaded, made))
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_main(loaded, home, tokens, made))
        finally:
            logs.close(handler)


def _secrets(loaded: Loaded, made: str | None) -> logs.Secrets:
    """What the log must never show."""
    settings = loaded.settings
    known = (settings.reef.token, *settings.reef.tokens, settings.engine.api_key, made)
    return logs.Secrets([secret for secret in known if secret])


async def _main(loaded: Loaded, home: Home, tokens: TokenBook, made: str | None) -> int:
    stack = Stack(loaded, tokens, Metrics())
    stopping = asyncio.Event()
    _on_signals(stack, stopping)
    _say(f"reef: starting {loaded.settings.engine.kind} engine with {_served(loaded)}")
    starting = asyncio.create_task(stack.start())
    waiting = asyncio.create_task(stopping.wait())
    announced = asyncio.create_task(_announce(stack, home))
    tending = asyncio.create_task(memory.tend())
    await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if starting.done():
            starting.result()
            await announced
            _settle_memory()
            _banner(stack, loaded, home, made)
            await stopping.wait()
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        _say("reef: draining; press Ctrl-C again to stop at once")
        await stack.stop()
    finally:
        for task in (waiting, announced, tending):
            task.cancel()
        home.running.unlink(missing_ok=True)
    _say("reef: stopped")
    return 0


def _on_signals(stack: Stack, stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            stack.force()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


async def _announce(stack: Stack, home: Home) -> None:
    """Write the discovery file as soon as the gateway listens, so that `reef status` can tell what is starting."""
    await stack.listening.wait()
    assert stack.server is not None
    token = stack.settings.reef.token is None and not stack.settings.reef.tokens
    Running(stack.server.url, os.getpid(), stack.instance, str(home.token) if token else None).write(home.running)


def _settle_memory() -> None:
    """What was made while starting stays for good: the collector need not walk over it again and again."""
    gc.collect()
    gc.freeze()


def _served(loaded: Loaded) -> str:
    return loaded.settings.engine.served or f"the models of {loaded.settings.engine.url}"


def _banner(stack: Stack, loaded: Loaded, home: Home, made: str | None) -> None:
    assert stack.server is not None
    recipe = stack.recipe.name if stack.recipe else "none: record only"
    _say(f"reef: serving {_served(loaded)} at {stack.server.url} (recipe {recipe}, home {home.root})")
    if made:
        # What is no terminal is a log, which is no place for a token.
        shown = (
            f"token {made} (kept in {home.token}, shown this once)"
            if sys.stderr.isatty()
            else f"a token was made: {home.token}"
        )
        _say(f"reef: {shown}")
    _say(f"reef: try  curl -H 'Authorization: Bearer ...' {stack.server.url}/reef/status  or  reef tui; Ctrl-C stops")


@contextmanager
def _owner(home: Home) -> Iterator[None]:
    """Hold the home for this process. Raises `AlreadyRunning` naming the owner."""
    path = home.run / "owner.lock"
    with path.open("a+", encoding="utf-8") as lock:
        _lock(lock, path)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _lock(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip()
        raise AlreadyRunning(
            f"Another reef serve (process {owner or 'unknown'}) owns {path.parent.parent}.",
            why="one server at a time keeps a home's records and releases",
            hint="Stop it with `reef stop`, or give this one its own home: --reef.home DIR",
        ) from None
    except OSError as error:
        raise MissingDependency(f"cannot lock {path}", why=str(error), hint="keep the home on a local disk") from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
