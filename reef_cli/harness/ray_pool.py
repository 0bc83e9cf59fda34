"""Episodes as Ray tasks, for more of them at once than one machine has room for. Optional: the extra `ray`.

What an episode is does not change: sandbox, limits, and its token come with the job and hold in the worker as they do here. A
worker or a node that dies is an outage, never a score, and an episode is never run twice. Workers need Reef, the folders the
job names (installed agents, state), and an address of the gateway they reach. Without an address Ray is started on this
machine, on loopback, and ended with the server.
"""

import asyncio
import os
import signal
import threading
from importlib.util import find_spec
from typing import Any

from reef_cli.core.errors import MissingDependency, ReefError, UnavailableError
from reef_cli.harness.episodes import Episode
from reef_cli.harness.pool import Job
from reef_cli.harness.trajectory import Trajectory

GONE_S = 30.0
"""How long a cancelled episode may take to end before its worker is ended."""


def require() -> None:
    """Raises `MissingDependency` when Ray is not installed."""
    if find_spec("ray") is None:
        raise MissingDependency("Ray is not installed", why="episodes are to run on it", hint="pip install 'reef-cli[ray]'")


def _in_worker(job: Job) -> Episode | ReefError:
    """Runs in the worker's main thread. Ray cancels by an interrupt, which here ends the episode as a person's would."""
    cancel = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: cancel.set())
    try:
        return job.work(cancel)
    except ReefError as error:
        return error
    finally:
        signal.signal(signal.SIGINT, before)


class RayPool:
    """At most `limit` episodes at a time on the cluster at `address`, or on one of this machine's own; each takes one CPU."""

    def __init__(self, limit: int = 2, address: str | None = None) -> None:
        require()
        self._slots = asyncio.Semaphore(limit)
        self._limit = limit
        self._address = address
        self._starting = threading.Lock()
        self._task: Any = None

    async def run(self, job: Job) -> Episode:
        async with self._slots:
            reference = await asyncio.to_thread(self._submit, job)
            try:
                return await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(self._result, job, reference)))
            except asyncio.CancelledError:
                await asyncio.to_thread(self._end, reference)
                raise

    async def close(self) -> None:
        if self._task is not None:
            await asyncio.to_thread(self._shutdown)

    def _submit(self, job: Job) -> Any:
        with self._starting:
            if self._task is None:
                self._task = self._start()
        return self._task.remote(job)

    def _start(self) -> Any:
        """The task on a connected cluster. Raises `UnavailableError`."""
        import ray

        facts: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self._address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            own = {"num_cpus": self._limit, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            facts |= {"address": "local", **own}
        else:
            facts["address"] = self._address
        try:
            # Not in the main thread, where Ray would take the server's signal handlers.
            ray.init(**facts)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise UnavailableError(
                f"no Ray at {self._address or 'this machine'}; episodes cannot run, try again", why=str(error)[:300]
            ) from error
        return ray.remote(max_retries=0, num_cpus=1)(_in_worker)

    @staticmethod
    def _result(job: Job, reference: Any) -> Episode:
        import ray

        try:
            found: Episode | ReefError = ray.get(reference)
        except ray.exceptions.RayTaskError:
            raise
        except (ray.exceptions.RayError, OSError) as error:
            words = " ".join(str(error).split())[:300]
            return Episode(job.id, job.task, "outage", f"its worker is gone: {words}", None, 0.0, 0, (), Trajectory())
        if isinstance(found, ReefError):
            raise found
        return found

    @staticmethod
    def _end(reference: Any) -> None:
        """Interrupt the task and wait until it is gone; a worker that does not heed it is ended."""
        import ray

        ray.cancel(reference)
        if not ray.wait([reference], timeout=GONE_S)[0]:
            ray.cancel(reference, force=True)
            ray.wait([reference], timeout=GONE_S)

    @staticmethod
    def _shutdown() -> None:
        import ray

        ray.shutdown()
