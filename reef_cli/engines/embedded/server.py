"""The engine's HTTP routes: thin handlers over `Engine` and `Updates`, bearer auth, the contract's error bodies.

Bodies are JSON objects; unknown fields of control routes are ignored, as SGLang does. Handlers never touch torch.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic, time
from typing import Any

import orjson
from aiohttp import web

from reef_cli import __version__
from reef_cli.core.errors import ContextOverflow, InvalidRequest, ReefError, UsageError
from reef_cli.engines.embedded import openai, replies
from reef_cli.engines.embedded.engine import Engine
from reef_cli.engines.embedded.model import engine_checksum
from reef_cli.engines.embedded.options import Options
from reef_cli.engines.embedded.updates import Updates
from reef_cli.weights import contract

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN = ("/health", "/ready", "/metrics")
_BODY_LIMIT = 512 * 1024 * 1024
"""Weights come in bodies too, as text, a bucket at a time."""


class Server:
    """All routes of one engine."""

    def __init__(self, engine: Engine, updates: Updates, options: Options, facts: Mapping[str, Any]) -> None:
        self._engine = engine
        self._updates = updates
        self._options = options
        self._facts = facts
        self._name = options.served_model_name or options.model_path
        self._started = time()
        self._admin: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=_BODY_LIMIT)
        app.router.add_get("/ready", self._ready)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/tokenize", self._tokenize)
        app.router.add_post("/v1/detokenize", self._detokenize)
        app.router.add_get("/flush_cache", self._flush)
        for path, handler in self._controls().items():
            self._admin.add(path)
            app.router.add_post(path, handler)
        return app

    def _controls(self) -> dict[str, Handler]:
        updates = self._updates
        return {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/abort_request": self._abort,
            "/init_weights_update_group": self._result(updates.init_group),
            "/destroy_weights_update_group": self._result(
                lambda body: updates.destroy_group(str(body.get("group_name", "weight_update_group")))
            ),
            "/begin_weight_update": self._result(lambda _: updates.begin()),
            "/end_weight_update": self._result(lambda _: updates.end()),
            "/update_weights_from_distributed": self._result(updates.from_distributed),
            "/update_weights_from_tensor": self._result(updates.from_tensor),
            "/update_weights_from_disk": self._result(updates.from_disk, num_paused_requests=0),
            "/update_weight_version": self._update_version,
            "/load_lora_adapter": self._load_adapter,
            "/load_lora_adapter_from_tensors": self._take_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/weights_checker": self._check_weights,
            "/release_memory_occupation": self._release_memory,
            "/resume_memory_occupation": self._resume_memory,
        }

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._allowed(request):
            return _json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except ContextOverflow as error:
            return _json(_error(error, request.path), 400)
        except UsageError as error:
            return _json(_error(error, request.path), 400)
        except (KeyError, TypeError, ValueError) as error:
            return _json(_error(InvalidRequest(f"malformed body: {error!r}"), request.path), 400)

    def _allowed(self, request: web.Request) -> bool:
        if request.path.startswith(_OPEN):
            return True
        options = self._options
        wanted = (options.admin_api_key or options.api_key) if request.path in self._admin else options.api_key
        given = request.headers.get("Authorization", "")
        return wanted is None or hmac.compare_digest(given.encode(), f"Bearer {wanted}".encode())

    # Health and information

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.core.paused else 200)

    async def _health(self, _: web.Request) -> web.Response:
        """200 when steps advance, or when an idle engine makes one token, within the time-out."""
        core, chat = self._engine.core, self._engine.chat
        if not core.busy and not core.paused:
            body = {"input_ids": chat.encode("a")[:1] or [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            alive: Awaitable[object] = self._engine.finish(replies.wish(body, self._engine))
        else:
            alive = self._advance(core.steps)
        try:
            await asyncio.wait_for(alive, self._options.health_timeout)
        except TimeoutError:
            return web.Response(status=503)
        return web.Response(status=200)

    async def _advance(self, steps: int) -> None:
        while self._engine.core.steps == steps:  # noqa: ASYNC110 - the counter lives in the torch thread
            await asyncio.sleep(0.05)

    async def _model_info(self, _: web.Request) -> web.Response:
        config = self._engine.model.net.config
        return _json(
            {
                "model_path": self._options.model_path,
                "served_model_name": self._name,
                "tokenizer_path": self._options.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._engine.core.version,
                "load_format": "auto",
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        options, model = self._options, self._engine.model
        return _json(
            {
                "engine": "embedded",
                "version": __version__,
                "model_path": options.model_path,
                "served_model_name": self._name,
                "dtype": options.dtype,
                "context_length": model.context_length,
                "max_running_requests": options.max_running_requests,
                "max_total_num_tokens": model.slots.count * model.slots.capacity,
                "max_lora_rank": options.max_lora_rank,
                "custom_weight_loader": [contract.CHANGES],
                "weight_version": self._engine.core.version,
                "paused": self._engine.core.paused,
                "startup_time": self._started,
                "uptime_s": monotonic() - self._engine.started,
                "internal_states": [self._engine.core.load_figures()],
                **self._facts,
            }
        )

    async def _models(self, _: web.Request) -> web.Response:
        base = {"id": self._name, "object": "model", "owned_by": "reef", "max_model_len": self._engine.model.context_length}
        adapters = [
            {"id": name, "object": "model", "owned_by": "reef", "parent": self._name}
            for name in self._engine.model.adapters.loaded
        ]
        return _json({"object": "list", "data": [base, *adapters]})

    # Generation

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await _body(http)
        prompt_ids = bool(body.get("return_prompt_token_ids", False))
        ids = body.get("input_ids")
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            if body.get("stream"):
                raise InvalidRequest("a batch cannot be streamed: send one request per prompt")
            wishes = [replies.wish({**body, "input_ids": each, "rid": None}, self._engine) for each in ids]
            answers = await asyncio.gather(*(self._engine.finish(each) for each in wishes))
            return _json([replies.answer(*each, self._engine, prompt_ids=prompt_ids) for each in answers])
        wish = replies.wish(body, self._engine)
        if body.get("stream"):
            return await _sse(http, self._chunks(wish, prompt_ids))
        request, progress = await self._engine.finish(wish)
        status = (progress.finish or {}).get("status_code", 200)
        reply = replies.answer(request, progress, self._engine, prompt_ids=prompt_ids)
        return _json(reply if status == 200 else {"error": {"message": (progress.finish or {}).get("message")}}, status)

    async def _chunks(self, wish: Any, prompt_ids: bool) -> Any:
        incremental = self._options.incremental_streaming_output
        since = (0, 0)
        async for request, progress in self._engine.generate(wish, stream=True):
            yield replies.answer(request, progress, self._engine, prompt_ids=prompt_ids, since=since)
            if incremental:
                since = (progress.tokens, len(progress.text))

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await _body(http)
        if body.get("stream"):
            return await _sse(http, openai.stream(body, openai.wish(body, self._engine), self._engine, self._name))
        return _json(await openai.complete(body, self._engine, self._name))

    async def _tokenize(self, http: web.Request) -> web.Response:
        ids = self._engine.chat.encode(str((await _body(http))["prompt"]))
        return _json({"tokens": ids, "count": len(ids), "max_model_len": self._engine.model.context_length})

    async def _detokenize(self, http: web.Request) -> web.Response:
        body = await _body(http)
        return _json({"text": self._engine.chat.decode(body["tokens"], bool(body.get("skip_special_tokens", True)))})

    # Control

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await _body(http)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise InvalidRequest(f"unknown pause mode {mode!r}")
        await self._engine.call(lambda: self._engine.core.pause(mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        await self._engine.call(self._engine.core.resume)
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, http: web.Request) -> web.Response:
        deadline = monotonic() + float(http.query.get("timeout", 0))
        while not await self._engine.call(self._engine.core.flush):
            if monotonic() >= deadline:
                return web.Response(status=400, text="Cache not flushed because requests are running.\n")
            await asyncio.sleep(0.05)
        return web.Response(text="Cache flushed.\n")

    async def _abort(self, http: web.Request) -> web.Response:
        body = await _body(http)
        await self._engine.abort(str(body.get("rid", "")), bool(body.get("abort_all", False)))
        return web.Response(status=200)

    async def _update_version(self, http: web.Request) -> web.Response:
        body = await _body(http)
        version = str(body["new_version"])
        message = await self._updates.set_version(version, bool(body.get("abort_all_requests", True)))
        return _json({"success": True, "message": message, "new_version": version})

    async def _load_adapter(self, http: web.Request) -> web.Response:
        body = await _body(http)
        return await self._adapters(self._engine.load_adapter(str(body["lora_name"]), str(body["lora_path"])))

    async def _take_adapter(self, http: web.Request) -> web.Response:
        body = await _body(http)
        name, tensors = str(body["lora_name"]), body["serialized_named_tensors"]
        if body.get("load_format") is not None or body.get("expected_checksums") is not None:
            raise InvalidRequest("load_format and expected_checksums are not supported")
        return await self._adapters(self._engine.take_adapter(name, body["config_dict"], tensors))

    async def _unload_adapter(self, http: web.Request) -> web.Response:
        return await self._adapters(self._engine.unload_adapter(str((await _body(http))["lora_name"])))

    async def _adapters(self, change: Awaitable[None]) -> web.Response:
        error = ""
        try:
            await change
        except ReefError as failure:
            error = failure.message + (f" ({failure.why})" if failure.why else "")
        loaded = {name: adapter.path for name, adapter in self._engine.model.adapters.loaded.items()}
        return _json({"success": not error, "error_message": error, "loaded_adapters": loaded}, 400 if error else 200)

    async def _release_memory(self, _: web.Request) -> web.Response:
        """Of what SGLang gives back to its GPU, cached prefixes are all there is here; refused while requests run."""
        if not await self._engine.call(self._engine.core.flush):
            raise InvalidRequest("requests are running; pause generation first")
        return _json(None)

    async def _resume_memory(self, _: web.Request) -> web.Response:
        return _json(None)

    async def _check_weights(self, http: web.Request) -> web.Response:
        action = (await _body(http)).get("action", "checksum")
        if action != "checksum":
            raise InvalidRequest(f"weights_checker action {action!r} is not supported; use checksum")
        sums = await self._engine.call(self._engine.model.checksums)
        total = engine_checksum(sums)
        return _json(
            {
                "success": True,
                "message": "",
                "ranks": [{"checksums": sums, "per_gpu_checksum": total}],
                "per_engine_checksum": total,
            }
        )

    def _result(self, run: Callable[[dict[str, Any]], Awaitable[str]], **more: Any) -> Handler:
        """A control route answering `{"success", "message"}`, 400 on failure."""

        async def handle(http: web.Request) -> web.Response:
            try:
                # A caller that gives up must not leave an update half done.
                message = await asyncio.shield(asyncio.ensure_future(run(await _body(http))))
            except ReefError as error:
                return _json(
                    {"success": False, "message": error.message + (f": {error.why}" if error.why else ""), **more}, 400
                )
            return _json({"success": True, "message": message, **more})

        return handle


async def _sse(http: web.Request, chunks: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    try:
        async for chunk in chunks:
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
    except (ConnectionError, RuntimeError):
        pass  # the client is gone; closing the chunks aborts its request
    finally:
        await chunks.aclose()
    return response


async def _body(http: web.Request) -> dict[str, Any]:
    raw = await http.read()
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def _error(error: ReefError, path: str) -> dict[str, Any]:
    if path.startswith("/v1/"):
        return {"object": "error", "message": error.message, "type": "BadRequestError", "param": None, "code": 400}
    if error.message.startswith("unknown field"):
        return {"error": error.message}
    return {"error": {"message": error.message}}


def _json(payload: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")
