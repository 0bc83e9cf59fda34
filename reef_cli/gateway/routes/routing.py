"""`/reef/scenarios/{s}/routing`: which releases serve which share of a scenario's traffic.

Without a routing policy the head serves everything, which is what GET then says. PUT checks the shape here (shares are finite,
not negative, and sum to 1; every release exists) and leaves the rest to the deployment.
"""

import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from reef_cli.core.errors import InvalidRequest, MissingDependency
from reef_cli.gateway.answers import answer, release_view
from reef_cli.gateway.bodies import kind_of, object_field, only, read_object
from reef_cli.gateway.deps import Route, deps_of
from reef_cli.gateway.lookup import find_release, path_scenario

_TOLERANCE = 1e-6


async def get_routing(request: web.Request) -> web.Response:
    """The policy in force."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    if deps.routing is not None:
        return answer({"scenario": scenario, **deps.routing(scenario)})
    served = deps.publishing.served(scenario)
    return answer({"scenario": scenario, "policy": "head", "shares": {served.release_id: 1.0}})


async def put_routing(request: web.Request) -> web.Response:
    """Set shares per release (canary), a shadow, or a pin."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    body = await read_object(request, deps.options.small_limit_bytes)
    only(body, ("shares", "pin", "shadow"))
    shares = check_shares(body)
    for release_id in {*shares, *(value for name in ("pin", "shadow") if (value := _release_name(body, name)))}:
        await find_release(deps, scenario, release_id)
    if deps.set_routing is None:
        raise MissingDependency("this deployment serves the head only", hint="pin single requests with x-reef-release-id")
    release = await deps.set_routing(scenario, body)
    return answer({"scenario": scenario, "release": None if release is None else release_view(release, release), **body})


def check_shares(body: Mapping[str, Any]) -> dict[str, float]:
    """The shares of a policy, checked; empty when the policy is a pin. `InvalidRequest` says what is wrong."""
    shares = object_field(body, "shares")
    if bool(shares) == (body.get("pin") is not None):
        raise InvalidRequest("a routing policy has either shares or a pin")
    for value in shares.values():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest("every share must be a number", hint=f"one is {kind_of(value)}", param="shares")
        if not math.isfinite(value) or value < 0:
            raise InvalidRequest("every share must be 0 or more", param="shares")
    if shares and abs(sum(shares.values()) - 1) > _TOLERANCE:
        raise InvalidRequest("the shares must sum to 1", param="shares")
    return shares


def _release_name(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a release id", hint=f"it is {kind_of(value)}", param=name)
    return value


ROUTES: tuple[Route, ...] = (
    ("GET", "/reef/scenarios/{scenario}/routing", get_routing),
    ("PUT", "/reef/scenarios/{scenario}/routing", put_routing),
)
