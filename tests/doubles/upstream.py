"""A provider under the tests' control, on a real loopback socket.

`Upstream` speaks every dialect. By default it answers sensibly (`text`, or tool calls when told so). A test can script anything
else: `script` takes one request and writes the response by hand. Everything received is kept in `seen`, bytes and headers.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from aiohttp import web

Script = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]
USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107, "prompt_tokens_details": {"cached_tokens": 10}}


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return orjson.loads(self.raw)


@dataclass
class Upstream:
    """The double. `text`, `reasoning` and `calls` are what it answers; `left` is set when a client leaves a scripted stream."""

    url: str = ""
    text: str = "Hello from the stub."
    reasoning: str = ""
    calls: Sequence[tuple[str, str, str]] = ()
    script: Script | None = None
    seen: list[Seen] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.seen.append(Seen(request.method, request.path, request.query_string, dict(request.headers), raw))
        try:
            if self.script is not None:
                return await self.script(request, raw)
            return await self._answer(request, raw)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise

    async def _answer(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"object": "list", "data": [{"id": "stub-model", "object": "model"}]})
        body = orjson.loads(raw)
        dialect = request.path.rsplit("/", 1)[-1]
        if dialect == "count_tokens":
            return web.json_response({"input_tokens": 123})
        wire = {"completions": Chat, "messages": Messages, "responses": Responses}[dialect](self, body)
        if body.get("stream"):
            return await stream(request, wire.frames())
        return web.json_response(wire.whole())

    def replies(self, status: int, body: Any = b"", *, headers: dict[str, str] | None = None, delay: float = 0.0) -> None:
        """From now on answer every request like this."""

        async def script(request: web.Request, raw: bytes) -> web.StreamResponse:
            await asyncio.sleep(delay)
            data = body if isinstance(body, bytes) else orjson.dumps(body)
            kind = "text/plain" if isinstance(body, bytes) else "application/json"
            return web.Response(status=status, body=data, headers={"Content-Type": kind, **(headers or {})})

        self.script = script

    def streams(self, chunks: Sequence[bytes], *, gap: float = 0.0, cut: bool = False, hang: bool = False) -> None:
        """From now on answer with an event stream of these writes; `cut` breaks the connection, `hang` never ends."""

        async def script(request: web.Request, raw: bytes) -> web.StreamResponse:
            return await stream(request, chunks, gap=gap, cut=cut, hang=hang)

        self.script = script


async def stream(
    request: web.Request, chunks: Sequence[bytes], *, gap: float = 0.0, cut: bool = False, hang: bool = False
) -> web.StreamResponse:
    """An event stream, one write per chunk."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-provider": "stub", "request-id": "req_stub"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(gap)
    if hang:
        await asyncio.sleep(3600)
    if cut:
        assert request.transport is not None
        request.transport.abort()
        return response
    await response.write_eof()
    return response


def data(payload: Any) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def event(payload: Any) -> bytes:
    return b"event: " + payload["type"].encode() + b"\n" + data(payload)


def words(text: str) -> list[str]:
    return [text[i : i + 5] for i in range(0, len(text), 5)]


