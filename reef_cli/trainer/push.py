"""Rank 0's side of a weight push: an artifact's weights into a running engine through a process group.

Promises: what is sent is what lies on disk (full weights, or base weights with the adapter merged in fp32), so a push after a
rollback or a restart needs no trainer state; each phase has a time limit; a failure says whether the engine may hold a mixture
(`dirty`), because then nothing must be generated until a full push or a reload succeeded. Admission, pause and continue belong
to the caller. SGLang's session rule is kept: begin, buckets, end.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
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
from reef_cli.trainer.weightfiles import is_adapter, merged_weights, whole_weights
from reef_cli.weights.buckets import Bucket, pack
from reef_cli.weights.group import close_group, free_port, make_group

BUCKET_BYTES = 256 * 1024 * 1024
INIT_S = 60.0
CONTROL_S = 60.0
FLUSH_S = 30.0
SLOWEST_BYTES_PER_S = 100e6


@dataclass(slots=True)
class _Link:
    """A live group with one engine."""

    url: str
    key: str | None
    name: str
    group: Any


@dataclass(slots=True)
class _Receipt:
    """What a push did so far."""

    phases: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    buckets: int = 0
    tensors: int = 0
    dirty: bool = False


class Pusher:
    """Keeps the group with an engine for as long as pushes succeed; any error ends it, the next push makes a new one."""

    def __init__(
        self, model_dir: Path, device: torch.device, tick: Callable[[str, int, int], None] = lambda _p, _d, _t: None
    ) -> None:
        self._model_dir, self._device, self._tick = model_dir, device, tick
        self._link: _Link | None = None

    def push(self, command: Push) -> Mapping[str, Any]:
        """Send and label. Returns phase seconds, bytes, buckets. Raises `EngineError` with `dirty` and `phase` in details."""
        http = EngineHttp(command.engine_url, command.engine_key, command.engine_read_key)
        directory = Path(command.directory)
        reused = self._link is not None and self._link.url == command.engine_url
        try:
            return self._attempt(http, command, directory)
        except EngineError as error:
            # An engine restarted since the last push does not know the group any more: one new group, unless weights changed.
            if not reused or error.details.get("dirty"):
                raise
            return self._attempt(http, command, directory)

    def close(self) -> None:
        """Leave the group; the engine is told, if it still listens."""
        if self._link is None:
            return
        link, self._link = self._link, None
        with suppress(EngineError):  # a dead engine has left the group already
            EngineHttp(link.url, link.key).post("/destroy_weights_update_group", {"group_name": link.name}, 5.0)
        close_group(link.group)

    def _attempt(self, http: EngineHttp, command: Push, directory: Path) -> Mapping[str, Any]:
        receipt = _Receipt()
        phase = "init"
        try:
            with _timed(receipt, "init_seconds"):
                link = self._join(http)
            phase = "begin"
            with _timed(receipt, "begin_seconds"):
                http.post("/begin_weight_update", {}, CONTROL_S)
            phase = "send"
            with _timed(receipt, "send_seconds"):
                self._send(http, link, directory, receipt)
            phase = "end"
            with _timed(receipt, "end_seconds"):
                http.post("/end_weight_update", {}, CONTROL_S)
            phase = "flush"
            with _timed(receipt, "flush_seconds"):
                http.post(f"/flush_cache?timeout={FLUSH_S:g}", {}, FLUSH_S + 5)
            phase = "label"
            with _timed(receipt, "label_seconds"):
                body = {"new_version": command.version, "abort_all_requests": False}
                http.post("/update_weight_version", body, CONTROL_S)
        except (ReefError, RuntimeError, OSError) as error:
            self._abandon(http, opened=phase in ("send", "end"))
            message = error.message if isinstance(error, ReefError) else f"The weight push failed: {error}"
            raise EngineError(
                message,
                why=f"in phase {phase}",
                hint="push all weights again before serving" if receipt.dirty else "the engine still runs its old weights",
                dirty=receipt.dirty,
                phase=phase,
            ) from error
        return {**receipt.phases, "bytes": receipt.nbytes, "buckets": receipt.buckets, "tensors": receipt.tensors}

    # -- group -------------------------------------------------------------------------------------------------------------

    def _join(self, http: EngineHttp) -> _Link:
        if self._link is not None and self._link.url == http.url:
            return self._link
        self.close()
        self._tick("push: join", 0, 1)
        world = 1 + _tensor_parallel(http)
        port, name = free_port(), f"reef-{new_id()}"
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        body = {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world,
            "group_name": name, "backend": backend,
        }  # fmt: skip
        answer = _in_thread(lambda: http.post("/init_weights_update_group", body, INIT_S))
        group = make_group("127.0.0.1", port, world, 0, name, backend, INIT_S)
        try:
            answer.result(INIT_S)
        except Exception:
            close_group(group)
            raise
        self._link = _Link(http.url, http.key, name, group)
        return self._link

    def _abandon(self, http: EngineHttp, opened: bool) -> None:
        """After an error the group's state is unknown on both sides: close the session if one is open, and leave."""
        if opened:
            with suppress(EngineError):  # the engine closed it itself or is gone; the next push finds out
                http.post("/end_weight_update", {}, 10.0)
        self.close()

    # -- buckets -----------------------------------------------------------------------------------------------------------

    def _send(self, http: EngineHttp, link: _Link, directory: Path, receipt: _Receipt) -> None:
        for bucket in pack(self._weights(directory), BUCKET_BYTES):
            self._tick("push: send", receipt.buckets, receipt.buckets + 1)
            self._send_bucket(http, link, bucket, receipt)
            receipt.nbytes += bucket.nbytes
            receipt.buckets += 1
            receipt.tensors += len(bucket.names)

    def _weights(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self._model_dir, directory) if is_adapter(directory) else whole_weights(directory)

    def _send_bucket(self, http: EngineHttp, link: _Link, bucket: Bucket, receipt: _Receipt) -> None:
        limit = max(30.0, bucket.nbytes / SLOWEST_BYTES_PER_S)
        body = {
            "names": list(bucket.names), "dtypes": list(bucket.dtypes), "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": link.name, "load_format": "flattened_bucket", "flush_cache": False, "abort_all_requests": False,
        }  # fmt: skip
        answer = _in_thread(lambda: http.post("/update_weights_from_distributed", body, limit))
        work = dist.broadcast(bucket.flat.to(self._device), group=link.group, group_src=0, async_op=True)
        _wait(work, answer, limit)
        # An engine applies a bucket when it has all of it; from here on it may hold part of the new weights.
        receipt.dirty = True
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        answer.result(limit)


def _wait(work: Any, answer: "Future[Any]", limit: float) -> None:
    """Until the broadcast is over; an engine that refuses meanwhile will never take part, so its answer ends the wait."""
    deadline = time.monotonic() + limit
    while not work.is_completed():
        if answer.done() and answer.exception() is not None:
            answer.result()
        if time.monotonic() > deadline:
            raise EngineError(f"The engine took no weights for {limit:.0f} s")
        time.sleep(0.001)
    work.wait(timedelta(seconds=1))


def _tensor_parallel(http: EngineHttp) -> int:
    info = http.get("/server_info", CONTROL_S)
    return int(info.get("tp_size") or 1)


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


@contextmanager
def _timed(receipt: _Receipt, name: str) -> Iterator[None]:
    """Note the block's seconds in the receipt, also when it fails."""
    start = time.monotonic()
    try:
        yield
    finally:
        receipt.phases[name] = time.monotonic() - start
