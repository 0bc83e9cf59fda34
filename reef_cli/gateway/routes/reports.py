"""`POST /reef/report`: feedback that cites receipts. The body's shape is checked here, its references by the log's own writer.

The answer says per receipt whether it can train and why; that is asked after the report is durable, and before learning is
woken, so that the answer describes this report and not what learning has just done with it.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from reef_cli.core.errors import InvalidReference, InvalidRequest
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Eligibility, Report
from reef_cli.experience.eligibility import opted_out
from reef_cli.gateway.answers import answer
from reef_cli.gateway.bodies import kind_of, object_field, only, read_object
from reef_cli.gateway.context import RECEIPT_HEADER, ensure_scenario, named_scenario, principal_of, tags_from
from reef_cli.gateway.deps import Deps, Route, deps_of
from reef_cli.gateway.http import Request, Response
from reef_cli.gateway.tracing import reported

_FIELDS = ("score", "feedback", "references", "metadata", "agent_record_id")
_MOST_REFERENCES = 1000
_LONGEST_ID = 200


async def report(request: Request) -> Response:
    """Store feedback; idempotent by `agent_record_id`."""
    deps = deps_of(request)
    body = await read_object(request, deps.options.small_limit_bytes)
    parsed = parse_report(body, tags_from(request.headers), deps.clock.now())
    scenario = await _scenario(request, deps, parsed.references)
    feedback = Report(
        id=parsed.id,
        scenario=scenario,
        created_at=parsed.created_at,
        references=parsed.references,
        score=parsed.score,
        feedback=parsed.feedback,
        metadata=parsed.metadata,
    )
    stored = await deps.log.report(feedback)
    eligible = await asyncio.to_thread(_eligibility, deps, feedback)
    if stored:
        _count(deps, feedback, eligible)
        if deps.tracer.on:
            reported(deps.tracer, feedback)
    if deps.learning is not None:
        deps.learning.wake(scenario)
    return answer(
        {"agent_record_id": feedback.id, "scenario": scenario, "request_type": "report", "eligible": eligible},
        headers={RECEIPT_HEADER: feedback.id},
    )


def parse_report(body: Mapping[str, Any], tags: Mapping[str, str], now: float) -> Report:
    """The report in a body, its scenario still open; `InvalidRequest` says what is wrong with which field."""
    only(body, _FIELDS)
    score = _score(body.get("score"))
    feedback = body.get("feedback")
    if feedback is not None and not isinstance(feedback, str | dict):
        raise InvalidRequest("feedback must be a string or an object", hint=f"it is {kind_of(feedback)}", param="feedback")
    references = _references(body)
    if score is None and feedback is None:
        raise InvalidRequest("a report needs a score or feedback", hint="send score, feedback, or both")
    metadata = dict(object_field(body, "metadata"))
    if not isinstance(metadata.get("eligible", True), bool):
        raise InvalidRequest("metadata.eligible must be true or false", param="metadata")
    if tags:
        metadata["tags"] = {**object_field(metadata, "tags"), **tags}
    identifier = record_id_field(body) or RecordId(new_id())
    return Report(identifier, "", now, references, score, feedback, metadata)


def _score(value: object) -> float | None:
    if value is None:
        return None
    # A bool is an int in Python, and True is no score.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest("score must be a finite number", hint=f"it is {kind_of(value)}", param="score")
    number = float(value)
    if not math.isfinite(number):
        raise InvalidRequest("score must be a finite number", param="score")
    return number


def _references(body: Mapping[str, Any]) -> tuple[RecordId, ...]:
    value = body.get("references")
    if not isinstance(value, list):
        raise InvalidRequest("references must be an array of receipts", hint=f"it is {kind_of(value)}", param="references")
    if len(value) > _MOST_REFERENCES:
        raise InvalidRequest(f"references holds more than {_MOST_REFERENCES} receipts", param="references")
    seen = set()
    for item in value:
        if not isinstance(item, str) or not 0 < len(item) <= _LONGEST_ID:
            raise InvalidRequest(
                "every reference must be a receipt", hint="receipts come in x-reef-agent-record-id", param="references"
            )
        if item in seen:
            raise InvalidReference(f"the receipt {item!r} is cited twice", reference=item)
        seen.add(item)
    return tuple(RecordId(item) for item in value)


def record_id_field(body: Mapping[str, Any]) -> RecordId | None:
    """The caller's own record id, when it gives one: 1 to 200 printable characters."""
    value = body.get("agent_record_id")
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_ID or not value.isprintable() or value != value.strip():
        raise InvalidRequest(f"agent_record_id must be 1 to {_LONGEST_ID} printable characters", param="agent_record_id")
    return RecordId(value)


async def _scenario(request: Request, deps: Deps, references: Sequence[RecordId]) -> str:
    """The scenario named, else that of the receipts, else the default one (created on first use)."""
    named = named_scenario(request)
    if named is None and references:
        return await asyncio.to_thread(_scenario_of_receipts, deps, references, principal_of(request).scenario)
    if references:
        # An unknown scenario holds no receipts: refused without creating it.
        assert named is not None
        if deps.log.scenarios.find(named) is None:
            raise InvalidReference(f"no record {references[0]!r} in scenario {named!r}", reference=references[0])
        return named
    name = named or deps.settings.default_scenario
    if name is None:
        raise InvalidRequest("a report that cites nothing needs the x-reef-scenario header")
    await ensure_scenario(request, name)
    return name


def _scenario_of_receipts(deps: Deps, references: Sequence[RecordId], bound: str | None) -> str:
    first: str | None = None
    for reference in references:
        found = deps.log.scenario_of(reference)
        if found is None or (bound is not None and found != bound):
            raise InvalidReference(f"there is no inference record {reference!r}", reference=reference)
        if first is not None and found != first:
            raise InvalidReference(f"the receipt {reference!r} belongs to another scenario than the first", reference=reference)
        first = found
    assert first is not None, "the caller has references"
    return first


def _eligibility(deps: Deps, feedback: Report) -> list[Eligibility]:
    """Per receipt in the report's order, as the recipe sees it; without a recipe nothing trains."""
    if opted_out(feedback):
        reasons: Mapping[str, str] = dict.fromkeys(feedback.references, "opted_out")
    elif deps.learning is None:
        reasons = dict.fromkeys(feedback.references, "no_recipe")
    else:
        reasons = deps.learning.eligibility(feedback.scenario, feedback.id)
    unknown = "unknown"
    return [
        Eligibility(reference, reasons.get(reference) == "eligible", reasons.get(reference, unknown))
        for reference in feedback.references
    ]


def _count(deps: Deps, feedback: Report, eligible: Sequence[Eligibility]) -> None:
    deps.metrics.records.inc(scenario=feedback.scenario, kind="report")
    for verdict in eligible:
        deps.metrics.reports.inc(scenario=feedback.scenario, reason=verdict.reason)


ROUTES: tuple[Route, ...] = (("POST", "/reef/report", report),)
