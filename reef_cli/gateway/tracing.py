"""What traces say of requests, answers and reports, in OpenTelemetry's words (HTTP and generative AI conventions).

A generation's span names its receipt as `gen_ai.response.id`, and a report's `gen_ai.evaluation.result` cites it under the same
name, so that a trace store can join them. Never a body.
"""

from collections.abc import Mapping
from typing import Any

from reef_cli.core.types import Inference, Report
from reef_cli.gateway.http import Request, StreamResponse
from reef_cli.telemetry.traces import Span, Tracer

_SAMPLING = {
    "gen_ai.request.temperature": ("temperature",),
    "gen_ai.request.top_p": ("top_p",),
    "gen_ai.request.top_k": ("top_k",),
    "gen_ai.request.seed": ("seed",),
    "gen_ai.request.frequency_penalty": ("frequency_penalty",),
    "gen_ai.request.presence_penalty": ("presence_penalty",),
    "gen_ai.request.choice.count": ("n",),
    "gen_ai.request.max_tokens": ("max_completion_tokens", "max_tokens", "max_output_tokens"),
}
_USAGE = {
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
    "gen_ai.usage.cache_read.input_tokens": "cached_tokens",
    "gen_ai.usage.cache_creation.input_tokens": "cache_written_tokens",
    "gen_ai.usage.reasoning.output_tokens": "reasoning_tokens",
}


def answered(span: Span, request: Request, response: StreamResponse, request_id: str) -> None:
    """The facts of a request's own span."""
    route = request.route
    facts = {
        "http.request.method": request.method,
        "http.route": route,
        "http.response.status_code": response.status,
        "reef.request_id": request_id,
    }
    span.describe(f"{request.method} {route or 'unknown'}", facts, failed=response.status >= 500)


def generated(tracer: Tracer, engine: str, body: Mapping[str, Any], record: Inference) -> None:
    """One exchange with the engine or provider."""
    operation = "text_completion" if record.dialect == "completions" else "chat"
    facts = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": engine,
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.id": record.id,
        "gen_ai.response.finish_reasons": [record.finish] if record.finish else None,
        "gen_ai.response.time_to_first_chunk": record.timings.get("first_s"),
        "gen_ai.conversation.id": record.session,
        "reef.scenario": record.scenario,
        "reef.release_id": record.release_id,
        "reef.weight_version": record.weight_version,
        **{name: _number(body, fields) for name, fields in _SAMPLING.items()},
        **{name: record.usage.get(count) for name, count in _USAGE.items()},
    }
    error = None if record.error is None else record.error.partition(":")[0]
    tracer.finished(f"{operation} {record.model}", record.timings["total_s"], facts, error=error)


def _number(body: Mapping[str, Any], fields: tuple[str, ...]) -> float | None:
    """The first of the fields that holds a number; what clients send may be anything."""
    values = (body.get(name) for name in fields)
    return next((value for value in values if isinstance(value, int | float) and not isinstance(value, bool)), None)


def reported(tracer: Tracer, report: Report) -> None:
    """A report as the result of an evaluation, once for each answer it cites."""
    for reference in report.references:
        tracer.event(
            "gen_ai.evaluation.result",
            {
                "gen_ai.evaluation.name": "reef.report",
                "gen_ai.evaluation.score.value": report.score,
                "gen_ai.response.id": reference,
                "reef.report_id": report.id,
            },
        )
