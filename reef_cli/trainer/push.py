"""Rank 0's side of a weight push: an artifact's weights into running engines, through a process group or from disk.

Promises: what is sent is what lies on disk (full weights, or base weights with the adapter merged in fp32), so a push after a
rollback or a restart needs no trainer state; each phase has a time limit; several engines get the same bytes in one broadcast
and are labelled only when all have them; a failure says which engine, which phase and whether engines may hold a mixture
(`dirty`), because then nothing must be generated until a full push or a reload succeeded. Admission, pause and continue belong
to the caller, and the engines are paused: a paused SGLang flushes at once or, asked to wait for it, never. Its session rule
is kept: begin, buckets, end.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reef_cli.core.errors import EngineError, ReefError
from reef_cli.core.ids import new_id
from reef_cli.trainer.http import EngineHttp
from reef_cli.trainer.protocol import Push
from reef_cli.trainer.weightfiles import is_adapter, merged_weights, save_merged, whole_weights
from reef_cli.weights import contract
from reef_cli.weights.buckets import Bucket, pack
from reef_cli.weights.group import close_group, listen, make_group, own_address

BUCKET_BYTES = 256 * 1024 * 1024
INIT_S = 60.0
CONTROL_S = 60.0
FLUSH_S = 30.0
DISK_S = 600.0
SLOWEST_BYTES_PER_S = 100e6

Engines = Sequence[EngineHttp]


@dataclass(slots=True)
class _Link:
    """A live group with the engines."""

    urls: tuple[str, ...]
    key: str | None
    name: str
    group: Any


@dataclass(slots=True)
class _Receipt:
    """What a push did so far."""

    phase: str = "init"
    phases: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    buckets: int = 0
    tensors: int = 0
    dirty: bool = False

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
    """Keeps the group with the engines for as long as pushes succeed; any error ends it, the next push makes a new one."""

    def __init__(
        self, model_dir: Path, device: torch.device, tick: Callable[[str, int, int], None] = lambda _p, _d, _t: None
    ) -> None:
        self._model_dir, self._device, self._tick = model_dir, device, tick
        self._link: _Link | None = None

    def push(self, command: Push) -> Mapping[str, Any]:
        """Send and label. Returns phase seconds, bytes, buckets. Raises `EngineError` with `dirty` and `phase` in details."""
        urls = (command.engine_url, *command.others)
        engines = [EngineHttp(url, command.engine_key, command.engine_read_key) for url in urls]
        directory = Path(command.directory)
        if command.transport == "disk":
            return self._attempt(engines, command, lambda receipt: self._by_disk(engines, command, directory, receipt))
        reused = self._link is not None and self._link.urls == urls

        def attempt() -> Mapping[str, Any]:
            return self._attempt(engines, command, lambda receipt: self._by_group(engines, command, directory, receipt))

        try:
            return attempt()
        except EngineError as error:
            # An engine restarted since the last push does not know the group any more: one new group, unless weights changed.
            if not reused or error.details.get("dirty"):
                raise
            return attempt()

    def close(self) -> None:
        """Leave the group; the engines are told, if they still listen."""
        if self._link is None:
            return
        link, self._link = self._link, None
        for url in link.urls:
            with suppress(EngineError):  # a dead engine has left the group already
                EngineHttp(url, link.key).post("/destroy_weights_update_group", contract.leave_group(link.name), 5.0)
        close_group(link.group)

    def _attempt(self, engines: Engines, command: Push, work: Callable[[_Receipt], None]) -> Mapping[str, Any]:
        receipt = _Receipt()
        try:
            work(receipt)
        except (ReefError, RuntimeError, OSError) as error:
            self._abandon(engines, opened=receipt.phase in ("send", "end"))
            message = error.message if isinstance(error, ReefError) else f"The weight push failed: {error}"
            why = f"{error.why}, " if isinstance(error, ReefError) and error.why else ""
            raise EngineError(
                message,
                why=f"{why}in phase {receipt.phase} of {command.version}",
                hint="push all weights again before serving" if receipt.dirty else "the engine still runs its old weights",
                dirty=receipt.dirty,
                phase=receipt.phase,
            ) from error
        return {**receipt.phases, "bytes": receipt.nbytes, "buckets": receipt.buckets, "tensors": receipt.tensors}

    # -- through a process group ---------------------------------------------------------------------------------------

    def _by_group(self, engines: Engines, command: Push, directory: Path, receipt: _Receipt) -> None:
        with receipt.timed("init"):
            link = self._join(engines)
        with receipt.timed("begin"):
            _ask_all(engines, "/begin_weight_update", contract.BEGIN, CONTROL_S)
        with receipt.timed("send"):
            self._send(engines, link, directory, receipt)
        with receipt.timed("end"):
            _ask_all(engines, "/end_weight_update", contract.END, CONTROL_S)
        with receipt.timed("flush"):
            _ask_all(engines, "/flush_cache?timeout=0", {}, FLUSH_S)
        with receipt.timed("label"):
            _ask_all(engines, "/update_weight_version", contract.label(command.version), CONTROL_S)

    def _join(self, engines: Engines) -> _Link:
        urls = tuple(engine.url for engine in engines)
        if self._link is not None and self._link.urls == urls:
            return self._link
        self.close()
        self._tick("push: join", 0, 1)
        sizes = [_tensor_parallel(engine) for engine in engines]
        world, name = 1 + sum(sizes), f"reef-{new_id()}"
        address, backend = own_address(urls[0]), "nccl" if self._device.type == "cuda" else "gloo"
        store = listen(address, world, INIT_S)  # before any engine is told, so that none waits for nobody
        answers, offset = [], 1
        for engine, size in zip(engines, sizes, strict=True):
            body = contract.join_group(address, store.port, world, name, backend, offset)
            answers.append(_in_thread(_post(engine, "/init_weights_update_group", body, INIT_S)))
            offset += size
        group = make_group(address, store.port, world, 0, name, backend, INIT_S, store)
        try:
            for answer in answers:
                answer.result(INIT_S)
        except Exception:
            close_group(group)
            raise
        self._link = _Link(urls, engines[0].key, name, group)
        return self._link

    def _abandon(self, engines: Engines, opened: bool) -> None:
        """After an error the group's state is unknown on both sides: close the session if one is open, and leave."""
        for engine in engines if opened else ():
            with suppress(EngineError):  # the engine closed it itself or is gone; the next push finds out
                engine.post("/end_weight_update", contract.END, 10.0)
        self.close()

    def _send(self, engines: Engines, link: _Link, directory: Path, receipt: _Receipt) -> None:
        for bucket in pack(self._weights(directory), BUCKET_BYTES):
            self._tick("push: send", receipt.buckets, receipt.buckets + 1)
            self._send_bucket(engines, link, bucket, receipt)
            receipt.nbytes += bucket.nbytes
            receipt.buckets += 1
            receipt.tensors += len(bucket.names)

    def _weights(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self._model_dir, directory) if is_adapter(directory) else whole_weights(directory)

    def _send_bucket(self, engines: Engines, link: _Link, bucket: Bucket, receipt: _Receipt) -> None:
        limit = max(30.0, bucket.nbytes / SLOWEST_BYTES_PER_S)
        body = contract.receive(bucket.names, bucket.dtypes, bucket.shapes, link.name)
        answers = [_in_thread(_post(engine, "/update_weights_from_distributed", body, limit)) for engine in engines]
        work = dist.broadcast(bucket.flat.to(self._device), group=link.group, group_src=0, async_op=True)
        _wait(work, answers, limit)
        # An engine applies a bucket when it has all of it; from here on it may hold part of the new weights.
        receipt.dirty = True
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        for answer in answers:
            answer.result(limit)

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


