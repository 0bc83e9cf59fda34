"""Weight updates: groups with trainers, update sessions, checkpoints from disk, version labels.

Tensors are received into a staging buffer in a thread of its own, so a silent trainer never stops generation; only the copy
into the weights runs in the torch thread. Outside a pause that copy first lets the running requests end. A bucket is checked
whole before its first tensor is copied. The version label moves only after success.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from reef_cli.core.errors import ConflictError, EngineError, InvalidRequest, ReefError
from reef_cli.engines.embedded.engine import Engine
from reef_cli.weights import contract
from reef_cli.weights.buckets import empty, unpack
from reef_cli.weights.group import ProcessGroup, close_group, make_group
from reef_cli.weights.handles import deserialize
from reef_cli.weights.plugin import reef_delta


class Updates:
    """Update state of one engine. Methods return the message of a success and raise a `ReefError` for a failure."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._groups: dict[str, ProcessGroup] = {}
        self._open = False
        self._lock = asyncio.Lock()

    async def init_group(self, body: Mapping[str, Any]) -> str:
        name = str(body.get("group_name", "weight_update_group"))
        async with self._lock:
            if name in self._groups:
                raise ConflictError(f"Process group {name} has already been created.")
            self._groups[name] = await asyncio.to_thread(
                make_group,
                str(body["master_address"]),
                int(body["master_port"]),
                int(body["world_size"]),
                int(body["rank_offset"]),
                name,
                str(body.get("backend", "nccl")),
                self._timeout_s,
            )
        return f"Succeeded to initialize custom process group {name}."

    async def destroy_group(self, name: str) -> str:
        async with self._lock:
            group = self._groups.pop(name, None)
            if group is None:
                raise InvalidRequest(f"The group {name} to be destroyed does not exist.")
            await asyncio.to_thread(close_group, group)
        return f"Succeeded to destroy custom process group {name}."

    async def begin(self) -> str:
        async with self._lock:
            if self._open:
                raise ConflictError("A weight update session is already open.")
            await self._engine.call(lambda: None, alone=True)
            self._open = True
        return "Weight update session opened."

    async def end(self) -> str:
        async with self._lock:
            if not self._open:
                raise ConflictError("No weight update session is open.")
            await self._engine.call(lambda: None, alone=True)
            self._open = False
        return "Weight update session closed."

    async def from_distributed(self, body: Mapping[str, Any]) -> str:
        async with self._lock:
            self._require_session()
            group = self._groups.get(str(body.get("group_name", "weight_update_group")))
            if group is None:
                raise InvalidRequest("The weight update group does not exist; call init_weights_update_group first.")
            return await self._take(body, lambda: _receive(body, group))

    async def from_tensor(self, body: Mapping[str, Any]) -> str:
        async with self._lock:
            self._require_session()
            (payload,) = body["serialized_named_tensors"]
            layout = body.get("load_format")
            if layout not in (None, contract.CHANGES):
                raise InvalidRequest(f"load_format {layout!r} is not supported; use {contract.CHANGES} or none")
            return await self._take(body, lambda: deserialize(payload), changes=layout is not None)

    def _require_session(self) -> None:
        if not self._open:
            raise ConflictError("No weight update session is open; call begin_weight_update first.")

    async def _take(self, body: Mapping[str, Any], read: Callable[[], list[tuple[str, Tensor]]], changes: bool = False) -> str:
        if body.get("abort_all_requests", False):
            await self._engine.abort("", everything=True)
        try:
            named = await asyncio.to_thread(read)
            if changes:
                spread = list(reef_delta.unpack(named))
                await self._engine.call(lambda: reef_delta.keeping(lambda: self._assign(spread)), alone=True)
            else:
                await self._engine.call(lambda: self._assign(named), alone=True)
        except (ReefError, RuntimeError, KeyError, ValueError, TypeError) as error:
            raise EngineError(
                f"Failed to update parameter online: {error}. The full weights of the model are partially updated. "
                "Please discard the whole weights."
            ) from error
        return await self._settle(body)

    async def from_disk(self, body: Mapping[str, Any]) -> str:
        """All or nothing; needs no session."""
        path = Path(str(body["model_path"]))
        async with self._lock:
            if body.get("abort_all_requests", False):
                await self._engine.abort("", everything=True)
            model, core = self._engine.model, self._engine.core
            files = await asyncio.to_thread(model.read_folder, path)

            def swap() -> None:
                model.assign(files)
                core.weights_changed()

            await self._engine.call(swap, alone=True)
            return await self._settle(body)

    async def set_version(self, version: str, abort_all: bool) -> str:
        if abort_all:
            await self._engine.abort("", everything=True)
        await self._engine.call(lambda: self._label(version))
        return f"Weight version updated to {version}"

    def _assign(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._engine.model.assign(named)
        self._engine.core.weights_changed()

    def _label(self, version: str) -> None:
        self._engine.core.version = version

    async def _settle(self, body: Mapping[str, Any]) -> str:
        core = self._engine.core
        if body.get("flush_cache", True) and not await self._engine.call(core.flush, alone=True):
            raise EngineError("Weights were updated, but the cache was not flushed")
        version = body.get("weight_version")
        if version is not None:
            await self._engine.call(lambda: self._label(str(version)))
        return "Succeeded to update model weights."


def _receive(body: Mapping[str, Any], group: ProcessGroup) -> list[tuple[str, Tensor]]:
    names, dtypes, shapes = body["names"], body["dtypes"], body["shapes"]
    layout = body.get("load_format")
    if layout == "flattened_bucket":
        bucket = empty(names, dtypes, shapes)
        dist.broadcast(bucket.flat, group_src=0, group=group)
        return list(unpack(bucket))
    if layout is not None:
        raise InvalidRequest(f"load_format {layout!r} is not supported; use flattened_bucket or none")
    received: list[tuple[str, Tensor]] = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        ((_, tensor),) = unpack(empty([name], [dtype], [shape]))
        dist.broadcast(tensor, group_src=0, group=group)
        received.append((name, tensor))
    return received
