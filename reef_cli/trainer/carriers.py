"""How buckets of weights get from the trainer's rank 0 into engines: through a process group, or as memory both can reach.

A carrier is opened before each push, carries buckets inside the engines' update session, and is closed after any error, since
the state of both sides is unknown then. Knows neither which weights are sent nor what is asked of the engines before and after.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from reef_cli.core.errors import EngineError
from reef_cli.core.ids import new_id
from reef_cli.trainer.calls import Engines, start_all
from reef_cli.trainer.http import EngineHttp
from reef_cli.weights import contract
from reef_cli.weights.buckets import Bucket, unpack
from reef_cli.weights.group import close_group, listen, make_group, own_address
from reef_cli.weights.handles import serialize

INIT_S = 60.0
CONTROL_S = 60.0
SLOWEST_BYTES_PER_S = 100e6


class Carrier(Protocol):
    """Brings buckets to all engines, each of which loads what it got."""

    def knows(self, engines: Engines) -> bool:
        """Whether it is open to these engines already."""

    def open(self, engines: Engines) -> None: ...

    def send(self, engines: Engines, bucket: Bucket, applied: Callable[[], None]) -> None:
        """Returns when every engine has loaded the bucket; calls `applied` before one may have. Raises `EngineError`."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Link:
    """A live group with the engines."""

    urls: tuple[str, ...]
    key: str | None
    name: str
    group: Any
    device: torch.device


class GroupCarrier:
    """Broadcasts over a group of the trainer and all ranks of all engines: NCCL between GPUs, gloo where one side has none.

    The group is kept for as long as pushes succeed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._link: _Link | None = None

    def knows(self, engines: Engines) -> bool:
        return self._link is not None and self._link.urls == _urls(engines)

    def open(self, engines: Engines) -> None:
        if self.knows(engines):
            return
        self.close()
        urls = _urls(engines)
        sizes = [tensor_parallel(engine) for engine in engines]
        world, name = 1 + sum(sizes), f"reef-{new_id()}"
        device = torch.device("cpu") if any(map(_on_cpu, engines)) else self._device
        address, backend = own_address(urls[0]), "nccl" if device.type == "cuda" else "gloo"
        store = listen(address, world, INIT_S)  # before any engine is told, so that none waits for nobody
        offsets = [1 + sum(sizes[:number]) for number in range(len(sizes))]
        bodies = [contract.join_group(address, store.port, world, name, backend, offset) for offset in offsets]
        answers = start_all(engines, "/init_weights_update_group", bodies, INIT_S)
        group = make_group(address, store.port, world, 0, name, backend, INIT_S, store)
        try:
            for answer in answers:
                answer.result(INIT_S)
        except Exception:
            close_group(group)
            raise
        self._link = _Link(urls, engines[0].key, name, group, device)

    def send(self, engines: Engines, bucket: Bucket, applied: Callable[[], None]) -> None:
        assert self._link is not None
        limit = patience(bucket.nbytes)
        body = contract.receive(bucket.names, bucket.dtypes, bucket.shapes, self._link.name)
        answers = start_all(engines, "/update_weights_from_distributed", body, limit)
        if len(engines) > 1:
            applied()  # one may have all of it before another refuses
        work = dist.broadcast(bucket.flat.to(self._link.device), group=self._link.group, group_src=0, async_op=True)
        _wait(work, engines, answers, limit)
        applied()  # an engine loads a bucket when it has all of it
        if self._link.device.type == "cuda":
            torch.cuda.synchronize()
        for answer in answers:
            answer.result(limit)

    def close(self) -> None:
        """Leave the group; the engines are told, if they still listen."""
        if self._link is None:
            return
        link, self._link = self._link, None
        for url in link.urls:
            with suppress(EngineError):  # a dead engine has left the group already
                EngineHttp(url, link.key).post("/destroy_weights_update_group", contract.leave_group(link.name), 5.0)
        close_group(link.group)


class HandleCarrier:
    """Gives the engine handles of the trainer's own GPU memory (CUDA IPC), for the two on one GPU; on a CPU, the bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def knows(self, engines: Engines) -> bool:  # noqa: ARG002 - there is nothing to open
        return True

    def open(self, engines: Engines) -> None:
        for engine in engines if self._device.type == "cuda" else ():
            if tensor_parallel(engine) != 1:
                raise EngineError(
                    f"The engine at {engine.url} is spread over several GPUs, and a trainer shares one",
                    hint="trainer.transport: group",
                )

    def send(self, engines: Engines, bucket: Bucket, applied: Callable[[], None]) -> None:
        placed = Bucket(bucket.names, bucket.dtypes, bucket.shapes, bucket.flat.to(self._device))
        applied()
        send_tensors(engines, list(unpack(placed)), None)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """There is nothing to leave."""


def send_tensors(engines: Engines, named: Sequence[tuple[str, Tensor]], load_format: str | None) -> None:
    """Named tensors in the body of a call, or handles of them; returns when every engine has loaded them."""
    payload, size = serialize(named), sum(tensor.numel() * tensor.element_size() for _, tensor in named)
    bodies = [contract.take_tensors([payload] * tensor_parallel(engine), load_format) for engine in engines]
    answers = start_all(engines, "/update_weights_from_tensor", bodies, patience(size))
    faults = [fault for answer in answers if (fault := answer.exception(patience(size) + 5)) is not None]
    if faults:
        raise faults[0]


def tensor_parallel(engine: EngineHttp) -> int:
    """Ranks an engine is spread over; asked once per engine."""
    if engine.ranks is None:
        engine.ranks = int(engine.get("/server_info", CONTROL_S).get("tp_size") or 1)
    return engine.ranks


def _on_cpu(engine: EngineHttp) -> bool:
    """Whether it runs without a GPU: the embedded engine always does."""
    info = engine.get("/server_info", CONTROL_S)
    return info.get("engine") == "embedded" or info.get("device") == "cpu"


def patience(size: int) -> float:
    """Seconds that loading so many bytes may take."""
    return max(30.0, size / SLOWEST_BYTES_PER_S)


def _urls(engines: Engines) -> tuple[str, ...]:
    return tuple(engine.url for engine in engines)


def _wait(work: Any, engines: Engines, answers: "Sequence[Future[Any]]", limit: float) -> None:
    """Until the broadcast is over; an engine that refuses meanwhile will never take part, so its answer ends the wait."""
    deadline = time.monotonic() + limit
    while not work.is_completed():
        for answer in answers:
            if answer.done() and answer.exception() is not None:
                answer.result()
        if time.monotonic() > deadline:
            silent = [engine.url for engine, answer in zip(engines, answers, strict=True) if not answer.done()]
            who = " and ".join(silent or (engine.url for engine in engines))
            raise EngineError(f"The engine at {who} took no weights for {limit:.0f} s")
        time.sleep(0.001)
    work.wait(timedelta(seconds=1))
