"""Many episodes at once, but not too many: executors whose cancellation really ends what runs.

An episode is handed over as data and a callable, so that it can run in a thread here or in another process (`ray_pool`).
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from reef_cli.harness.episodes import Episode


@dataclass(frozen=True, slots=True)
class Job:
    """An episode to run. `work` blocks, and ends early when the event is set; it survives pickling, and shares no state."""

    id: str
    task: str
    work: Callable[[threading.Event], Episode]


class Executor(Protocol):
    """Where jobs run: this machine's pool, or something that spreads them over many."""

    async def run(self, job: Job) -> Episode:
        """The episode's result. When the caller is cancelled the episode is killed, and is gone before this returns."""
        ...

    async def close(self) -> None: ...


class LocalPool:
    """At most `limit` episodes at a time, in threads of their own: the loop's shared ones answer requests meanwhile."""

    def __init__(self, limit: int = 2) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="episode")

    async def run(self, job: Job) -> Episode:
        async with self._slots:
            cancel = threading.Event()
            task = asyncio.get_running_loop().run_in_executor(self._threads, job.work, cancel)
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                cancel.set()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()
                raise

    async def close(self) -> None:
        self._threads.shutdown(wait=False)
