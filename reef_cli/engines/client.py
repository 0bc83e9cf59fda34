"""Client of SGLang's HTTP contract, for a real SGLang and the embedded engine alike.

Every field whose default matters is sent explicitly: the contract's defaults abort requests, and unknown fields are ignored
without a word. Request ids are fixed-length hex, since aborting matches prefixes. Failures are typed: gone or starting
`EngineUnavailable`, too long `ContextOverflow`, refused `InvalidRequest`, anything else `EngineError`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypedDict, Unpack, cast
from uuid import uuid4

import aiohttp
import orjson

from reef_cli.core.errors import ContextOverflow, EngineError, EngineUnavailable, InvalidRequest, ReefError
from reef_cli.core.ports import Completion, Delta, Sampling
from reef_cli.core.types import TokenSpan
from reef_cli.weights import contract

Mode = Literal["abort", "retract", "in_place"]


class _Optional(TypedDict, total=False):
    adapter: str | None
    """A loaded LoRA adapter's name."""

    rid: str | None
    """The request's id, for `abort`."""


class Wish(_Optional):
    """What `generate` and `stream` are told beside tokens and sampling."""

    max_new_tokens: int


_CONTROL_TIMEOUT_S = 120.0


class EngineClient:
    """One engine at `base_url`. The admin key opens control routes where the engine has one; else the api key does."""

    def __init__(self, base_url: str, api_key: str | None = None, admin_api_key: str | None = None) -> None:
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
        body = _body(input_ids, sampling, wish, stream=False)
        async with self._aborting(body["rid"]):
            return completion(await self._call("POST", "/generate", body))

    async def stream(self, input_ids: Sequence[int], sampling: Sampling, **wish: Unpack[Wish]) -> AsyncIterator[Delta]:
        """Text as it comes, then the whole completion. Closing the iterator aborts the request in the engine."""
        body = _body(input_ids, sampling, wish, stream=True)
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


def _body(input_ids: Sequence[int], sampling: Sampling, wish: Wish, *, stream: bool) -> dict[str, Any]:
    rid = wish.get("rid") or uuid4().hex
    return request_body(input_ids, sampling, wish["max_new_tokens"], wish.get("adapter"), rid, stream=stream)


def request_body(
    input_ids: Sequence[int], sampling: Sampling, max_new_tokens: int, adapter: str | None, rid: str, *, stream: bool
) -> dict[str, Any]:
    """The body of `/generate`, every field that has a default spelled out."""
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "min_new_tokens": min(sampling.min_new_tokens, max_new_tokens),
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "spaces_between_special_tokens": True,
        "no_stop_trim": False,
        "n": 1,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): weight for token, weight in sampling.logit_bias.items()}
    body = {"rid": rid, "input_ids": list(input_ids), "sampling_params": params, "stream": stream, "return_logprob": True}
    return body | {"logprob_start_len": -1, "top_logprobs_num": 0, "lora_path": adapter}


def completion(reply: Mapping[str, Any]) -> Completion:
    """A whole answer of `/generate`; raises `EngineError` where its parts contradict each other."""
    gathered = Gathered()
    gathered.add(reply)
    return gathered.completion()


class Gathered:
    """An answer put together from its chunks, cumulative (the default) or incremental ones."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        self._text = ""
        self._sent = 0
        self._told = 0
        self._meta: Mapping[str, Any] = {}

    @property
    def finished(self) -> bool:
        return bool(self._meta.get("finish_reason"))

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Take a chunk; returns the text it adds."""
        meta = chunk["meta_info"]
        ids, text, logprobs = chunk.get("output_ids", []), chunk.get("text", ""), meta.get("output_token_logprobs", [])
        if len(ids) == meta["completion_tokens"]:
            self._ids, self._text, self._logprobs = list(ids), text, list(logprobs)
        else:
            self._ids += ids
            self._text += text
            self._logprobs += logprobs
        self._meta = meta
        return "" if self.finished else self.unsent()

    def unsent(self) -> str:
        """Text not returned before."""
        piece, self._sent = self._text[self._sent :], max(self._sent, len(self._text))
        return piece

    def untold(self) -> Sequence[tuple[int, float]]:
        """Tokens not returned before, each with its log-prob."""
        start, self._told = self._told, min(len(self._ids), len(self._logprobs))
        return [(token, float(entry[0])) for token, entry in zip(self._ids[start:], self._logprobs[start:], strict=False)]

    def completion(self) -> Completion:
        reason = self._meta.get("finish_reason") or {}
        if reason.get("status_code"):
            raise EngineError("The engine broke off a request", why=str(reason.get("message")))
        if not len(self._ids) == self._meta["completion_tokens"] == len(self._logprobs):
            raise EngineError("The engine's tokens, counts and log-probs disagree", hint="see the engine's log")
        if any(entry[1] != token for entry, token in zip(self._logprobs, self._ids, strict=True)):
            raise EngineError("The engine's log-probs belong to other tokens", hint="see the engine's log")
        return Completion(
            text=self._text,
            output_ids=tuple(self._ids),
            logprobs=tuple(float(entry[0]) for entry in self._logprobs),
            finish=reason["type"],
            spans=_spans(self._meta, len(self._ids)),
            prompt_tokens=self._meta["prompt_tokens"],
            cached_tokens=self._meta.get("cached_tokens", 0),
            matched=reason.get("matched"),
        )


def _spans(meta: Mapping[str, Any], count: int) -> tuple[TokenSpan, ...]:
    raw = meta.get("weight_versions") or ([{"version": meta["weight_version"], "start": 0, "end": count}] if count else [])
    return tuple(TokenSpan(span["version"], span["start"], span["end"]) for span in raw)


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
