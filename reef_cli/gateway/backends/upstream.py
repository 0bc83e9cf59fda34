"""Answers by a provider upstream, in its own dialect or translated.

Where client and provider speak one dialect, bytes pass both ways unchanged but for what `asking` and `relay` name. Else
requests, answers and streams go through the canonical form. The record is made from the collected bytes when the answer is
whole; it is durable before the last frame is out. A client that leaves takes the upstream call with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from reef_cli.core.errors import UpstreamError
from reef_cli.gateway import dialects
from reef_cli.gateway.backends.asking import Asking, answers_of, prepare
from reef_cli.gateway.backends.provider import Api, Provider, Refusal, parsed, read_all, relay, returned_headers
from reef_cli.gateway.backends.upstream_stream import PassThrough, Translation
from reef_cli.gateway.backends.wire import Answer
from reef_cli.gateway.call import Call
from reef_cli.gateway.context import RECEIPT_HEADER
from reef_cli.gateway.delivery import keep, whole
from reef_cli.gateway.errors import error_body
from reef_cli.gateway.http import Request, Response, StreamResponse
from reef_cli.gateway.outgoing import json_answer
from reef_cli.gateway.recording import Outcome, cause, record

_BYTES_PER_TOKEN = 4
"""Rough size of a token of English and code; for token counts where the provider offers none."""


class UpstreamBackend:
    """Implements `Backend` over a provider. `model` replaces the name clients send; None leaves it to them."""

    def __init__(
        self,
        url: str,
        api: Api,
        key: str | None,
        *,
        model: str | None = None,
        timeout_s: float = 600.0,
        connect_s: float = 10.0,
    ) -> None:
        self.provider = Provider(url, api, key, timeout_s=timeout_s, connect_s=connect_s)
        self._api = api
        self._model = model

    async def serve(self, call: Call) -> StreamResponse:
        asking = prepare(call, self._api, self._model)
        try:
            if not call.streams:
                return await whole(call, self._whole(call, asking))
            flow = PassThrough if asking.translated is None else Translation
            return await flow(call, asking, self).run()
        except Refusal as refusal:
            return await self._refused(call, asking, refusal)

    async def post(self, call: Call, asking: Asking) -> Answer:
        """Send the request; the status line is there when this returns."""
        own = asking.translated is None
        target = self.provider.target(asking.path, call.request.query_string if own else "")
        headers = self.provider.headers(call.request.headers if own else None, stream=call.streams)
        started = call.deps.clock.monotonic()
        try:
            return await self.provider.ask(target, asking.raw, headers)
        finally:
            call.context.waited(call.deps.clock.monotonic() - started)

    async def _whole(self, call: Call, asking: Asking) -> StreamResponse:
        response = await self.post(call, asking)
        raw = await read_all(response)
        answers = answers_of(asking, parsed(raw))
        await record(call, Outcome(answers), None if asking.translated is None else asking.translated.messages)
        if asking.translated is not None:
            return json_answer(dialects.encode(call.envelope(), asking.translated, answers), call.headers())
        return Response(body=raw, headers=[*returned_headers(response), *call.headers().items()])

    async def _refused(self, call: Call, asking: Asking, refusal: Refusal) -> StreamResponse:
        """The provider's own error, in its bytes where the client knows the dialect. No receipt: nothing to cite."""
        error = refusal.error()
        await keep(call, Outcome(error=cause(error)))
        headers = {name: value for name, value in call.headers().items() if name != RECEIPT_HEADER}
        if asking.translated is None and refusal.json:
            return relay(refusal, None, headers)
        shape = error_body("anthropic" if call.dialect == "messages" else "openai", error, call.context.request_id)
        return relay(refusal, shape, headers)

    async def count_tokens(self, request: Request, raw: bytes, body: Mapping[str, Any], /) -> StreamResponse:
        """The provider's count; an estimate by size, marked as such, where it offers none."""
        if self._api != "anthropic":
            estimate = len(orjson.dumps(body)) // _BYTES_PER_TOKEN
            return json_answer({"input_tokens": estimate}, {"x-reef-estimate": "true"})
        target = self.provider.target("/v1/messages/count_tokens", request.query_string)
        try:
            response = await self.provider.ask(target, raw, self.provider.headers(request.headers))
        except Refusal as refusal:
            shape = None if refusal.json else error_body("anthropic", refusal.error(), "")
            return relay(refusal, shape, {})
        return Response(body=await read_all(response), headers=list(returned_headers(response)))

    async def models(self) -> Sequence[str]:
        """The configured name, else what the provider lists."""
        if self._model is not None:
            return [self._model]
        try:
            response = await self.provider.ask(self.provider.target("/v1/models"), None, self.provider.headers(None))
        except Refusal as refusal:
            raise refusal.error() from refusal
        listed = parsed(await read_all(response)).get("data")
        if not isinstance(listed, list):
            raise UpstreamError("the upstream's list of models cannot be read: server error there")
        return [entry["id"] for entry in listed if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    async def close(self) -> None:
        self.provider.close()