def _wait(work: Any, answers: "Sequence[Future[Any]]", limit: float) -> None:
    """Until the broadcast is over; an engine that refuses meanwhile will never take part, so its answer ends the wait."""
    deadline = time.monotonic() + limit
    while not work.is_completed():
        for answer in answers:
            if answer.done() and answer.exception() is not None:
                answer.result()
        if time.monotonic() > deadline:
            raise EngineError(f"The engine took no weights for {limit:.0f} s")
        time.sleep(0.001)
    work.wait(timedelta(seconds=1))


def _tensor_parallel(http: EngineHttp) -> int:
    info = http.get("/server_info", CONTROL_S)
    return int(info.get("tp_size") or 1)


def _post(engine: EngineHttp, path: str, body: Mapping[str, Any], limit: float) -> Callable[[], Any]:
    """A call that says which engine failed."""

    def call() -> Any:
        try:
            return engine.post(path, body, limit)
        except EngineError as error:
            error.details["engine"] = engine.url
            error.message = f"{error.message} ({engine.url})"
            raise

    return call


def _ask_all(engines: Engines, path: str, body: Mapping[str, Any], limit: float) -> None:
    """The same call to every engine at once; raises the first failure after all have answered."""
    answers = [_in_thread(_post(engine, path, body, limit)) for engine in engines]
    faults = [fault for answer in answers if (fault := answer.exception(limit + 5)) is not None]
    if faults:
        raise faults[0]


def _in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """Run a blocking call beside the collective it must meet."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="engine-call").start()
    return future
