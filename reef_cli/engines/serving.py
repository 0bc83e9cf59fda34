"""A local engine and the releases it has loaded: the port `Serving` over an `EngineClient`.

LoRA releases stand beside each other (`resident`); a full checkpoint replaces the engine's weights, so at most one full release
is servable at a time. While full weights are pushed, new requests wait at the gate; those under way are
retracted by the engine and go on under the new weights. What is loaded is remembered, so that a restarted engine can be filled
again (`restore`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reef_cli.core.errors import EngineError, EngineUnavailable, InvalidRequest, PushTimeout, ReefError, ReleaseNotServable
from reef_cli.core.ids import split_weight_version, weight_version
from reef_cli.core.ports import Completion, Delta, GenerateRequest, Sampling
from reef_cli.core.types import Held, Release, TokenSpan
from reef_cli.engines.client import EngineClient
from reef_cli.engines.resident import Check, Residents
from reef_cli.weights.contract import PARTIAL

log = logging.getLogger(__name__)
BASE = "base"


Push = Callable[[Path, str, Held | None], Awaitable[object]]
"""Sends an artifact's weights, merged or full, into the engine under a label; the engine is paused meanwhile. It may leave out
what the engine holds already, once that says so itself; None: nobody knows what it holds."""
Revive = Callable[[], Awaitable[None]]
"""Ends an engine that holds nobody's weights, so that it starts again with its own and is filled."""
HEAL_S = 180.0
"""How long an engine gets to take its old weights back after a push that broke half-way."""


@dataclass(frozen=True, slots=True)
class _Full:
    """Weights that are all of the engine: their label, where they came from, and whether the trainer must send them."""

    label: str
    directory: Path | None
    pushed: bool = False


