"""Rank 0's side of a weight push: an artifact's weights into running engines, through a carrier or from disk.

Promises: what is sent is what lies on disk (full weights, or base weights with the adapter merged in fp32), so a push after a
rollback or a restart needs no trainer state. What the engines are known to have already is not sent again, but only after each
of them said that it runs those weights (`Push.held`); with `delta`, of tensors that changed little only the changed values.
Each phase has a time limit; several engines get the same bytes at once, carry the label `PARTIAL` meanwhile, and the new one
only when all have all; a failure says which engine, which phase and whether engines may hold a mixture (`dirty`), because then
nothing must be generated until a full push or a reload succeeded. Admission, pause and continue belong to the caller, and the
engines are paused: a paused SGLang flushes at once or, asked to wait for it, never. Its session rule is kept: begin, buckets,
end.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from reef_cli.core.errors import EngineError, ReefError
from reef_cli.trainer.calls import Engines, ask_all
from reef_cli.trainer.carriers import CONTROL_S, Carrier, GroupCarrier, HandleCarrier, send_tensors
from reef_cli.trainer.http import EngineHttp
from reef_cli.trainer.protocol import Push
from reef_cli.trainer.weightfiles import Weights, is_adapter, save_merged
from reef_cli.weights import contract
from reef_cli.weights.buckets import Bucket, pack
from reef_cli.weights.plugin import reef_delta

FLUSH_S = 30.0
DISK_S = 600.0
MIB = 1024 * 1024
T = TypeVar("T")
Changes = list[tuple[str, torch.Size, Tensor, Tensor]]


@dataclass(slots=True)
class _Receipt:
    """What a push did so far."""

    phase: str = "init"
    phases: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    buckets: int = 0
    tensors: int = 0
    known: bool = False
    dirty: bool = False
    labels: list[str] = field(default_factory=list)
    """What the engines ran before."""

    marked: bool = False
    """Whether they carry `PARTIAL` now."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Note the block's seconds, also when it fails."""
        self.phase = phase
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[f"{phase}_seconds"] = time.monotonic() - start


