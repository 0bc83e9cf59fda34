"""What a call asks of the provider: the client's own bytes where both speak one dialect, else a translated body.

Own bytes change only in the member that must: the model's name where one is configured, and `stream_options.include_usage`,
asked for the record's sake. Everything else, unusual sampling fields included, reaches the provider as it was written.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import orjson

from reef_cli.core.errors import UnsupportedField, UpstreamError
from reef_cli.core.types import Dialect
from reef_cli.core.values import immutable
from reef_cli.gateway import dialects
from reef_cli.gateway.backends.provider import Api
from reef_cli.gateway.call import Call
from reef_cli.gateway.dialects import ask_chat, ask_messages, ask_responses
from reef_cli.gateway.dialects.canonical import Answered, ChatRequest
from reef_cli.gateway.splice import add_member, replace_member

_ASK: Mapping[Api, ModuleType] = {"openai": ask_chat, "anthropic": ask_messages, "responses": ask_responses}
_NATIVE: Mapping[Api, tuple[Dialect, ...]] = {
    "openai": ("chat", "completions"),
    "anthropic": ("messages",),
    "responses": ("responses",),
}
_PATHS: Mapping[Dialect, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


@immutable
class Asking:
    """`raw` goes to `path`. `translated` is the canonical request when the dialects differ; `drop_usage` says the usage chunk
    was not the client's wish; `ask` is the module that reads the provider's answers."""

    path: str
    raw: bytes
    ask: ModuleType
    translated: ChatRequest | None = None
    drop_usage: bool = False


def prepare(call: Call, api: Api, model: str | None) -> Asking:
    """What to send. `UnsupportedField` names what cannot be translated."""
    if call.dialect in _NATIVE[api]:
        raw, drop = _own(call, model)
        return Asking(_PATHS[call.dialect], raw, _ASK[api], None, drop)
    request = dialects.parse(call.dialect, call.body)
    request.refuse_extra("the upstream, which speaks another dialect")
    if request.prompt is not None:
        raise UnsupportedField("Raw completions cannot be served by an upstream of another dialect.", param="prompt")
    ask = _ASK[api]
    unheard = (request.called("reasoning_effort"),) if api == "anthropic" and request.options.reasoning_effort else ()
    call.context.leave_out((*request.left_out, *unheard))
    return Asking(ask.PATH, orjson.dumps(ask.body(request, model or request.model)), ask, request)


def _own(call: Call, model: str | None) -> tuple[bytes, bool]:
    raw = call.raw
    if model is not None and call.body.get("model") != model:
        value = orjson.dumps(model)
        raw = replace_member(raw, "model", value) if "model" in call.body else add_member(raw, "model", value)
    if not (call.streams and call.context.capture and call.dialect in ("chat", "completions")):
        return raw, False
    options = call.body.get("stream_options")
    if options is None and "stream_options" not in call.body:
        return add_member(raw, "stream_options", b'{"include_usage":true}'), True
    if isinstance(options, dict | None) and not (options or {}).get("include_usage"):
        return replace_member(raw, "stream_options", orjson.dumps({**(options or {}), "include_usage": True})), True
    return raw, False


def answers_of(asking: Asking, body: Mapping[str, Any]) -> list[Answered]:
    """The provider's whole answer in canonical form."""
    try:
        answers: list[Answered] = asking.ask.read(body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UpstreamError("the upstream's answer cannot be read: server error there") from error
    return answers
