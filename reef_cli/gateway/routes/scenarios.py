"""`/reef/scenarios`: list, create, change the training mode, pause, resume, archive, and what a scenario's reports may hold."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from reef_cli.core.errors import InvalidRequest, JobOut, ReleaseNotFound
from reef_cli.core.types import Surface
from reef_cli.experience.model import Scenario
from reef_cli.gateway.answers import answer
from reef_cli.gateway.bodies import only, read_object, text_field
from reef_cli.gateway.context import check_scenario, create_scenario
from reef_cli.gateway.deps import Deps, Route, deps_of
from reef_cli.gateway.http import Request, Response
from reef_cli.gateway.lookup import find_release, path_scenario

_MODES = ("auto", "manual", "hybrid")
_OPEN_JOBS = "SELECT id FROM jobs WHERE scenario = ? AND state NOT IN ('settled', 'failed') LIMIT 1"


async def list_scenarios(request: Request) -> Response:
    """All live scenarios with their counts and heads."""
    deps = deps_of(request)
    return answer(
        {"scenarios": await asyncio.to_thread(lambda: [scenario_view(deps, row) for row in deps.log.scenarios.list()])}
    )


async def create(request: Request) -> Response:
    """Make a scenario: 201 when it is new, 200 when it was there. `release_id` says which release it must then serve."""
    deps = deps_of(request)
    body = await read_object(request, deps.options.small_limit_bytes)
    only(body, ("name", "release_id", "training_mode"))
    name = check_scenario(text_field(body, "name", longest=64, required=True) or "")
    mode = _mode(body)
    wanted = text_field(body, "release_id", longest=64)
    existed = deps.log.scenarios.find(name) is not None
    if wanted is not None:
        if not existed:
            raise ReleaseNotFound(f"a new scenario has no release {wanted!r}", hint="create it without release_id")
        await find_release(deps, name, wanted)
    if not existed:
        await create_scenario(request, name)
    if mode is not None:
        await deps.log.scenarios.set_mode(name, mode)
    return await _answer(deps, name, 200 if existed else 201)


async def update(request: Request) -> Response:
    """Change the training mode, for good."""
    deps = deps_of(request)
    name = path_scenario(request).name
    body = await read_object(request, deps.options.small_limit_bytes)
    only(body, ("training_mode",))
    mode = _mode(body)
    if mode is None:
        raise InvalidRequest("training_mode is missing", hint=f"it is one of {', '.join(_MODES)}", param="training_mode")
    await deps.log.scenarios.set_mode(name, mode)
    _wake(deps, name)
    return await _answer(deps, name)


async def pause(request: Request) -> Response:
    """No new job starts; serving and recording go on."""
    return await _switch(request, deps_of(request).log.scenarios.pause)


async def resume(request: Request) -> Response:
    return await _switch(request, deps_of(request).log.scenarios.resume)


async def delete(request: Request) -> Response:
    """Archive: its files stay, its name is free again. 409 while a job is out."""
    deps = deps_of(request)
    name = path_scenario(request).name
    running = await asyncio.to_thread(_running_job, deps, name)
    if running is not None:
        raise JobOut(f"scenario {name!r} has a job under way", hint="wait for it, or cancel it", job_id=running)
    if deps.delete_scenario is not None:
        await deps.delete_scenario(name)
    else:
        await deps.log.scenarios.archive(name)
        await asyncio.to_thread(deps.releases.archive, name)
    return answer({"scenario": name, "archived": True})


async def contract(request: Request) -> Response:
    """What a report of this scenario may hold, and what its recipe makes of it."""
    deps = deps_of(request)
    scenario = path_scenario(request)
    recipe = deps.contract(scenario.name) if deps.contract is not None else {}
    return answer(
        {
            "scenario": scenario.name,
            "recipe": scenario.recipe,
            "training_mode": scenario.mode,
            "report": {
                "score": "finite number, optional",
                "feedback": "string or object, optional; one of score and feedback is needed",
                "references": "array of receipts of this scenario, in the order of the conversation",
                "metadata": "object, optional; eligible: false keeps the feedback from training",
                "agent_record_id": "your own id, optional; makes the report idempotent",
            },
            **recipe,
        }
    )


def scenario_view(deps: Deps, row: Scenario) -> dict[str, Any]:
    """A scenario as lists show it. Blocking (reads the database and git); call it in a thread."""
    heads = deps.releases.heads(row.name)
    head = heads.get(Surface.WEIGHTS)
    return {
        "name": row.name,
        "recipe": row.recipe,
        "training_mode": row.mode,
        "paused": row.paused,
        "created_at": row.created_at,
        "head": None if head is None else head.release_id,
        "step": None if head is None else head.step,
        "heads": {str(surface): release.release_id for surface, release in heads.items()},
        "counts": deps.log.counts(row.name),
    }


async def _answer(deps: Deps, name: str, status: int = 200) -> Response:
    row = deps.log.scenarios.get(name)
    return answer(await asyncio.to_thread(scenario_view, deps, row), status=status)


async def _switch(request: Request, action: Callable[[str], Awaitable[Any]]) -> Response:
    deps = deps_of(request)
    name = path_scenario(request).name
    await action(name)
    _wake(deps, name)
    return await _answer(deps, name)


def _wake(deps: Deps, name: str) -> None:
    if deps.learning is not None:
        deps.learning.wake(name)


def _mode(body: dict[str, Any]) -> Any:
    mode = text_field(body, "training_mode")
    if mode is not None and mode not in _MODES:
        raise InvalidRequest(f"training_mode must be one of {', '.join(_MODES)}", param="training_mode")
    return mode


def _running_job(deps: Deps, scenario: str) -> str | None:
    with deps.log.read() as connection:
        row = connection.execute(_OPEN_JOBS, (scenario,)).fetchone()
    return None if row is None else str(row[0])


_ONE = "/reef/scenarios/{scenario}"
ROUTES: tuple[Route, ...] = (
    ("GET", "/reef/scenarios", list_scenarios),
    ("POST", "/reef/scenarios", create),
    ("POST", f"{_ONE}/update", update),
    ("POST", f"{_ONE}/pause", pause),
    ("POST", f"{_ONE}/resume", resume),
    ("DELETE", _ONE, delete),
    ("GET", f"{_ONE}/contract", contract),
)
