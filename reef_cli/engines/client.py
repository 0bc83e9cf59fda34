"""Client of SGLang's HTTP contract, for a real SGLang and the embedded engine alike.

Every field whose default matters is sent explicitly: the contract's defaults abort requests, and unknown fields are ignored
without a word. Request ids are fixed-length hex, since aborting matches prefixes. Failures are typed: gone or starting
`EngineUnavailable`, too long `ContextOverflow`, refused `InvalidRequest`, anything else `EngineError`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Unpack, cast

import aiohttp
import orjson

from reef_cli.core.errors import ContextOverflow, EngineError, EngineUnavailable, InvalidRequest, ReefError, UnsupportedArtifact
from reef_cli.core.ports import Completion, Delta, Sampling
from reef_cli.engines.generation import Gathered, Wish, completion, wish_body
from reef_cli.weights import contract
from reef_cli.weights.pickled import payload

Mode = Literal["abort", "retract", "in_place"]
_CONTROL_TIMEOUT_S = 120.0


class EngineClient:
    """One engine at `base_url`. The admin key opens control routes where the engine has one; else the api key does. An engine
    that cannot read our files is sent its adapters (`sends_adapters`)."""

    def __init__(
        self, base_url: str, api_key: str | None = None, admin_api_key: str | None = None, *, sends_adapters: bool = False
    ) -> None:
        self._sends_adapters = sends_adapters
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._admin_key = admin_api_key or api_key
        self._session: aiohttp.ClientSession | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=5)
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Generation

    async def generate(self, input_ids: Sequence[int], sampling: Sampling, **wish: Unpack[Wish]) -> Completion:
        """Tokens in, tokens and log-probs out. Cancelling aborts the request in the engine."""
        body = wish_body(input_ids, sampling, wish, stream=False)
        async with self._aborting(body["rid"]):
            return completion(await self._call("POST", "/generate", body))

    async def stream(self, input_ids: Sequence[int], sampling: Sampling, **wish: Unpack[Wish]) -> AsyncIterator[Delta]:
        """Text as it comes, then the whole completion. Closing the iterator aborts the request in the engine."""
        body = wish_body(input_ids, sampling, wish, stream=True)
        gathered = Gathered()
        async with self._aborting(body["rid"]):
            async for chunk in self._events("/generate", body):
                piece = gathered.add(chunk)
                if gathered.finished:
                    break
                if piece:
                    yield Delta(piece, tokens=gathered.untold())
            else:
                raise EngineError("The engine ended a stream without a finish reason")
        yield Delta(gathered.unsent(), gathered.completion(), gathered.untold())

    @contextlib.asynccontextmanager
    async def _aborting(self, rid: str) -> AsyncIterator[None]:
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            task = asyncio.ensure_future(self._abort_quietly(rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise

    async def _abort_quietly(self, rid: str) -> None:
        # The engine notices the closed connection too; this only makes it sooner.
        with contextlib.suppress(EngineError, EngineUnavailable, InvalidRequest):
            await self.abort(rid)

    # Information

    async def model_info(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], await self._call("GET", "/model_info", timeout_s=10))

    async def server_info(self) -> Mapping[str, Any]:
        """The engine's resolved settings. A real SGLang's hold keys: never show them."""
        return cast(Mapping[str, Any], await self._call("GET", "/server_info", timeout_s=10))

    async def adapters(self) -> list[str]:
        """Names of the loaded LoRA adapters."""
        models = await self._call("GET", "/v1/models", timeout_s=10)
        return [model["id"] for model in models["data"] if model.get("parent")]

    async def open_to_all(self) -> bool:
        """Whether the engine answers without a key."""
        try:
            async with self._open().get(f"{self.base_url}/model_info", timeout=aiohttp.ClientTimeout(total=10)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _gone(self.base_url, "/model_info", error) from error

    # Control

    async def pause(self, mode: Mode) -> None:
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._control("/continue_generation", {"torch_empty_cache": False})

    async def flush(self, timeout_s: float = 30.0) -> None:
        """Forget cached prefixes; waits up to `timeout_s` for running requests, then raises `EngineError`."""
        try:
            await self._call("POST", f"/flush_cache?timeout={timeout_s}", {}, admin=True, timeout_s=timeout_s + 10)
        except InvalidRequest as error:
            raise EngineError("The engine did not flush its cache", why=error.message) from error

    async def abort(self, rid: str) -> None:
        await self._call("POST", "/abort_request", {"rid": rid, "abort_all": False}, admin=True, timeout_s=10)

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load an adapter folder under a name never used before; raises `EngineError`, also when the name is taken."""
        if self._sends_adapters:
            ranks = int((await self.server_info()).get("tp_size") or 1)
            body = await asyncio.to_thread(_adapter_body, name, directory, ranks)
            await self._control("/load_lora_adapter_from_tensors", body)
            return
        await self._control("/load_lora_adapter", {"lora_name": name, "lora_path": str(directory), "pinned": False})

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter once nobody uses it; never call this while paused."""
        await self._control("/unload_lora_adapter", {"lora_name": name}, timeout_s=None)

    async def init_group(
        self, address: str, port: int, world_size: int, name: str, backend: str, rank_offset: int = 1, timeout_s: float = 60.0
    ) -> None:
        """Make the engine join a group; blocks until rank 0 is there too, so call it beside `weights.make_group`."""
        body = contract.join_group(address, port, world_size, name, backend, rank_offset)
        await self._control("/init_weights_update_group", body, timeout_s)

    async def destroy_group(self, name: str) -> None:
        await self._control("/destroy_weights_update_group", contract.leave_group(name))

    async def begin_update(self) -> None:
        await self._control("/begin_weight_update", contract.BEGIN)

    async def update(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        *,
        flattened: bool = True,
        timeout_s: float = _CONTROL_TIMEOUT_S,
    ) -> None:
        """Make the engine receive one bucket; the trainer broadcasts it meanwhile. The cache is not flushed."""
        body = contract.receive(names, dtypes, shapes, group, flattened=flattened)
        await self._control("/update_weights_from_distributed", body, timeout_s)

    async def end_update(self) -> None:
        await self._control("/end_weight_update", contract.END)

    async def update_from_disk(self, directory: Path, version: str, timeout_s: float = 600.0) -> None:
        """Swap in a checkpoint folder's weights; the engine keeps the old ones when that fails."""
        await self._control("/update_weights_from_disk", contract.read_disk(str(directory), version), timeout_s)

    async def release_memory(self) -> None:
        """Let go of weights and cache, which an engine with a memory saver keeps elsewhere meanwhile; it must be paused."""
        await self._control("/release_memory_occupation", contract.MEMORY)

    async def resume_memory(self) -> None:
        """Take them back, with the weights as they were."""
        await self._control("/resume_memory_occupation", contract.MEMORY)

    async def set_version(self, version: str) -> None:
        await self._control("/update_weight_version", contract.label(version))

    async def checksum(self) -> str:
        """One digest over the engine's weights."""
        reply = await self._control("/weights_checker", {"action": "checksum", "selector": "all"})
        return str(reply["per_engine_checksum"])

    # HTTP

    async def _control(self, path: str, body: Mapping[str, Any], timeout_s: float | None = _CONTROL_TIMEOUT_S) -> Any:
        """A control call; its refusal is an `EngineError`, whoever asked did nothing wrong."""
        try:
            reply = await self._call("POST", path, body, admin=True, timeout_s=timeout_s)
        except InvalidRequest as error:
            raise EngineError(f"The engine refused {path}", why=error.message) from error
        if isinstance(reply, Mapping) and reply.get("success") is False:
            raise EngineError(f"The engine refused {path}", why=str(reply.get("message") or reply.get("error_message")))
        return reply

    async def _call(
        self, method: str, path: str, body: Any = None, *, admin: bool = False, timeout_s: float | None = None
    ) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5)
        try:
            async with self._open().request(
                method, self.base_url + path, data=_dump(body), headers=self._headers(admin), timeout=limit
            ) as response:
                raw = await response.read()
                if response.status != 200:
                    _refuse(response.status, raw)
                return orjson.loads(raw) if response.content_type == "application/json" and raw else raw.decode()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _gone(self.base_url, path, error) from error

    async def _events(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        limit = aiohttp.ClientTimeout(total=None, sock_connect=5)
        try:
            async with self._open().post(
                self.base_url + path, data=_dump(body), headers=self._headers(False), timeout=limit, read_bufsize=1 << 22
            ) as response:
                if response.status != 200:
                    _refuse(response.status, await response.read())
                async for line in response.content:
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                        chunk = orjson.loads(line[6:])
                        if "error" in chunk:
                            _refuse(int(chunk["error"].get("code") or 500), line[6:])
                        yield chunk
        except ReefError:
            raise
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _gone(self.base_url, path, error) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def _headers(self, admin: bool) -> dict[str, str]:
        key = self._admin_key if admin else self._api_key
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": f"Bearer {key}"} if key else headers


def _adapter_body(name: str, directory: Path, ranks: int) -> Mapping[str, Any]:
    """An adapter's folder as a request. Raises `UnsupportedArtifact`."""
    try:
        config = orjson.loads((directory / "adapter_config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UnsupportedArtifact(f"{directory} has no readable adapter_config.json", why=str(error)) from error
    return contract.take_adapter(name, config, [payload(directory)] * ranks)


def _dump(body: Any) -> bytes | None:
    return None if body is None else orjson.dumps(body)


def _refuse(status: int, raw: bytes) -> NoReturn:
    text = _message(raw)
    if status == 503:
        raise EngineUnavailable("The engine is temporarily unavailable", why=text)
    if status != 400:
        raise EngineError(f"The engine answered {status}", why=text)
    if "context length" in text:
        raise ContextOverflow(text)
    raise InvalidRequest(text)


def _message(raw: bytes) -> str:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode(errors="replace")[:500]
    found = body.get("error") or body.get("message") or body.get("error_message") or body
    return str(found.get("message", found) if isinstance(found, dict) else found)


def _gone(url: str, path: str, error: Exception) -> EngineUnavailable:
    if isinstance(error, TimeoutError):
        return EngineUnavailable(f"The engine at {url} did not answer {path} in time and is temporarily unavailable")
    return EngineUnavailable(f"The engine at {url} is temporarily unavailable", why=f"{path}: {error or type(error).__name__}")
