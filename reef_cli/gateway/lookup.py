"""Finding what a path names: scenario, release, record; or the 404 that says which of them is not there."""

import asyncio
from collections.abc import Mapping
from typing import Any

from reef_cli.core.errors import InvalidRequest, ReleaseNotFound, ScenarioNotFound
from reef_cli.core.ids import ReleaseId, release_step
from reef_cli.core.types import Release
from reef_cli.experience.model import Scenario
from reef_cli.gateway.bodies import text_field
from reef_cli.gateway.context import check_scenario
from reef_cli.gateway.deps import Deps, deps_of
from reef_cli.gateway.http import Request


def find_scenario(deps: Deps, name: str) -> Scenario:
    """A live scenario; `ScenarioNotFound` when there is none of that name."""
    check_scenario(name)
    scenario = deps.log.scenarios.find(name)
    if scenario is None:
        raise ScenarioNotFound(f"there is no scenario named {name!r}", hint="list them with GET /reef/scenarios")
    return scenario


def path_scenario(request: Request) -> Scenario:
    """The scenario of `/reef/scenarios/{scenario}/...`."""
    return find_scenario(deps_of(request), request.match_info["scenario"])


async def find_release(deps: Deps, scenario: str, release_id: str) -> Release:
    """A release of the chain; `ReleaseNotFound` also for text that is no release id."""
    if release_step(release_id) is None:
        raise ReleaseNotFound(f"scenario {scenario!r} has no release {release_id[:64]!r}", hint="list them: reef release list")
    return await asyncio.to_thread(deps.releases.get, scenario, ReleaseId(release_id))


def release_field(body: Mapping[str, Any], name: str, *, required: bool = False) -> ReleaseId | None:
    """A release id in a body. Text of another shape is an invalid request when it is an expectation, else simply not found."""
    value = text_field(body, name, longest=64, required=required)
    if value is None:
        return None
    if release_step(value) is None:
        if name == "expected_head":
            raise InvalidRequest("expected_head is not a release id", hint="release ids look like r3-0a1b2c3d", param=name)
        raise ReleaseNotFound(f"there is no release {value!r}", hint="list them: reef release list")
    return ReleaseId(value)
