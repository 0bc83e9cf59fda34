"""`/reef/scenarios/{s}/records`, `/sessions`, and the import of existing records.

Pages are light rows; one record comes whole, its request body as the client sent it. A batch is stored whole or not at all, and
re-sending it changes nothing: records are recognised by id and content.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from reef_cli.core.errors import BodyTooLarge, InvalidReference, InvalidRequest, RecordNotFound
from reef_cli.core.types import Inference, Report
from reef_cli.experience.codec import Record, from_document, to_document
from reef_cli.gateway.answers import answer
from reef_cli.gateway.bodies import int_query, kind_of, parse_json, parse_object, read_body
from reef_cli.gateway.context import RECEIPT_HEADER, ensure_scenario, scenario_of
from reef_cli.gateway.deps import Deps, Route, deps_of
from reef_cli.gateway.http import Request, Response
from reef_cli.gateway.lookup import path_scenario

_KINDS = ("inference", "report", "train")
_MOST_BATCH = 1000
_ALIASES = {"agent_record_id": "id", "request_type": "kind"}


async def list_records(request: Request) -> Response:
    """A page of rows after `after_sequence`, oldest first; `order=newest` turns it round. `next` resumes."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    after = int_query(request, "after_sequence", 0, most=2**62)
    limit = int_query(request, "limit", 100, least=1, most=1000)
    kind = request.query.get("request_type")
    if kind is not None and kind not in _KINDS:
        raise InvalidRequest(f"request_type must be one of {', '.join(_KINDS)}", param="request_type")
    newest = _order(request)
    rows = await asyncio.to_thread(
        lambda: deps.log.page(scenario, after_sequence=after, limit=limit, kind=kind, newest=newest)  # type: ignore[arg-type]
    )
    following = rows[-1].sequence if rows and len(rows) == limit and not newest else None
    return answer({"scenario": scenario, "records": rows, "next": following})


def _order(request: Request) -> bool:
    order = request.query.get("order", "oldest")
    if order not in ("oldest", "newest"):
        raise InvalidRequest("order must be 'oldest' or 'newest'", param="order")
    return order == "newest"


async def get_record(request: Request) -> Response:
    """One whole record: the same document that import takes."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    identifier = request.match_info["record"]
    record = await asyncio.to_thread(deps.log.get, scenario, identifier)
    if record is None:
        raise RecordNotFound(f"scenario {scenario!r} has no record {identifier[:64]!r}", hint="list them: reef records list")
    return answer(to_document(record))


async def list_sessions(request: Request) -> Response:
    """The scenario's sessions, the latest first."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    limit = int_query(request, "limit", 50, least=1, most=1000)
    before = request.query.get("before")
    return answer({"scenario": scenario, "sessions": await asyncio.to_thread(deps.log.sessions, scenario, limit, before)})


async def get_session(request: Request) -> Response:
    """One session as a tree of branches."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    session = request.match_info["session"]
    return answer(await asyncio.to_thread(deps.log.session_tree, scenario, session))


async def _read(request: Request, limit: int) -> bytes:
    try:
        return await read_body(request, limit)
    except BodyTooLarge as error:
        error.hint = "raise reef.import_limit_bytes on the server"
        raise


async def import_record(request: Request) -> Response:
    """Store one existing record."""
    deps = deps_of(request)
    document = parse_object(await _read(request, deps.settings.import_limit_bytes))
    scenario = scenario_of(request)
    record = _record(document, scenario, deps.clock.now())
    stored = await _store(request, deps, scenario, [record])
    return answer(
        {**_receipt(document, record), "stored": bool(stored)},
        headers={RECEIPT_HEADER: record.id},
    )


async def import_batch(request: Request) -> Response:
    """Store 1 to 1000 existing records, all or none: an array, or `{"records": [...]}`."""
    deps = deps_of(request)
    body = parse_json(await _read(request, deps.settings.import_limit_bytes))
    documents = body.get("records") if isinstance(body, dict) else body
    if not isinstance(documents, list):
        raise InvalidRequest(
            "the body must be an array of records, or an object with records", hint=f"it is {kind_of(documents)}"
        )
    if not 1 <= len(documents) <= _MOST_BATCH:
        raise InvalidRequest(f"a batch holds 1 to {_MOST_BATCH} records, this one {len(documents)}")
    scenario = scenario_of(request)
    now = deps.clock.now()
    records = [_numbered(document, scenario, now, index) for index, document in enumerate(documents)]
    stored = await _store(request, deps, scenario, records)
    return answer(
        {
            "scenario": scenario,
            "agent_record_ids": [record.id for record in records],
            "records": [_receipt(document, record) for document, record in zip(documents, records, strict=True)],
            "stored": stored,
            "received": len(records),
        }
    )


def _numbered(document: Any, scenario: str, now: float, index: int) -> Record:
    """A record of a batch; what is wrong with it names its place."""
    try:
        return _record(document, scenario, now)
    except InvalidRequest as error:
        raise InvalidRequest(f"record {index}: {error.message}", why=error.why, hint=error.hint, index=index) from error


def _record(document: Any, scenario: str, now: float) -> Record:
    """The record in a document, in the names of this API or of an export. The time defaults to now, and the scenario is the
    request's, so that an export can be moved to another one."""
    if not isinstance(document, Mapping):
        raise InvalidRequest("a record must be a JSON object", hint=f"it is {kind_of(document)}")
    fields = {_ALIASES.get(name, name): value for name, value in document.items()}
    if len(fields) != len(document):
        raise InvalidRequest("a record names its id or its kind twice")
    fields.setdefault("created_at", now)
    return from_document(fields, scenario)


def _receipt(document: Mapping[str, Any], record: Record) -> dict[str, str]:
    """What acknowledges one imported record."""
    return {"agent_record_id": record.id, "request_type": _kind(document), "scenario": record.scenario}


def _kind(document: Mapping[str, Any]) -> str:
    return str(document.get("request_type") or document.get("kind") or "inference")


async def _store(request: Request, deps: Deps, scenario: str, records: list[Record]) -> int:
    """Store all or none; how many were new."""
    if deps.log.scenarios.find(scenario) is None:
        _check_self_contained(records)
        await ensure_scenario(request, scenario)
    stored = sum(await deps.log.import_batch(records))
    if stored and deps.learning is not None:
        deps.learning.wake(scenario)
    return stored


def _check_self_contained(records: Sequence[Record]) -> None:
    """What a new scenario is given must cite only itself; checked here so that a refused batch makes no scenario."""
    seen = set()
    for record in records:
        if isinstance(record, Report):
            for reference in record.references:
                if reference not in seen:
                    raise InvalidReference(f"there is no inference record {reference!r} before the report", reference=reference)
        elif isinstance(record, Inference):
            seen.add(record.id)


_BASE = "/reef/scenarios/{scenario}"
ROUTES: tuple[Route, ...] = (
    ("GET", f"{_BASE}/records", list_records),
    ("GET", f"{_BASE}/records/{{record}}", get_record),
    ("GET", f"{_BASE}/sessions", list_sessions),
    ("GET", f"{_BASE}/sessions/{{session}}", get_session),
    ("POST", "/reef/records", import_record),
    ("POST", "/reef/records/batch", import_batch),
)
