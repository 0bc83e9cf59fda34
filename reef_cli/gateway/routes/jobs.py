"""`/reef/scenarios/{s}/jobs` and `/commits`: what learning did and does, read from the ledger's tables.

A job's row is the truth whether or not learning runs in this process, so listing works in every deployment; stopping a job and
asking for a step need the worker.
"""

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import Any

import orjson

from reef_cli.core.errors import InvalidRequest, JobNotFound, MissingDependency
from reef_cli.gateway.answers import answer
from reef_cli.gateway.bodies import int_query, only, read_object, text_field
from reef_cli.gateway.deps import Deps, Route, deps_of
from reef_cli.gateway.http import Request, Response
from reef_cli.gateway.lookup import path_scenario

_COLUMNS = (
    *("id", "scenario", "recipe", "state", "outcome", "reason", "base_release_id", "release_id", "content_id"),
    *("created_at", "updated_at", "attempt", "detail", "candidate_id"),
)
_ENDED = ("settled", "failed")
_MADE = (
    "CASE WHEN state NOT IN ('settled', 'failed')"
    " OR (state = 'settled' AND outcome IN ('select', 'hold') AND NOT coalesce(json_extract(detail, '$.gate_only'), 0))"
    " OR EXISTS (SELECT 1 FROM job_events e WHERE e.job_id = jobs.id AND e.state = 'publishing') THEN release_id END"
)
"""A job has the id of its release from the start, and its trials are tagged with it (`candidate_id`); one that ended without
publishing or holding it made none."""
_FIELDS = ", ".join({"release_id": _MADE, "candidate_id": "release_id"}.get(name, name) for name in _COLUMNS)


async def list_jobs(request: Request) -> Response:
    """Jobs of a scenario, newest first. `?state=` keeps one state, `open` those still running."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    limit = int_query(request, "limit", 50, least=1, most=500)
    state = request.query.get("state")
    found = await asyncio.to_thread(_jobs, deps, scenario, limit, state)
    return answer({"scenario": scenario, "jobs": found})


async def get_job(request: Request) -> Response:
    """One job with all its transitions."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    return answer(await asyncio.to_thread(_job, deps, scenario, request.match_info["job"]))


async def list_commits(request: Request) -> Response:
    """Ended jobs, newest first: what was published, what was refused and why, what failed."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    limit = int_query(request, "limit", 50, least=1, most=500)
    return answer({"scenario": scenario, "commits": await asyncio.to_thread(_jobs, deps, scenario, limit, "ended")})


async def cancel_job(request: Request) -> Response:
    """Stop a running job; its samples return to the queue."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    job = await asyncio.to_thread(_job, deps, scenario, request.match_info["job"])
    if deps.cancel_job is None:
        raise MissingDependency("this deployment does not learn", hint="set reef.recipe in serve.yaml")
    if job["state"] not in _ENDED:
        await deps.cancel_job(scenario, job["job_id"])
    return answer(await asyncio.to_thread(_job, deps, scenario, job["job_id"]))


async def request_step(request: Request) -> Response:
    """`{kind: step|gate}`: take a step with what is queued, batch full or not (the default), or judge the head in full.

    202, because the job starts when its turn comes.
    """
    deps = deps_of(request)
    scenario = path_scenario(request).name
    body = await read_object(request, deps.options.small_limit_bytes) if request.has_body else {}
    only(body, ("kind",))
    kind = text_field(body, "kind", longest=16) or "step"
    if kind not in ("step", "gate"):
        raise InvalidRequest("kind must be 'step' or 'gate'", param="kind")
    if kind == "gate" and deps.request_gate is not None:
        return answer({"scenario": scenario, "requested": True, "job_id": await deps.request_gate(scenario)}, status=202)
    if kind == "gate" or deps.request_step is None:
        raise MissingDependency("this deployment does not learn", hint="set reef.recipe in serve.yaml")
    deps.request_step(scenario)
    return answer({"scenario": scenario, "requested": True}, status=202)


def _jobs(deps: Deps, scenario: str, limit: int, state: str | None) -> list[dict[str, Any]]:
    where, values = _state_clause(state)
    with deps.log.read() as connection:
        rows = connection.execute(
            f"SELECT {_FIELDS} FROM jobs WHERE scenario = ?{where} ORDER BY seq DESC LIMIT ?", (scenario, *values, limit)
        ).fetchall()
    return [_view(row) for row in rows]


def _state_clause(state: str | None) -> tuple[str, tuple[str, ...]]:
    if state is None:
        return "", ()
    if state == "open":
        return " AND state NOT IN (?, ?)", _ENDED
    if state == "ended":
        return " AND state IN (?, ?)", _ENDED
    if not state.isalpha():
        raise InvalidRequest("state must be a job state, 'open' or 'ended'", param="state")
    return " AND state = ?", (state,)


def _job(deps: Deps, scenario: str, job_id: str) -> dict[str, Any]:
    with deps.log.read() as connection:
        row = connection.execute(f"SELECT {_FIELDS} FROM jobs WHERE scenario = ? AND id = ?", (scenario, job_id)).fetchone()
        if row is None:
            raise JobNotFound(f"scenario {scenario!r} has no job {job_id[:64]!r}", hint="list them: reef jobs list")
        return {**_view(row), "transitions": _transitions(connection, job_id)}


def _transitions(connection: sqlite3.Connection, job_id: str) -> list[dict[str, Any]]:
    rows = connection.execute("SELECT at, state, detail FROM job_events WHERE job_id = ? ORDER BY seq", (job_id,))
    return [{"at": at, "state": state, "detail": orjson.loads(detail)} for at, state, detail in rows]


def _view(row: Sequence[Any]) -> dict[str, Any]:
    view = dict(zip(("job_id", *_COLUMNS[1:]), row, strict=True))
    view["detail"] = orjson.loads(view["detail"])
    return view


_BASE = "/reef/scenarios/{scenario}"
ROUTES: tuple[Route, ...] = (
    ("GET", f"{_BASE}/jobs", list_jobs),
    ("POST", f"{_BASE}/jobs", request_step),
    ("GET", f"{_BASE}/jobs/{{job}}", get_job),
    ("POST", f"{_BASE}/jobs/{{job}}/cancel", cancel_job),
    ("GET", f"{_BASE}/commits", list_commits),
)