class Chat:
    """Chat and raw completions."""

    def __init__(self, upstream: Upstream, body: Any) -> None:
        self.up = upstream
        self.raw = "prompt" in body
        options = body.get("stream_options")
        self.usage_asked = isinstance(options, dict) and options.get("include_usage")
        self.head = {"id": "chatcmpl-stub", "created": 1, "model": body.get("model")}
        self.finish = "tool_calls" if upstream.calls else "stop"

    def whole(self) -> Any:
        if self.raw:
            choice: Any = {"index": 0, "text": self.up.text, "finish_reason": "stop", "logprobs": None}
            return {**self.head, "object": "text_completion", "choices": [choice], "usage": USAGE}
        message: dict[str, Any] = {"role": "assistant", "content": None if self.up.calls else self.up.text}
        if self.up.reasoning:
            message["reasoning_content"] = self.up.reasoning
        if self.up.calls:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in self.up.calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": self.finish, "logprobs": None}
        return {**self.head, "object": "chat.completion", "choices": [choice], "usage": USAGE}

    def frames(self) -> list[bytes]:
        head = {**self.head, "object": "text_completion" if self.raw else "chat.completion.chunk"}
        out = [self._chunk(head, delta) for delta in self._deltas()]
        out.append(self._chunk(head, {}, self.finish))
        if self.usage_asked:
            out.append(data({**head, "choices": [], "usage": USAGE}))
        return [*out, b"data: [DONE]\n\n"]

    def _chunk(self, head: Any, delta: Any, finish: str | None = None) -> bytes:
        if self.raw:
            return data({**head, "choices": [{"index": 0, "text": delta.get("content", ""), "finish_reason": finish}]})
        return data({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def _deltas(self) -> list[Any]:
        deltas: list[Any] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": word} for word in words(self.up.reasoning)]
        for index, (call_id, name, arguments) in enumerate(self.up.calls):
            function = {"name": name, "arguments": ""}
            deltas.append({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})
            deltas += [{"tool_calls": [{"index": index, "function": {"arguments": part}}]} for part in words(arguments)]
        return deltas if self.up.calls else deltas + [{"content": word} for word in words(self.up.text)]


class Messages:
    """Anthropic messages."""

    usage: ClassVar[dict[str, Any]] = {
        "input_tokens": 90,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 10,
        "output_tokens": 7,
    }

    def __init__(self, upstream: Upstream, body: Any) -> None:
        self.up = upstream
        self.model = body.get("model")
        self.stop = "tool_use" if upstream.calls else "end_turn"

    def _blocks(self) -> list[Any]:
        blocks: list[Any] = []
        if self.up.reasoning:
            blocks.append({"type": "thinking", "thinking": self.up.reasoning, "signature": "c2ln"})
        if not self.up.calls:
            blocks.append({"type": "text", "text": self.up.text})
        return blocks + [{"type": "tool_use", "id": i, "name": n, "input": orjson.loads(a)} for i, n, a in self.up.calls]

    def whole(self) -> Any:
        head = {"id": "msg_stub", "type": "message", "role": "assistant", "model": self.model, "content": self._blocks()}
        return {**head, "stop_reason": self.stop, "stop_sequence": None, "usage": self.usage}

    def frames(self) -> list[bytes]:
        message = {**self.whole(), "content": [], "stop_reason": None, "usage": {**self.usage, "output_tokens": 1}}
        out = [event({"type": "message_start", "message": message}), event({"type": "ping"})]
        arguments = iter(self.up.calls)
        for index, block in enumerate(self._blocks()):
            out += self._block(index, block, arguments)
        delta = {"stop_reason": self.stop, "stop_sequence": None}
        out.append(event({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 7}}))
        return [*out, event({"type": "message_stop"})]

    def _block(self, index: int, block: Any, calls: Any) -> list[bytes]:
        match block["type"]:
            case "text":
                empty, deltas = {"type": "text", "text": ""}, [{"type": "text_delta", "text": w} for w in words(block["text"])]
            case "thinking":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": w} for w in words(block["thinking"])]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            case _:
                empty = {**block, "input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": w} for w in words(next(calls)[2])]
        start = event({"type": "content_block_start", "index": index, "content_block": empty})
        middle = [event({"type": "content_block_delta", "index": index, "delta": delta}) for delta in deltas]
        return [start, *middle, event({"type": "content_block_stop", "index": index})]


class Responses:
    """OpenAI responses."""

    usage: ClassVar[dict[str, Any]] = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 10},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 107,
    }

    def __init__(self, upstream: Upstream, body: Any) -> None:
        self.up = upstream
        self.head = {"id": "resp_stub", "object": "response", "created_at": 1, "model": body.get("model"), "error": None}

    def _items(self) -> list[Any]:
        items: list[Any] = []
        if self.up.reasoning:
            items.append({"type": "reasoning", "id": "rs_0", "summary": [{"type": "summary_text", "text": self.up.reasoning}]})
        if not self.up.calls:
            part = {"type": "output_text", "text": self.up.text, "annotations": []}
            items.append({"type": "message", "id": "msg_0", "role": "assistant", "status": "completed", "content": [part]})
        return items + [
            {"type": "function_call", "id": f"fc_{k}", "call_id": i, "name": n, "arguments": a, "status": "completed"}
            for k, (i, n, a) in enumerate(self.up.calls)
        ]

    def whole(self) -> Any:
        return {**self.head, "status": "completed", "output": self._items(), "usage": self.usage}

    def frames(self) -> list[bytes]:
        started = {**self.head, "status": "in_progress", "output": [], "usage": None}
        payloads: list[Any] = [{"type": "response.created", "response": started}]
        payloads.append({"type": "response.in_progress", "response": started})
        for index, item in enumerate(self._items()):
            payloads += self._item(index, item)
        payloads.append({"type": "response.completed", "response": self.whole()})
        return [event({**payload, "sequence_number": number}) for number, payload in enumerate(payloads)]

    def _item(self, index: int, item: Any) -> list[Any]:
        place = {"item_id": item["id"], "output_index": index}
        opened: list[Any] = []
        match item["type"]:
            case "message":
                empty = {**item, "content": []}
                kind, text = "response.output_text.delta", item["content"][0]["text"]
                place["content_index"] = 0
                part = {**item["content"][0], "text": ""}
                opened = [{"type": "response.content_part.added", **place, "part": part}]
            case "reasoning":
                empty = {**item, "summary": []}
                kind, text = "response.reasoning_summary_text.delta", item["summary"][0]["text"]
                place["summary_index"] = 0
            case _:
                empty = {**item, "arguments": ""}
                kind, text = "response.function_call_arguments.delta", item["arguments"]
        added = {"type": "response.output_item.added", "output_index": index, "item": empty}
        deltas = [{"type": kind, **place, "delta": word} for word in words(text)]
        return [added, *opened, *deltas, {"type": "response.output_item.done", "output_index": index, "item": item}]


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    """A running double on a free loopback port."""
    double = Upstream()
    app = web.Application(client_max_size=128 * 1024 * 1024)
    app.router.add_route("*", "/{tail:.*}", double.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    double.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield double
    finally:
        await runner.cleanup()
