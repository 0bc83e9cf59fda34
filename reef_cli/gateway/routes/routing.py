"""`/reef/scenarios/{s}/routing`: which releases serve which share of a scenario's traffic, and what shadows answered.

Without a policy the head serves everything, which is what GET then says. A policy is itself a release; whoever sets one may say
which policy was seen before (`expected_head`), and loses with 409 when another was set meanwhile.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from reef_cli.core.errors import InvalidRequest, MissingDependency
from reef_cli.core.ids import release_step
from reef_cli.core.types import Release, Surface
from reef_cli.gateway.answers import answer, release_view
from reef_cli.gateway.bodies import int_query, read_object, text_field
from reef_cli.gateway.context import author_of
from reef_cli.gateway.deps import Deps, Route, deps_of
from reef_cli.gateway.http import Request, Response
from reef_cli.gateway.lookup import path_scenario
from reef_cli.releases import routing


async def get_routing(request: Request) -> Response:
    """The policy in force, who serves which share, and how a canary does."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    if deps.routing is not None:
        return answer({"scenario": scenario, **await deps.routing.view(scenario)})
    served = deps.publishing.served(scenario)
    return answer({"scenario": scenario, "policy": {}, "release": None, "shares": {served.release_id: 1.0}})


async def list_policies(request: Request) -> Response:
    """All routing releases of a scenario, newest first, each with its policy."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    return answer({"scenario": scenario, "releases": await asyncio.to_thread(_policies, deps, scenario)})


async def put_routing(request: Request) -> Response:
    """Set shares per release (canary), a shadow, or a pin: `{shares | pin, shadow?, auto?, expected_head?}`."""
    deps = deps_of(request)
    body = await read_object(request, deps.options.small_limit_bytes)
    expected = _expected(body)
    body.pop("expected_head", None)
    policy = routing.parse(body, deps.routing.auto if deps.routing else None)
    if policy == routing.EMPTY:
        raise InvalidRequest("the policy is empty", hint="to let the head serve everything again: DELETE")
    return await _set(request, policy, expected)


async def delete_routing(request: Request) -> Response:
    """Let the head serve everything again, by a new routing release. `?expected_head=` as in PUT."""
    return await _set(request, routing.EMPTY, _expected(request.query))


async def shadows(request: Request) -> Response:
    """What shadows answered lately, beside what the clients got. Newest first."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    limit = int_query(request, "limit", 50, least=1, most=500)
    if deps.routing is None:
        raise _no_routing()
    return answer({"scenario": scenario, **await asyncio.to_thread(deps.routing.shadows, scenario, limit)})


async def _set(request: Request, policy: routing.Policy, expected: str | None) -> Response:
    deps = deps_of(request)
    scenario = path_scenario(request).name
    if deps.routing is None:
        raise _no_routing()
    release = await deps.routing.set(scenario, policy, expected, author_of(request))
    return answer({"scenario": scenario, "policy": policy.wire(), "release": release_view(release, (release,))})


def _expected(body: Mapping[str, Any]) -> str | None:
    value = text_field(body, "expected_head", longest=64)
    if value is not None and value != routing.NO_POLICY and release_step(value) is None:
        hint = f"it is the id of a routing release, or {routing.NO_POLICY!r}"
        raise InvalidRequest("expected_head is not a release id", hint=hint, param="expected_head")
    return value


def _policies(deps: Deps, scenario: str) -> list[dict[str, Any]]:
    chain: list[Release] = deps.releases.list(scenario, Surface.ROUTING)
    head = chain[0] if chain else None
    return [{**release_view(release, (head,)), "policy": deps.releases.policy(release).wire()} for release in chain]


def _no_routing() -> MissingDependency:
    return MissingDependency("this deployment serves the head only", hint="pin single requests with x-reef-release-id")


ROUTES: tuple[Route, ...] = (
    ("GET", "/reef/scenarios/{scenario}/routing", get_routing),
    ("PUT", "/reef/scenarios/{scenario}/routing", put_routing),
    ("DELETE", "/reef/scenarios/{scenario}/routing", delete_routing),
    ("GET", "/reef/scenarios/{scenario}/routing/releases", list_policies),
    ("GET", "/reef/scenarios/{scenario}/routing/shadows", shadows),
)
