"""One inference request on its way: what came in, for whom, and what its answer will carry."""

import asyncio
from collections.abc import Mapping
from typing import Any

from reef_cli.core.errors import InvalidRequest, UnsupportedField
from reef_cli.core.types import Dialect, Release
from reef_cli.core.values import immutable
from reef_cli.gateway import dialects
from reef_cli.gateway.bodies import parse_object, read_body
from reef_cli.gateway.context import (
    LEFT_OUT_HEADER,
    RECEIPT_HEADER,
    RELEASE_HEADER,
    WEIGHT_HEADER,
    RequestContext,
    open_context,
)
from reef_cli.gateway.deps import Deps, deps_of
from reef_cli.gateway.dialects.canonical import Envelope
from reef_cli.gateway.http import Request


@immutable
class Call:
    """`raw` are the client's bytes (decompressed), `body` the same parsed. `release` is what the request resolved to.

    `session` is what routing keeps together: the session named, the one continued, or else the request itself.
    """

    request: Request
    deps: Deps
    context: RequestContext
    dialect: Dialect
    raw: bytes
    body: Mapping[str, Any]
    release: Release
    created_at: float
    session: str = ""

    @property
    def receipt(self) -> str | None:
        """The receipt the client gets, or None where nothing is recorded."""
        return self.context.receipt if self.context.capture else None

    @property
    def streams(self) -> bool:
        return self.body.get("stream") is True

    @property
    def model(self) -> str:
        """The model the client named, else the served one."""
        named = self.body.get("model")
        return named if isinstance(named, str) and named else self.deps.model

    def headers(self, weight_version: str | None = None, release_id: str | None = None) -> dict[str, str]:
        """What every answer of this call carries, streamed or not."""
        headers = {"x-request-id": self.context.request_id, RELEASE_HEADER: release_id or self.release.release_id}
        if self.context.capture:
            headers[RECEIPT_HEADER] = self.context.receipt
        if weight_version is not None:
            headers[WEIGHT_HEADER] = weight_version
        if self.context.facts.left_out:
            headers[LEFT_OUT_HEADER] = ", ".join(self.context.facts.left_out)
        return headers

    def envelope(self, prompt_tokens: int = 0) -> Envelope:
        """The names of an answer Reef writes itself; its id is the receipt, which agents keep with what they log."""
        return Envelope(
            id=self.context.receipt,
            model=self.model,
            created=int(self.created_at),
            receipt=self.receipt,
            request_id=self.context.request_id,
            prompt_tokens=prompt_tokens,
        )


async def open_call(request: Request, dialect: Dialect) -> Call:
    """Read and parse the body, then resolve scenario and release; a bad body resolves, creates and stores nothing."""
    deps = deps_of(request)
    raw = await read_body(request, deps.settings.body_limit_bytes)
    body = parse_object(raw)
    if not isinstance(body.get("stream"), bool | None):
        # Providers differ in what they take for true; nobody knows then what shape the answer has.
        raise InvalidRequest("`stream` must be true or false.", param="stream")
    context = await open_context(request, body)
    session = context.session or await _continued(deps, context, dialect, body)
    release = await deps.publishing.resolve(context.scenario, context.pin, session)
    return Call(request, deps, context, dialect, raw, body, release, deps.clock.now(), session)


async def _continued(deps: Deps, context: RequestContext, dialect: Dialect, body: Mapping[str, Any]) -> str:
    """The session of a request that names none: the conversation its messages continue, where routing asks for it."""
    if deps.routing is None or not deps.routing.splits(context.scenario):
        return context.receipt
    try:
        messages = dialects.messages_of(dialect, body)
    except (InvalidRequest, UnsupportedField):  # a body only its provider understands
        return context.receipt
    return await asyncio.to_thread(deps.log.conversation, context.scenario, messages) or context.receipt
