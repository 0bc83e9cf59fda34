"""Many episodes at once, but not too many: a bounded pool whose cancellation really ends what runs.

Pairs are interleaved: candidate and current of one task run next to each other, and which goes first alternates, so that a slow
spell of the model falls on both sides.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from reef_cli.harness.episodes import Episode

Job = Callable[[threading.Event], Episode]
"""Runs one episode, blocking; ends early when the event is set."""


class Executor(Protocol):
    """Where jobs run: this machine's pool, or something that spreads them over many."""

    async def run(self, job: Job) -> Episode: ...


class LocalPool:
    """At most `limit` episodes at a time, in threads of their own: the loop's shared ones answer requests meanwhile."""

    def __init__(self, limit: int = 2) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="episode")

    async def run(self, job: Job) -> Episode:
        """The episode's result. When the caller is cancelled the episode is killed, and is gone before this returns."""
        async with self._slots:
            cancel = threading.Event()
            task = asyncio.get_running_loop().run_in_executor(self._threads, job, cancel)
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                cancel.set()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()
                raise


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides of one task."""

    task: str
    candidate: Episode
    current: Episode

    @property
    def outage(self) -> bool:
        """Whether the pair says nothing, because one side could not run."""
        return "outage" in (self.candidate.outcome, self.current.outcome)


async def run_pairs(
    executor: Executor, jobs: Sequence[tuple[str, Job, Job]], on_progress: Callable[[int, int], None] | None = None
) -> list[Pair]:
    """Run `(task, candidate, current)` jobs. The first to start alternates from task to task."""
    done = 0

    async def both(index: int, task: str, candidate: Job, current: Job) -> Pair:
        nonlocal done
        order = (candidate, current) if index % 2 == 0 else (current, candidate)
        first, second = await asyncio.gather(*(executor.run(job) for job in order))
        done += 1
        if on_progress is not None:
            on_progress(done, len(jobs))
        return Pair(task, first, second) if index % 2 == 0 else Pair(task, second, first)

    return list(await asyncio.gather(*(both(index, *job) for index, job in enumerate(jobs))))
