"""The inference routes: which path speaks which dialect, and the lists of models.

Everything else happens in the backend. `ROUTES` is what `gateway.app` mounts; scenario prefixes and doubled slashes are undone
before matching.
"""

from datetime import UTC, datetime
from typing import Any

from reef_cli.core.errors import ModelNotFound
from reef_cli.core.types import Dialect
from reef_cli.gateway.bodies import parse_object, read_body
from reef_cli.gateway.call import open_call
from reef_cli.gateway.context import scenario_of
from reef_cli.gateway.deps import deps_of
from reef_cli.gateway.http import Handler, Request, StreamResponse
from reef_cli.gateway.outgoing import json_answer

_EPOCH = 1_700_000_000
"""When a model was made is not known; clients only want the field to be there."""


def _serving(dialect: Dialect) -> Handler:
    async def handle(request: Request) -> StreamResponse:
        call = await open_call(request, dialect)
        return await call.deps.backend.serve(call)

    return handle


async def count_tokens(request: Request) -> StreamResponse:
    """Prompt tokens of a messages body; agents ask often and in parallel, so nothing is created or stored."""
    deps = deps_of(request)
    scenario_of(request)
    raw = await read_body(request, deps.settings.body_limit_bytes)
    return await deps.backend.count_tokens(request, raw, parse_object(raw))


async def models(request: Request) -> StreamResponse:
    """The models served, in Anthropic's shape for clients that send its version header, else in OpenAI's."""
    names = await deps_of(request).backend.models()
    if "anthropic-version" not in request.headers:
        return json_answer({"object": "list", "data": [_openai(name) for name in names]}, {})
    data = [_anthropic(name) for name in names]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return json_answer({"data": data, "has_more": False, **ends}, {})


async def model(request: Request) -> StreamResponse:
    """One model."""
    name = request.match_info["model"]
    if name not in await deps_of(request).backend.models():
        raise ModelNotFound("there is no such model here", hint="GET /v1/models lists those served")
    return json_answer(_anthropic(name) if "anthropic-version" in request.headers else _openai(name), {})


def _openai(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": _EPOCH, "owned_by": "reef"}


def _anthropic(name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(_EPOCH, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", _serving("chat")),
    ("POST", "/v1/completions", _serving("completions")),
    ("POST", "/v1/messages", _serving("messages")),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/responses", _serving("responses")),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{model:.+}", model),
)