class LocalServing:
    """Serves releases through one engine. Times in seconds; `context_length` in tokens is asked of the engine when absent."""

    def __init__(
        self,
        client: EngineClient,
        *,
        base_label: str = BASE,
        push_wait_s: float = 300.0,
        context_length: int | None = None,
        model_dir: Path | None = None,
        push: Push | None = None,
        check: Check | None = None,
        revive: Revive | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.client = client
        self._push = push
        self._revive = revive
        self._vocabulary = vocabulary
        self._base_label = base_label
        self._push_wait_s = push_wait_s
        self._context_length = context_length
        self._model_dir = model_dir
        self._full = _Full(base_label, model_dir)
        self._mixed = False
        self._changing = asyncio.Lock()
        self._adapters = Residents(client, self._changing, self._probe, check)
        self._pushing = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()

    # Generation

    async def generate(self, request: GenerateRequest) -> Completion:
        async with self._admitted(request) as (label, adapter, room):
            done = await self.client.generate(
                request.input_ids, request.sampling, max_new_tokens=room, adapter=adapter, rid=request.rid
            )
        return _labelled(done, label)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        async with self._admitted(request) as (label, adapter, room):
            deltas = self.client.stream(
                request.input_ids, request.sampling, max_new_tokens=room, adapter=adapter, rid=request.rid
            )
            try:
                async for delta in deltas:
                    yield replace(delta, completion=_labelled(delta.completion, label)) if delta.completion else delta
            finally:
                await deltas.aclose()  # type: ignore[attr-defined]

    @asynccontextmanager
    async def _admitted(self, request: GenerateRequest) -> AsyncIterator[tuple[str | None, str | None, int]]:
        """Wait at the gate; an adapter's label and its name in the engine, where it stays until this is left, and the room
        for new tokens."""
        self._check_tokens(request)
        await self._pass_gate()
        release = request.release
        if release is not None and not self.servable(release) and not self._replaced(release, request.pinned):
            raise EngineUnavailable(
                f"Release {release.release_id} is not loaded in the engine",
                hint="try again in a moment, or check `reef status`",
            )
        label = self.version_of(release) if release is not None and self._beside(release) else None
        with nullcontext() if label is None else self._adapters.used(label) as adapter:
            yield label, adapter, await self._room(len(request.input_ids), request.sampling)

    def _check_tokens(self, request: GenerateRequest) -> None:
        """A token the model does not have would end SGLang, and every request with it."""
        size = self._vocabulary
        if size is None:
            return
        for tokens in (request.input_ids, request.sampling.logit_bias):
            if tokens and not 0 <= min(tokens) <= max(tokens) < size:
                wrong = next(token for token in tokens if not 0 <= token < size)
                raise InvalidRequest(f"Token {wrong} is none of the model's {size}")

    async def _pass_gate(self) -> None:
        if self._mixed:
            raise EngineUnavailable("The engine holds a mixture of weights and is unavailable", hint="restart it")
        if self._open.is_set():
            return
        try:
            await asyncio.wait_for(self._open.wait(), self._push_wait_s)
        except TimeoutError:
            raise PushTimeout(
                f"New weights were being loaded for more than {self._push_wait_s:g} s; the engine is temporarily unavailable"
            ) from None

    async def _room(self, prompt: int, sampling: Sampling) -> int:
        if self._context_length is None:
            info = await self.client.server_info()
            self._context_length = int(info.get("context_length") or info.get("max_total_num_tokens") or 4096)
        # The engine itself answers a prompt that leaves no room, in words agents recognise.
        room = max(self._context_length - prompt - 1, 1)
        return min(sampling.max_new_tokens or room, room)

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Hold new requests back for the duration of a push; they wait `push_wait_s` at most. One holder at a time."""
        async with self._pushing:
            self._open.clear()
            try:
                yield
            finally:
                self._open.set()

    def _beside(self, release: Release) -> bool:
        """Whether the release stands beside others as a LoRA adapter; with pushes a LoRA release is all of the weights."""
        return release.kind == "lora" and self._push is None

    def _replaced(self, release: Release, pinned: bool) -> bool:
        """Whether newer weights of the same scenario took the release's place while an unpinned request waited."""
        if pinned or self._beside(release):
            return False
        named = split_weight_version(self._full.label)
        return named is None or named[0] == release.scenario

    # Releases

    async def load(self, release: Release, directory: Path | None) -> None:
        """See the port. Raises `EngineError` when the engine refuses; what it served before it still serves."""
        async with self._changing:
            label = self.version_of(release)
            if not self._beside(release):
                self._check_owner(release)
            if self._beside(release):
                await self._adapters.load(label, directory)
            elif release.kind in ("checkpoint", "lora"):
                await self._load_full(_Full(label, directory, pushed=self._push is not None))
            elif release.kind == "base":
                await self._load_full(_Full(self._base_label, self._model_dir))

    def _check_owner(self, release: Release) -> None:
        """Whole weights belong to one scenario; another must not swap them out under its clients."""
        named = split_weight_version(self._full.label)
        if named is not None and named[0] != release.scenario:
            raise ReleaseNotServable(
                f"The engine runs the weights of scenario {named[0]}, so it cannot serve {release.scenario} too",
                why="merged and full pushes replace all weights of an engine",
                hint="use LoRA adapters (trainer.push: adapter), or a second server",
            )

    async def _load_full(self, full: _Full) -> None:
        """Swap weights, unless the engine runs these already."""
        info = await self.client.model_info()
        if self._same(full, info["weight_version"]):
            await self.client.set_version(full.label)
        elif info["weight_version"] != full.label:
            async with self.closed():
                started = time.monotonic()
                await self.client.pause("retract")
                await self._swap(full, Path(info["model_path"]), self._held())
                await self.client.resume()
                log.info("paused for %.3f s to load %s", time.monotonic() - started, full.label)
        self._mixed = False
        await self._probe(None)
        self._full = full

    def _same(self, full: _Full, running: str) -> bool:
        """Whether the engine has these very weights under another label, as after a gate: nothing need be sent or paused."""
        known = running == self._full.label != full.label and not self._mixed
        return known and full.directory is not None and full.directory == self._full.directory

    def _held(self) -> Held:
        """What the engine holds if all is well; `_full` has the base model's folder as the engine's owner names it."""
        base = self._full.label == self._base_label
        return Held(self._full.label, None if base else self._full.directory)

    async def _swap(self, full: _Full, own: Path, held: Held) -> None:
        """New weights into the paused engine. After a failure it goes on with the old ones or is restarted, never mixed."""
        try:
            await self._send(full, own, held)
            found = (await self.client.model_info())["weight_version"]
            if found != full.label:
                raise EngineError(f"The engine runs {found!r} after loading {full.label!r}", dirty=True)
        except BaseException as error:
            if not isinstance(error, ReefError) or error.details.get("dirty") is not False:
                await self._heal(own)
            with suppress(EngineError, EngineUnavailable):  # a dead or restarting engine has nothing to continue
                await self.client.resume()
            raise

    async def _send(self, full: _Full, own: Path, held: Held | None = None) -> None:
        """From the trainer, or from disk, where the engine itself takes all or nothing."""
        if full.pushed and full.directory is not None and self._push is not None:
            await self._push(full.directory, full.label, held)
            return
        try:
            await self.client.update_from_disk(full.directory or own, full.label)
        except EngineError as error:
            error.details.setdefault("dirty", False)
            raise

    async def _heal(self, own: Path) -> None:
        """After a push that broke half-way: what served before, before anything is generated; else a restart."""
        try:
            async with asyncio.timeout(HEAL_S):
                with suppress(EngineError):  # there is a session only where the trainer died in one
                    await self.client.end_update()
                await self._send(self._full, own)
        except (ReefError, TimeoutError) as error:
            if self._revive is None:
                self._mixed = True
                raise EngineError(
                    "The engine may hold a mixture of weights and could not be given the old ones",
                    why=str(error) or type(error).__name__,
                    hint="restart it",
                ) from error
            log.warning("the engine could not be given its old weights and is restarted: %s", error)
            await self._revive()

    async def _probe(self, adapter: str | None) -> None:
        """One real token through the new weights."""
        await self.client.generate([0], Sampling(temperature=0.0), max_new_tokens=1, adapter=adapter)

    async def reachable(self) -> None:
        """See the port."""
        await self.client.model_info()

    async def unload(self, release: Release) -> None:
        """See the port. Requests that were admitted before keep the adapter, also those still on their way to the engine."""
        if self._beside(release):
            await self._adapters.unload(self.version_of(release))

    async def take_over(self) -> None:
        """An engine that ran before: end what a server that died left in it, and keep its own name for its first weights."""
        with suppress(EngineError):  # there is a session only where a push was cut off
            await self.client.end_update()
        label = str((await self.client.model_info())["weight_version"])
        if PARTIAL in label:
            log.warning("the engine holds a mixture of weights, which a push that was cut off left; it gets its own again")
            await self._load_full(self._full)
            return
        if split_weight_version(label) is None:
            self._base_label = label
            self._full = _Full(label, self._model_dir)
        await self.client.resume()

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """The engine's memory belongs to somebody else for the block: new requests wait, those under way go on afterwards."""
        async with self._changing, self.closed():
            await self.client.pause("retract")
            await self.client.release_memory()
            try:
                yield
            finally:
                await self._take_back()

    async def _take_back(self) -> None:
        try:
            await self.client.resume_memory()
            await self.client.resume()
        except (EngineError, EngineUnavailable) as error:
            if self._revive is None:
                raise
            log.warning("the engine did not take its memory back and is restarted: %s", error)
            await self._revive()

    async def restore(self, meanwhile: bool = False) -> None:
        """Load everything again into an engine that has just restarted. Raises the first failure, after trying all.

        `meanwhile`: other engines of the same client have it all and go on serving.
        """
        full, adapters = self._full, self._adapters.all()
        if not meanwhile:
            self._full = _Full(self._base_label, self._model_dir)
            self._adapters.forget()
        failures: list[Exception] = []
        async with self._changing:
            try:
                await self._load_full(full)
            except (EngineError, EngineUnavailable) as error:
                failures.append(error)
            failures += await self._adapters.refill(adapters, meanwhile)
        if failures:
            raise failures[0]

    def version_of(self, release: Release) -> str:
        if release.kind in ("lora", "checkpoint"):
            return weight_version(release.scenario, release.release_id)
        return self._base_label

    def servable(self, release: Release) -> bool:
        if self._beside(release):
            return self.version_of(release) in self._adapters
        if release.kind in ("checkpoint", "base", "lora"):
            return self._full.label == self.version_of(release)
        return True

    async def info(self) -> Mapping[str, Any]:
        """Facts for status pages: no keys, nothing that was not chosen here."""
        model = await self.client.model_info()
        server = await self.client.server_info()
        states = server.get("internal_states") or [{}]
        return {
            "url": self.client.base_url,
            "engine": server.get("engine", "sglang"),
            "version": server.get("version"),
            "model_path": model["model_path"],
            "served_model_name": model.get("served_model_name"),
            "weight_version": model["weight_version"],
            "adapters": self._adapters.labels,
            "pushing": not self._open.is_set(),
            "context_length": server.get("context_length"),
            "batch_invariant": server.get("batch_invariant"),
            "queue": {key: states[0].get(key) for key in ("running", "waiting", "cached_tokens") if key in states[0]},
        }


def _labelled(done: Completion, label: str | None) -> Completion:
    """An adapter's label is the version of its answers; the base label says nothing about them."""
    if label is None or not done.output_ids:
        return done
    return replace(done, spans=(TokenSpan(label, 0, len(done.output_ids)),))
