"""SGLang's own router in front of several engines: requests go through it, control calls never do.

It knows no keys: it passes on the one a request brings, and the engines refuse what comes without. Its health checks are off,
since an engine whose weights change fails them by intent; the fleet goes round by itself while an engine or the router is away.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from reef_cli.core.errors import EngineUnavailable
from reef_cli.engines import guard
from reef_cli.engines.client import EngineClient
from reef_cli.engines.process import EngineProcess, Launch

_TIMEOUT_S = 60.0


def installed(python: str) -> bool:
    """Whether an interpreter has SGLang's router."""
    try:
        done = subprocess.run([python, "-c", "import sglang_router"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def launch(python: str, urls: Sequence[str], ports: tuple[int, int], log_path: Path, key: str | None) -> Launch:
    """Its command line: `ports` for requests and for its own metrics, which nobody reads but which it insists on."""
    port, metrics = ports
    program = [
        *(python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *urls, "--policy", "cache_aware"),
        *("--disable-health-check", "--disable-circuit-breaker", "--disable-retries"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "warn"),
    ]
    return Launch(
        command=[sys.executable, str(Path(guard.__file__)), str(os.getpid()), *program],
        url=f"http://127.0.0.1:{port}",
        weight_version="",
        log_path=log_path,
        api_key=key or "",
        admin_key="",
        start_timeout_s=60.0,
        stop_timeout_s=5.0,
    )


class RouterClient(EngineClient):
    """Requests through the router; aborting one goes to all engines, since only they can."""

    def __init__(self, base_url: str, key: str | None, members: Sequence[EngineClient]) -> None:
        super().__init__(base_url, key)
        self._members = members

    async def abort(self, rid: str) -> None:
        for member in self._members:
            await member.abort(rid)

    async def workers(self) -> int:
        """How many engines it sends requests to."""
        reply = await self._call("GET", "/readiness", timeout_s=10)
        return int(reply["healthy_workers"])


class RouterProcess(EngineProcess):
    """Supervised like an engine; ready once it knows all of them."""

    def __init__(self, made: Launch, members: Sequence[EngineClient]) -> None:
        super().__init__(made)
        self.client: RouterClient = RouterClient(made.url, made.api_key or None, members)
        self._count = len(members)

    async def _check(self) -> None:
        if (known := await self.client.workers()) != self._count:
            raise EngineUnavailable(f"The router knows {known} of {self._count} engines")
