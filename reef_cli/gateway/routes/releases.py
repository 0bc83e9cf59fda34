"""`/reef/scenarios/{s}/releases` and what moves a release: promote, rollback, evaluate; and comparing two.

Every move goes through `Publishing`, the one road; nothing here touches the chain itself. Reads go to git in a thread, so a
slow disk never holds up inference.
"""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from reef_cli.core import surfaces
from reef_cli.core.errors import InvalidRequest, MissingDependency
from reef_cli.core.types import Release, Surface
from reef_cli.gateway.answers import answer, release_view
from reef_cli.gateway.bodies import only, read_object, text_field
from reef_cli.gateway.context import author_of
from reef_cli.gateway.deps import Deps, Route, deps_of
from reef_cli.gateway.http import Request, Response
from reef_cli.gateway.lookup import find_release, path_scenario, release_field


async def list_releases(request: Request) -> Response:
    """All releases of a scenario, newest first, held candidates included."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    chain = await asyncio.to_thread(deps.releases.list, scenario)
    heads = surfaces.heads(chain)
    told = {str(surface): release.release_id for surface, release in heads.items()}
    views = [release_view(release, heads.values()) for release in chain]
    return answer({"scenario": scenario, "heads": told, "releases": views})


async def get_release(request: Request) -> Response:
    deps = deps_of(request)
    scenario = path_scenario(request).name
    release = await find_release(deps, scenario, request.match_info["release"])
    return answer(release_view(release, await _heads(deps, scenario)))


async def diff_releases(request: Request) -> Response:
    """What changed from one release to another."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    before = await find_release(deps, scenario, request.match_info["before"])
    after = await find_release(deps, scenario, request.match_info["after"])
    changes = await asyncio.to_thread(deps.releases.diff, before, after)
    return answer({"scenario": scenario, "before": before.release_id, "after": after.release_id, "changes": changes})


async def promote(request: Request) -> Response:
    """Serve a held candidate: it becomes a new release at the head."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    body = await _body(request, ("release_id", "expected_head"))
    release_id = release_field(body, "release_id", required=True)
    assert release_id is not None
    expected = release_field(body, "expected_head")
    return _moved(await deps.publishing.promote(scenario, release_id, expected, author_of(request)))


async def rollback(request: Request) -> Response:
    """Serve an earlier release's content again (the previous content by default) as a new release.

    `surface` says of which head, where neither the release nor `expected_head` does.
    """
    deps = deps_of(request)
    scenario = path_scenario(request).name
    body = await _body(request, ("release_id", "expected_head", "surface"))
    release_id, expected = release_field(body, "release_id"), release_field(body, "expected_head")
    surface = _surface(body)
    return _moved(await deps.publishing.rollback(scenario, release_id, expected, author_of(request), surface=surface))


def _surface(body: Mapping[str, Any]) -> Surface | None:
    name = text_field(body, "surface")
    if name is not None and name not in surfaces.EVOLVING:
        raise InvalidRequest(f"surface is one of {', '.join(surfaces.EVOLVING)}", param="surface")
    return None if name is None else Surface(name)


async def dismiss(request: Request) -> Response:
    """Take a held candidate off the list without serving it; its commit is kept aside."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    release_id = release_field(await _body(request, ("release_id",)), "release_id", required=True)
    assert release_id is not None
    dismissed = await asyncio.to_thread(deps.releases.dismiss, scenario, release_id)
    return answer(release_view(dismissed, await _heads(deps, scenario)))


async def _heads(deps: Deps, scenario: str) -> Collection[Release]:
    return (await asyncio.to_thread(deps.releases.heads, scenario)).values()


async def evaluate(request: Request) -> Response:
    """Evaluate releases on a suite, or the chain since one of them; the answer is the evaluation's own."""
    deps = deps_of(request)
    scenario = path_scenario(request).name
    body = await _body(request, _EVALUATE)
    for name in _asked(body):
        await find_release(deps, scenario, name)
    if deps.evaluate is None:
        raise MissingDependency("this deployment cannot evaluate", hint="set evaluation.suite in serve.yaml")
    return answer(await deps.evaluate(scenario, body))


_SUBJECTS = ("release_id", "candidate", "since", "releases")
_EVALUATE = (*_SUBJECTS, "suite", "against", "split", "limit", "points", "again")


def _asked(body: Mapping[str, Any]) -> list[str]:
    """The releases an evaluation names. `InvalidRequest` unless one of the ways to name them is used, and used right."""
    if sum(body.get(name) is not None for name in _SUBJECTS) != 1:
        raise InvalidRequest(f"name what to evaluate: one of {', '.join(_SUBJECTS)}")
    texts = [text_field(body, name, longest=64) for name in ("release_id", "candidate", "since", "against")]
    text_field(body, "suite", longest=1024)
    if text_field(body, "split") not in (None, "all", "heldout", "development"):
        raise InvalidRequest("split is all, heldout or development", param="split")
    for name in ("limit", "points"):
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidRequest(f"{name} is a whole number above 0", param=name)
    several = body.get("releases", [])
    if not isinstance(several, list) or len(several) > 100 or not all(isinstance(name, str) for name in several):
        raise InvalidRequest("releases is a list of at most 100 release ids", param="releases")
    return [text for text in texts if text] + several


async def _body(request: Request, fields: tuple[str, ...]) -> dict[str, Any]:
    if request.has_body:
        body = await read_object(request, deps_of(request).options.small_limit_bytes)
    else:
        body = {}
    only(body, fields)
    return body


def _moved(head: Release) -> Response:
    return answer(release_view(head, (head,)))


_BASE = "/reef/scenarios/{scenario}"
ROUTES: tuple[Route, ...] = (
    ("GET", f"{_BASE}/releases", list_releases),
    ("GET", f"{_BASE}/releases/{{release}}", get_release),
    ("GET", f"{_BASE}/releases/{{before}}/diff/{{after}}", diff_releases),
    ("POST", f"{_BASE}/promote", promote),
    ("POST", f"{_BASE}/rollback", rollback),
    ("POST", f"{_BASE}/dismiss", dismiss),
    ("POST", f"{_BASE}/evaluate", evaluate),
)
