"""`TrainerHandle`: the server's side of the trainer, implementing the port `Training`.

Promises: the trainer is started when first needed and again after any death, from the checkpoint the caller names; one call
runs at a time; a call ends with a result or a `TrainerError` that says why; silence or standstill longer than
`step_timeout_s` gets the trainer killed; a cancelled call kills it too, because a step cannot be taken back half-way (the
old checkpoint stays valid). Imports no torch.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.errors import EngineError, TrainerError
from reef_cli.core.machine import usable_cores
from reef_cli.core.ports import Reference, TrainerProgress
from reef_cli.core.types import Candidate, Held, Release, Sample
from reef_cli.trainer import protocol
from reef_cli.trainer.launcher import Hosts
from reef_cli.trainer.protocol import Done, Failed, Message, Progress, Ready
from reef_cli.trainer.ranks import Rank, RankGroup

OnProgress = Callable[[TrainerProgress], None]
STOP_GRACE_S = 10.0


class ProgramPath(Protocol):
    """A recipe's `ProgramSpec`: dotted path `module:Class` and JSON-safe settings."""

    @property
    def path(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...


class TrainerHandle:
    """Spawns, supervises and talks to the trainer subprocess."""

    def __init__(
        self,
        settings: TrainerSettings,
        model_dir: Path,
        program: ProgramPath,
        log: Path,
        *,
        seed: int = 0,
        engine_key: str | None = None,
        engine_read_key: str | None = None,
        transport: str = "group",
        borrow: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """`borrow` gets the memory that a step needs from whoever has it otherwise, and gives it back afterwards."""
        self._hosts = Hosts.read(Path(settings.hostfile)) if settings.hostfile else None
        world_size = self._hosts.world_size if self._hosts else settings.world_size
        self._settings = replace(settings, device=choose_device(settings.device), world_size=world_size)
        self._model_dir, self._program, self.log = model_dir, program, log
        self._seed, self._engine_keys, self._transport = seed, (engine_key, engine_read_key), transport
        self._borrow = borrow
        self._lock = asyncio.Lock()
        self._group: RankGroup | None = None
        self.starts = 0
        """How often the processes were started."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, empty while none runs."""
        return self._group.pids if self._group is not None else []

    async def start(self) -> None:
        """Start now instead of at the first call; returns when the model is loaded."""
        async with self._lock:
            await self._ready()

    async def train(
        self,
        scenario: str,
        base: Release,
        base_directory: Path | None,
        checkpoint: Path | None,
        samples: Sequence[Sample],
        out: Path,
        on_progress: OnProgress | None = None,
        reference: Reference | None = None,
    ) -> Candidate:
        """One step; see the port."""
        encoded = await asyncio.to_thread(lambda: tuple(protocol.sample_to_json(sample) for sample in samples))
        command = protocol.Train(
            scenario,
            base.step,
            _text(base_directory if base.kind != "base" else None),
            _text(checkpoint),
            encoded,
            str(out),
            None if reference is None else _text(reference.directory) or "",
        )
        async with self._borrow():
            result = await self._call(command, on_progress)
        kept = result["checkpoint"]
        return Candidate(Path(result["directory"]), result["kind"], result["metrics"], Path(kept) if kept else None)

    async def push(
        self,
        scenario: str,
        directory: Path,
        version: str,
        engine_url: str,
        others: Sequence[str] = (),
        held: Held | None = None,
    ) -> Mapping[str, Any]:
        """Send a candidate's weights into the engine, and `others`; of those `held` only what differs. Raises `EngineError`
        with `dirty` in its details when the push failed."""
        command = protocol.Push(
            scenario,
            str(directory),
            version,
            engine_url,
            *self._engine_keys,
            self._transport,
            list(others),
            held.label if held else None,
            _text(held.directory) if held else None,
            self._settings.delta,
        )
        return await self._call(command, None)

    async def score(self, directory: Path | None, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probs of the samples' action tokens under an artifact's weights (None: base), to compare with an engine's."""
        encoded = tuple(protocol.sample_to_json(sample) for sample in samples)
        result = await self._call(protocol.Score(_text(directory), encoded), None)
        scores: list[list[float]] = result["logprobs"]
        return scores

    async def stop(self) -> None:
        """End the processes; a running call is interrupted. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            await group.stop(0.0 if self._lock.locked() else STOP_GRACE_S)

    # -- one call ----------------------------------------------------------------------------------------------------------

    async def _call(self, command: Message, on_progress: OnProgress | None) -> Mapping[str, Any]:
        async with self._lock:
            group = await self._ready()
            try:
                await group.send(command)
                return await self._outcome(group, Done, self._settings.step_timeout_s, on_progress)
            except BaseException as error:
                # A rank that refused alone leaves the others in a collective; a cancelled step cannot be stopped gently.
                if not isinstance(error, TrainerError | EngineError) or len(group.ranks) > 1:
                    await self._drop(group)
                raise

    async def _ready(self) -> RankGroup:
        if self._group is not None and all(rank.process.returncode is None for rank in self._group.ranks):
            return self._group
        if self._group is not None:
            await self._drop(self._group)
        settings = self._settings
        threads = settings.threads or max(1, usable_cores() // settings.world_size)
        cuda = settings.device == "cuda"
        if self._hosts is None:
            group = await RankGroup.start(settings.world_size, threads, cuda, self.log)
        else:
            group = await RankGroup.launch(
                self._hosts, threads, cuda, self.log, settings.launcher_args, settings.start_timeout_s
            )
        self._group = group
        self.starts += 1
        try:
            await group.send(
                protocol.Init(
                    str(self._model_dir), self._program.path, dict(self._program.settings), asdict(settings), self._seed
                )
            )
            async with asyncio.timeout(settings.start_timeout_s):
                await self._outcome(group, Ready, settings.start_timeout_s, None)
        except TimeoutError as error:
            await self._drop(group)
            raise TrainerError(
                f"The trainer was not ready after {settings.start_timeout_s:.0f} s", hint="raise trainer.start_timeout_s"
            ) from error
        except BaseException:
            await self._drop(group)
            raise
        return group

    async def _outcome(
        self, group: RankGroup, kind: type[Ready | Done], silence_s: float, on_progress: OnProgress | None
    ) -> Mapping[str, Any]:
        """Rank 0's result, while every rank is watched; the first failure or death of any rank ends the wait."""
        # Every rank says Ready; only rank 0 says Done.
        awaited = len(group.ranks) if kind is Ready else 1
        listeners = [
            asyncio.create_task(self._listen(group, rank, kind, silence_s, on_progress if i == 0 else None))
            for i, rank in enumerate(group.ranks)
        ]
        try:
            if awaited == 1:
                # The others never answer; they end only by failing.
                await asyncio.wait(listeners, return_when=asyncio.FIRST_COMPLETED)
                for listener in listeners:
                    if listener.done():
                        return listener.result()
            return (await asyncio.gather(*listeners))[0]
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)

    async def _listen(
        self, group: RankGroup, rank: Rank, kind: type[Ready | Done], silence_s: float, on_progress: OnProgress | None
    ) -> Mapping[str, Any]:
        while True:
            try:
                # Not `wait_for`: in Python 3.11 it can swallow a cancellation that meets an arriving message.
                async with asyncio.timeout(silence_s):
                    message = await rank.receive()
            except TimeoutError as error:
                raise await self._too_slow(group, f"gave no sign of life for {silence_s:g} s") from error
            match message:
                case None:
                    death = await group.death(rank)
                    await self._drop(group)
                    raise death
                case Progress() if message.idle_s > silence_s and message.phase != "idle":
                    raise await self._too_slow(group, f"stood still in phase {message.phase!r} for {message.idle_s:.0f} s")
                case Progress():
                    if on_progress is not None and message.phase != "idle":
                        on_progress(TrainerProgress(message.phase, message.done, message.total, time.time()))
                case Failed():
                    if message.fatal:
                        await self._drop(group)
                    raise _error(message)
                case Ready() | Done() if isinstance(message, kind):
                    return message.facts if isinstance(message, Ready) else message.result
                case _:
                    raise TrainerError(f"The trainer sent an unexpected {type(message).__name__}")

    async def _too_slow(self, group: RankGroup, what: str) -> TrainerError:
        await self._drop(group)
        return TrainerError(f"The trainer {what} and was killed", hint="raise trainer.step_timeout_s, or lower reef.batch_size")

    async def _drop(self, group: RankGroup) -> None:
        if self._group is group:
            self._group = None
        await group.kill()


def choose_device(device: str) -> Any:
    """`auto` means CUDA where an NVIDIA driver is visible; decided without importing torch."""
    if device != "auto":
        return device
    return "cuda" if Path("/proc/driver/nvidia/version").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" else "cpu"


def _error(message: Failed) -> TrainerError | EngineError:
    kind = EngineError if message.details.get("kind") == "EngineError" else TrainerError
    return kind(message.message, why=message.why, hint=message.hint, **message.details)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
