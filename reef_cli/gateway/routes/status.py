"""`GET /reef/status`: everything a person asks, on one page. Reads only; answers also while a job runs or the server drains.

The deployment's own facts (engine, storage, trainer) come from `deps.status`; scenarios, heads and counts are read here.
"""

import asyncio
from typing import Any

from reef_cli import __version__
from reef_cli.core.errors import EngineUnavailable
from reef_cli.experience.model import Scenario
from reef_cli.gateway.answers import answer
from reef_cli.gateway.deps import Deps, Route, deps_of
from reef_cli.gateway.http import Request, Response
from reef_cli.gateway.routes.scenarios import scenario_view


async def status(request: Request) -> Response:
    """The whole state."""
    deps = deps_of(request)
    facts = dict(deps.status())
    scenarios = await asyncio.to_thread(lambda: [_scenario(deps, row) for row in deps.log.scenarios.list()])
    body: dict[str, Any] = {
        "version": __version__,
        "ready": deps.ready() is None and not deps.draining.active,
        "not_ready": deps.ready(),
        "draining": deps.draining.active,
        "requests_running": deps.draining.running,
        "engine": {"kind": deps.engine_kind, "model": deps.model},
        "recipe": deps.recipe_name,
        "default_scenario": deps.settings.default_scenario,
        "implicit_scenarios": deps.settings.implicit_scenarios,
        "scenarios": scenarios,
    }
    return answer({**body, **facts})


def _scenario(deps: Deps, row: Scenario) -> dict[str, Any]:
    learning = deps.learning.state(row.name) if deps.learning is not None else {"state": "idle", "last_outcome": None}
    routing = deps.routing.policy(row.name) if deps.routing is not None else {}
    return {**scenario_view(deps, row), "served": _served(deps, row.name), "routing": routing, **learning}


def _served(deps: Deps, scenario: str) -> str | None:
    """The release requests get; None before the scenario was opened."""
    try:
        return deps.publishing.served(scenario).release_id
    except EngineUnavailable:
        return None


ROUTES: tuple[Route, ...] = (("GET", "/reef/status", status),)
