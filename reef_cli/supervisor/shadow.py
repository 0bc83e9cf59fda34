"""A second engine that only the evaluation talks to, for deployments whose candidates would replace all weights.

Where releases are LoRA adapters a candidate stands beside the served one in the same engine. Merged and full pushes cannot do
that without changing what clients get, so a candidate is tried in an engine of its own, started when the first one comes and
kept until the server stops. It costs the memory of a second model.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from reef_cli.core.ports import Completion, Delta, GenerateRequest, Generation
from reef_cli.core.types import Release
from reef_cli.engines.process import EngineProcess
from reef_cli.engines.resident import Check
from reef_cli.engines.serving import LocalServing


class Shadow:
    """The evaluation's engine, and a `Generation` that sends each request to the engine that has its release."""

    def __init__(
        self, process: EngineProcess, main: Generation, *, context_length: int, model_dir: Path, check: Check | None = None
    ) -> None:
        self._process = process
        self._main = main
        self._serving = LocalServing(process.client, context_length=context_length, model_dir=model_dir, check=check)
        self._staged: set[str] = set()
        self._starting = asyncio.Lock()

    async def stage(self, candidate: Release, directory: Path | None) -> None:
        """Load a candidate into the second engine."""
        async with self._starting:
            if not self._process.alive:
                await self._process.start()
        await self._serving.load(candidate, directory)
        self._staged.add(candidate.release_id)

    async def unstage(self, candidate: Release) -> None:
        if candidate.release_id in self._staged:
            self._staged.discard(candidate.release_id)
            await self._serving.unload(candidate)

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._engine(request).generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        async for delta in self._engine(request).stream(request):
            yield delta

    async def stop(self) -> None:
        await self._process.stop()

    def _engine(self, request: GenerateRequest) -> Generation:
        return self._serving if request.release and request.release.release_id in self._staged else self._main