class Pusher:
    """Keeps a carrier open for as long as pushes succeed; any error closes it, the next push opens it again."""

    def __init__(
        self,
        model_dir: Path,
        device: torch.device,
        tick: Callable[[str, int, int], None] = lambda _p, _d, _t: None,
        bucket_bytes: int = 64 * MIB,
    ) -> None:
        self._model_dir, self._tick, self._bucket_bytes = model_dir, tick, bucket_bytes
        self._carriers: Mapping[str, Carrier] = {"group": GroupCarrier(device), "ipc": HandleCarrier(device)}

    def push(self, command: Push) -> Mapping[str, Any]:
        """Send and label. Returns phase seconds, bytes, buckets. Raises `EngineError` with `dirty` and `phase` in details."""
        urls = (command.engine_url, *command.others)
        engines = [EngineHttp(url, command.engine_key, command.engine_read_key) for url in urls]
        directory = Path(command.directory)
        if command.transport == "disk":
            return self._attempt(engines, command, None, lambda receipt: self._by_disk(engines, command, directory, receipt))
        carrier = self._carriers[command.transport]
        reused = carrier.knows(engines)

        def attempt() -> Mapping[str, Any]:
            return self._attempt(engines, command, carrier, lambda receipt: self._carry(engines, command, carrier, receipt))

        try:
            return attempt()
        except EngineError as error:
            # An engine restarted since the last push does not know the group any more: one new group, unless weights changed.
            if not reused or error.details.get("dirty"):
                raise
            return attempt()

    def close(self) -> None:
        """Leave what was opened."""
        for carrier in self._carriers.values():
            carrier.close()

    def _attempt(
        self, engines: Engines, command: Push, carrier: Carrier | None, work: Callable[[_Receipt], None]
    ) -> Mapping[str, Any]:
        receipt = _Receipt()
        try:
            work(receipt)
        except (ReefError, RuntimeError, OSError) as error:
            self._abandon(engines, carrier, receipt)
            message = error.message if isinstance(error, ReefError) else f"The weight push failed: {error}"
            why = f"{error.why}, " if isinstance(error, ReefError) and error.why else ""
            raise EngineError(
                message,
                why=f"{why}in phase {receipt.phase} of {command.version}",
                hint="push all weights again before serving" if receipt.dirty else "the engine still runs its old weights",
                dirty=receipt.dirty,
                phase=receipt.phase,
            ) from error
        counts = {"bytes": receipt.nbytes, "buckets": receipt.buckets, "tensors": receipt.tensors, "held": receipt.known}
        return {**receipt.phases, **counts}

    # -- through a carrier ---------------------------------------------------------------------------------------------

    def _carry(self, engines: Engines, command: Push, carrier: Carrier, receipt: _Receipt) -> None:
        with receipt.timed("init"):
            self._tick("push: join", 0, 1)
            carrier.open(engines)
        with receipt.timed("check"):
            new, held = self._compared(engines, command, receipt)
        with receipt.timed("begin"):
            ask_all(engines, "/begin_weight_update", contract.BEGIN, CONTROL_S)
            receipt.marked = True
            ask_all(engines, "/update_weight_version", contract.label(contract.PARTIAL), CONTROL_S)
        with receipt.timed("send"):
            changes: Changes = []
            spare = changes if command.delta and _take_changes(engines) else None
            for bucket in _ahead(pack(self._tensors(new, held, command.delta, spare), self._bucket_bytes)):
                self._tick("push: send", receipt.buckets, receipt.buckets + 1)
                self._send(engines, carrier, bucket, receipt)
            self._send_changes(engines, changes, receipt)
        with receipt.timed("end"):
            ask_all(engines, "/end_weight_update", contract.END, CONTROL_S)
        with receipt.timed("flush"):
            ask_all(engines, "/flush_cache?timeout=0", {}, FLUSH_S)
        with receipt.timed("label"):
            ask_all(engines, "/update_weight_version", contract.label(command.version), CONTROL_S)

    def _compared(self, engines: Engines, command: Push, receipt: _Receipt) -> tuple[Weights, Weights | None]:
        """The weights to bring, and those the engines have for sure; None where one runs others than it should."""
        new = Weights.of(self._model_dir, Path(command.directory))
        receipt.labels = [str(engine.get("/model_info", CONTROL_S)["weight_version"]) for engine in engines]
        receipt.known = set(receipt.labels) == {command.held}
        if not receipt.known:
            return new, None
        return new, Weights.of(self._model_dir, None if command.held_directory is None else Path(command.held_directory))

    def _tensors(
        self, new: Weights, held: Weights | None, delta: bool, changes: Changes | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensors to send whole; with `delta` not what is equal, and what changed in part is put into `changes` instead."""
        for name in new.beyond(held):
            tensor = new[name]
            if held is not None and delta and name in held.index:
                old = held[name]
                if torch.equal(tensor, old):
                    continue
                if changes is not None and (part := reef_delta.difference(tensor, old)) is not None:
                    changes.append((name, tensor.shape, *part))
                    continue
            yield name, tensor

    def _send(self, engines: Engines, carrier: Carrier, bucket: Bucket, receipt: _Receipt) -> None:
        def applied() -> None:
            receipt.dirty = True

        carrier.send(engines, bucket, applied)
        receipt.nbytes += bucket.nbytes
        receipt.buckets += 1
        receipt.tensors += len(bucket.names)

    def _send_changes(self, engines: Engines, changes: Changes, receipt: _Receipt) -> None:
        """Changed values, in the bodies of calls of at most a bucket each."""
        while changes:
            size, part = 0, Changes()
            while changes and (not part or size < self._bucket_bytes):
                part.append(changes.pop(0))
                size += sum(tensor.numel() * tensor.element_size() for tensor in part[-1][2:])
            receipt.dirty = True
            send_tensors(engines, reef_delta.pack(part), contract.CHANGES)
            receipt.nbytes += size
            receipt.buckets += 1
            receipt.tensors += len(part)

    def _abandon(self, engines: Engines, carrier: Carrier | None, receipt: _Receipt) -> None:
        """After an error both sides' state is unknown: close the session if one is open, leave, and give old labels back."""
        for engine in engines if receipt.phase in ("begin", "send", "end") else ():
            with suppress(EngineError):  # the engine closed it itself or is gone; the next push finds out
                engine.post("/end_weight_update", contract.END, 10.0)
        if carrier is not None:
            carrier.close()
        for engine, label in zip(engines, receipt.labels, strict=True) if receipt.marked and not receipt.dirty else ():
            try:
                engine.post("/update_weight_version", contract.label(label), 10.0)
            except EngineError:
                receipt.dirty = True  # it has the old weights, but does not say so

    # -- from disk -----------------------------------------------------------------------------------------------------

    def _by_disk(self, engines: Engines, command: Push, directory: Path, receipt: _Receipt) -> None:
        """The engines read a whole checkpoint themselves, from a place they can see too; each takes all of it or nothing."""
        self.close()
        whole = directory
        if is_adapter(directory):
            whole = directory.with_name(f"{directory.name}.merged")
            with receipt.timed("merge"):
                self._tick("push: merge", 0, 1)
                save_merged(self._model_dir, directory, whole)
        try:
            with receipt.timed("read"):
                self._tick("push: read", 0, 1)
                for number, engine in enumerate(engines):
                    receipt.dirty = number > 0  # the engines before it have the new weights
                    engine.post("/update_weights_from_disk", contract.read_disk(str(whole), command.version), DISK_S)
            receipt.nbytes = sum(file.stat().st_size for file in whole.glob("*.safetensors"))
        finally:
            if whole != directory:
                shutil.rmtree(whole, ignore_errors=True)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made while the one before it is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="pack") as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


def _take_changes(engines: Engines) -> bool:
    """Whether all engines were started with the loader for changed values."""
    infos = [engine.get("/server_info", CONTROL_S) for engine in engines]
    return all(contract.CHANGES in (info.get("custom_weight_loader") or ()) for info in infos)
