"""From an answered (or failed) call to its record: made once, durable before the client sees the receipt's last frame.

Failures that say "not like this" or "not now" before anything was generated leave no record; what broke on the way does, marked
incomplete, so that it never trains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from reef_cli.core.errors import (
    AuthError,
    ConflictError,
    InvalidRequest,
    NotFoundError,
    ReefError,
    UnavailableError,
    UnsupportedField,
    UsageError,
)
from reef_cli.core.ids import ReleaseId
from reef_cli.core.types import Inference, TokenTrace
from reef_cli.core.values import immutable
from reef_cli.gateway import dialects
from reef_cli.gateway.call import Call
from reef_cli.gateway.dialects.canonical import Answered, Message, Usage
from reef_cli.gateway.tracing import generated

CLIENT_LEFT = "client_disconnected"
_UNRECORDED = (UsageError, UnavailableError, AuthError, NotFoundError, ConflictError)


@immutable
class Outcome:
    """What came of a call. `error` is None for a whole answer, else `code: words`."""

    answers: Sequence[Answered] = ()
    error: str | None = None
    tokens: TokenTrace | None = None
    raw_text: str | None = None
    weight_version: str | None = None
    release_id: ReleaseId | None = None
    """The release that made the answer, where it is not the one the request was resolved to."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    first_s: float | None = None


def recordable(error: ReefError) -> bool:
    """Whether a failure leaves a record: not when the request was refused or told to come again."""
    return not isinstance(error, _UNRECORDED)


def cause(error: ReefError) -> str:
    return f"{error.code}: {error.message}"


def failed(error: ReefError) -> Outcome:
    return Outcome(error=cause(error))


async def record(call: Call, outcome: Outcome, messages: Sequence[Message] | None = None) -> None:
    """Append the record; it is durable when this returns, even if the caller was cancelled meanwhile. `StorageError`."""
    if not call.context.capture:
        return
    inference = _inference(call, outcome, _messages(call) if messages is None else messages)
    if call.deps.tracer.on:
        generated(call.deps.tracer, call.deps.engine_kind, call.body, inference)
    # A caller that is cancelled here no longer waits; the writer has the record all the same.
    await call.deps.log.append(inference)
    _count(call, inference)
    if call.deps.learning is not None:
        call.deps.learning.wake(call.context.scenario)


def _messages(call: Call) -> Sequence[Message]:
    """The conversation in canonical form; empty for a body only its provider understands (the bytes are kept anyway)."""
    try:
        return dialects.messages_of(call.dialect, call.body)
    except (InvalidRequest, UnsupportedField):
        return ()


def _inference(call: Call, outcome: Outcome, messages: Sequence[Message]) -> Inference:
    answer = outcome.answers[0] if outcome.answers else None
    context = call.context
    timings = {"total_s": call.deps.clock.monotonic() - context.started}
    if outcome.first_s is not None:
        timings["first_s"] = outcome.first_s
    return Inference(
        id=context.receipt,
        scenario=context.scenario,
        created_at=call.created_at,
        dialect=call.dialect,
        model=call.model,
        request=call.raw,
        messages=messages,
        response=answer.message() if answer else None,
        finish=answer.finish if answer else None,
        tokens=outcome.tokens,
        raw_text=outcome.raw_text,
        release_id=outcome.release_id or call.release.release_id,
        weight_version=outcome.weight_version,
        session=context.session,
        tags=context.tags,
        usage=_usage(call, outcome, answer),
        timings=timings,
        stream=call.streams,
        complete=outcome.error is None,
        error=outcome.error,
    )


def _usage(call: Call, outcome: Outcome, answer: Answered | None) -> dict[str, Any]:
    usage: dict[str, Any] = usage_facts(answer.usage if answer else None)
    if len(outcome.answers) > 1:
        usage["other_choices"] = _others(outcome.answers)
    if outcome.extra:
        usage.update(outcome.extra)
    if left_out := call.context.facts.left_out:
        usage["left_out"] = list(left_out)
    return usage


def usage_facts(usage: Usage | None) -> dict[str, int]:
    """Token counts under one set of names for all dialects."""
    if usage is None:
        return {}
    facts = {"prompt_tokens": usage.prompt, "completion_tokens": usage.output, "cached_tokens": usage.cached}
    if usage.reasoning:
        facts["reasoning_tokens"] = usage.reasoning
    if usage.cache_written:
        facts["cache_written_tokens"] = usage.cache_written
    return facts


def _others(answers: Sequence[Answered]) -> list[dict[str, Any]]:
    """Where a request asked for several answers, the first is the record's own and the others are listed beside it."""
    return [{"message": answer.message(), "finish": answer.finish} for answer in answers[1:]]


def _count(call: Call, inference: Inference) -> None:
    metrics, scenario = call.deps.metrics, inference.scenario
    metrics.records.inc(1, scenario, "inference")
    metrics.tokens.inc(inference.usage.get("prompt_tokens", 0), scenario, "in")
    metrics.tokens.inc(inference.usage.get("completion_tokens", 0), scenario, "out")
    if inference.error is not None:
        metrics.incomplete.inc(1, scenario, inference.error.partition(":")[0])
    if "first_s" in inference.timings:
        metrics.first_token_seconds.observe(inference.timings["first_s"], inference.dialect)
