"""Process groups that a trainer and an engine form beside whatever default group either already has.

Promises: the group is built exactly as SGLang builds its side (rendezvous -> `PrefixStore(name)` -> helper), so a Reef trainer
can meet a real SGLang or the embedded engine alike. Rank 0 is the trainer; it hosts the store (`listen`) before any engine is
told of it, so that an engine never waits for a trainer that died meanwhile: the closed connection ends its wait. Joining
blocks until every rank is there or `timeout_s` has passed.
Does not know what is sent; callers broadcast with `group_src=0`.
"""

import socket
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

from reef_cli.core.errors import EngineError

ProcessGroup = Any
"""`torch.distributed.ProcessGroup`; torch gives the class no usable static type on every platform."""


def listen(address: str, world_size: int, timeout_s: float = 60.0) -> TCPStore:
    """Rank 0's store, on a port of its own (`.port`), listening when this returns. Raises `EngineError`."""
    try:
        return TCPStore(address, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(f"Cannot listen on {address} for a process group", why=_first_line(error)) from error


def own_address(url: str) -> str:
    """The address of this machine that an engine at `url` reaches it by."""
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; only picks a route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"No route to the engine at {url}", why=str(error)) from error


def make_group(
    address: str,
    port: int,
    world_size: int,
    rank: int,
    name: str,
    backend: str,
    timeout_s: float = 60.0,
    store: TCPStore | None = None,
) -> ProcessGroup:
    """Join group `name` of `world_size` ranks as `rank`; blocks until all are there. Rank 0 brings the `store` it listens with.

    `backend` is `gloo` or `nccl`. NCCL itself is initialised by the first collective only, so a returned group proves
    nothing yet about NCCL: push one tensor before trusting it. Raises `EngineError` on time-out or a taken name.
    """
    if name in _world.pg_names.values():
        raise EngineError(f"Process group {name!r} has already been created here", hint="use a new name per attempt")
    limit = timedelta(seconds=timeout_s)
    url = f"tcp://{_bracketed(address)}:{port}"
    try:
        met = store or next(iter(rendezvous(url, rank, world_size, timeout=limit)))[0]
        met.set_timeout(limit)
        group, _ = _new_process_group_helper(
            world_size, rank, [], Backend(backend), PrefixStore(name, met), group_name=cast(Any, name), timeout=limit
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"Cannot form process group {name!r} at {address}:{port} as rank {rank} of {world_size}",
            why=_first_line(error),
            hint="check that every rank uses the same address, port and name, and that rank 0 listens",
        ) from error
    _world.pg_group_ranks[group] = {position: position for position in range(world_size)}
    return group


def close_group(group: ProcessGroup) -> None:
    """Leave a group made by `make_group`; other groups of this process are untouched. Safe after a peer died."""
    dist.destroy_process_group(group)


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
