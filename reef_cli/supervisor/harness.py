"""The HTTP routes of harnesses: trees and their releases, pages, adapters, install scripts, proposals.

`HarnessService` says what a harness is and admits edits; here requests become its calls, each in a thread since git and files
block, and an admitted edit takes the road of every release: store, then publish or hold through `Publishing`. The gateway
mounts `routes()` beside its own and asks `admits` for links that carry a page key in place of a token.
"""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reef_cli.config.paths import Home
from reef_cli.config.schema import Settings
from reef_cli.core.errors import ConfigError, ConflictError, Forbidden, HeadMoved, InvalidRequest, ScenarioNotFound
from reef_cli.core.ids import ReleaseId
from reef_cli.core.ports import Publishing
from reef_cli.core.types import Artifact, Draft, Operation, Release, Surface
from reef_cli.gateway.answers import answer, release_view
from reef_cli.gateway.auth import Principal
from reef_cli.gateway.bodies import only, read_object, text_field
from reef_cli.gateway.context import check_scenario, ensure_scenario, principal_of, scenario_of
from reef_cli.gateway.deps import Route, deps_of
from reef_cli.gateway.http import Handler, Request, Response
from reef_cli.harness.service import HarnessService, Proposal
from reef_cli.releases.service import ReleaseService

Queue = Callable[[str, Any, str | None, str, str], Awaitable[str]]
"""Takes scenario, mutations, base release, reason and author of an edit that is to be judged; gives the id it waits under."""

PAGE = "/reef/harness/releases/{step}/page"
SECRET_BYTES = 32
TRIES = 5
"""A proposal is carried over onto heads that others move meanwhile this often before its sender is told."""

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",  # the address holds the page's key
    "Cache-Control": "private, no-store",
    "X-Content-Type-Options": "nosniff",
}


class HarnessRoutes:
    """Handlers over one service. `review` holds proposals for a person.

    With a `queue` proposals are judged before they are released, unless their sender says otherwise.
    """

    def __init__(
        self,
        service: HarnessService,
        releases: ReleaseService,
        publishing: Publishing,
        *,
        review: bool,
        queue: Queue | None = None,
    ) -> None:
        self._service = service
        self._queue = queue
        self._releases = releases
        self._publishing = publishing
        self._review = review

    def routes(self) -> tuple[Route, ...]:
        """Rows for `Deps.extra_routes`."""
        return tuple((method, path, self._bound(name)) for method, path, name in TABLE)

    def _bound(self, name: str) -> Handler:
        handler: Handler = getattr(self, name)
        return handler

    def admits(self, request: Request) -> Principal | None:
        """The bearer of a page's key: may read that scenario's harness pages and nothing else. None for all other requests."""
        if request.route != PAGE:
            return None
        scenario, key = request.query.get("scenario", ""), request.query.get("key", "")
        if not key or not self._service.opens_page(scenario, key):
            return None
        return Principal("page", frozenset(), scenario=scenario)

    # -- reading -------------------------------------------------------------------------------------------------------

    async def manifest(self, request: Request) -> Response:
        """The harness in force (or `?release_id=`, also `?version=`): entries, requirements, facts of its release."""
        scenario = _known_scenario(request)
        wanted = request.query.get("release_id") or request.query.get("version")
        return answer(await asyncio.to_thread(self._service.manifest, scenario, wanted))

    async def releases(self, request: Request) -> Response:
        """Harness releases, oldest first, held ones included."""
        scenario = _known_scenario(request)
        rows = await asyncio.to_thread(self._service.releases, scenario)
        return answer({"scenario": scenario, "releases": rows, "versions": rows})

    async def page(self, request: Request) -> Response:
        """One release for people, as HTML. Opens with any token, or with the key of the links in the other answers."""
        scenario = _page_scenario(request)
        text = request.match_info["step"]
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise InvalidRequest("the step is a number", param="step")
        page = await asyncio.to_thread(self._service.page, scenario, int(text))
        return Response(text=page, content_type="text/html", headers=_PAGE_HEADERS)

    async def adapters(self, request: Request) -> Response:  # noqa: ARG002 - the same for everybody
        """The agents that can be installed."""
        return answer({"adapters": await asyncio.to_thread(self._service.adapters)})

    async def install(self, request: Request) -> Response:
        """The shell script that installs `?adapter=NAME[@VERSION]` with the harness in force (or `?release_id=`)."""
        adapter = request.query.get("adapter")
        if not adapter:
            raise InvalidRequest("adapter is missing", hint="?adapter=NAME, see GET /reef/harness/adapters", param="adapter")
        scenario = _known_scenario(request)
        script = await asyncio.to_thread(
            self._service.install_script, scenario, adapter, reached_address(request), request.query.get("release_id")
        )
        return Response(text=script, content_type="text/x-shellscript")

    # -- proposals -----------------------------------------------------------------------------------------------------

    async def propose(self, request: Request) -> Response:
        """Edit the harness: `{mutations, base_release_id?, reason?, judged?}`. 201 with the release, held under review.

        Where a recipe evolves harnesses the edit is judged first: 202 with the id under which it waits. `judged: false`
        releases it unjudged.
        """
        body = await read_object(request, deps_of(request).options.small_limit_bytes)
        only(body, ("mutations", "base_release_id", "reason", "judged"))
        if not isinstance(judged := body.get("judged", self._queue is not None), bool):
            raise InvalidRequest("judged is true or false", param="judged")
        if "mutations" not in body:
            raise InvalidRequest("mutations is missing", param="mutations")
        base = text_field(body, "base_release_id", longest=64)
        reason = text_field(body, "reason", longest=4000) or ""
        scenario = scenario_of(request)
        await ensure_scenario(request, scenario)
        author = f"user:{principal_of(request).name}"
        if judged:
            return answer(await self._enqueued(scenario, body["mutations"], base, reason, author), 202)
        for tried in range(1, TRIES + 1):
            try:
                release = await self._submit(scenario, body["mutations"], base, reason, author)
            except HeadMoved:
                if tried == TRIES:
                    raise
                continue
            return answer(await self._told(release), 201)
        raise AssertionError("the loop returns or raises")

    async def _enqueued(self, scenario: str, mutations: Any, base: str | None, reason: str, author: str) -> Mapping[str, Any]:
        """Queue an edit that is sound as far as can be told now."""
        if self._queue is None:
            raise ConflictError(
                "no recipe here judges proposals", hint="leave out judged, or serve a recipe that evolves harnesses"
            )
        edit = await asyncio.to_thread(self._service.propose, scenario, mutations, base, reason)
        base = edit.base or base
        identity = await self._queue(scenario, mutations, base, reason, author)
        return {"scenario": scenario, "agent_record_id": identity, "state": "queued", "changed": edit.wire()["changed"]}

    async def _submit(self, scenario: str, mutations: Any, base: str | None, reason: str, author: str) -> Release:
        """Admit against the present chain and append; `HeadMoved` when somebody else appended in between."""
        head = await asyncio.to_thread(self._releases.head, scenario, Surface.HARNESS)
        assert head is not None, "the scenario was made with its creation release"
        proposal = await asyncio.to_thread(self._service.propose, scenario, mutations, base, reason)
        artifact = await asyncio.to_thread(self._service.store, proposal.tree)
        move = self._publishing.hold if self._review else self._publishing.publish
        return await move(scenario, _draft(proposal, artifact, author), ReleaseId(head.release_id))

    async def _told(self, release: Release) -> Mapping[str, Any]:
        """The release as the catalogue shows it, with its page and what it changed."""
        head = await asyncio.to_thread(self._releases.head, release.scenario, Surface.HARNESS)
        rows = await asyncio.to_thread(self._service.releases, release.scenario)
        row = next(row for row in rows if row["release_id"] == release.release_id)
        return {**release_view(release, (head,)), "changed": row["changed"], "page": row["page"]}


TABLE: Sequence[tuple[str, str, str]] = (
    ("GET", "/reef/harness", "manifest"),
    ("GET", "/reef/harness/releases", "releases"),
    ("GET", "/reef/harness/versions", "releases"),
    ("GET", PAGE, "page"),
    ("GET", "/reef/harness/adapters", "adapters"),
    ("GET", "/reef/harness/install", "install"),
    ("POST", "/reef/harness/proposals", "propose"),
)
"""`(method, path, name of the handler)`."""


def described() -> tuple[tuple[str, str, Callable[..., Any]], ...]:
    """The rows with their unbound handlers, for the documentation."""
    return tuple((method, path, getattr(HarnessRoutes, name)) for method, path, name in TABLE)


def reached_address(request: Request) -> str:
    """The address by which this request reached us, as its sender wrote it: what a script made for it must call."""
    proto = request.headers.get("x-forwarded-proto", "http").partition(",")[0].strip().lower()
    host = request.headers.get("x-forwarded-host", request.host).partition(",")[0].strip()
    return f"{proto}://{host}"


def open_service(settings: Settings, home: Home, releases: ReleaseService) -> HarnessService:
    """The harnesses of a deployment, over its chains. Blocks: reads or makes the page secret."""
    return HarnessService(releases, page_secret=page_secret(home.page_secret), model=lambda _: settings.engine.name)


def open_harness(
    settings: Settings,
    service: HarnessService,
    releases: ReleaseService,
    publishing: Publishing,
    queue: Queue | None = None,
) -> HarnessRoutes:
    """The routes of a deployment."""
    review = settings.reef.publish == "review"
    return HarnessRoutes(service, releases, publishing, review=review, queue=queue)


def page_secret(file: Path) -> bytes:
    """The key of page links: 32 random bytes in a file of mode 0600, made on first start.

    Raises `ConfigError` when the file holds something else: a short key could be guessed.
    """
    if not file.exists():
        handle, draft = tempfile.mkstemp(dir=file.parent, prefix=".page-secret-")  # 0600; a crash never leaves half a secret
        with os.fdopen(handle, "wb") as out:
            out.write(secrets.token_bytes(SECRET_BYTES))
            out.flush()
            os.fsync(out.fileno())
        Path(draft).replace(file)
    if file.stat().st_mode & 0o077:
        file.chmod(0o600)
    secret = file.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{file} does not hold {SECRET_BYTES} bytes", hint="delete it; links to pages that were given out stop working"
        )
    return secret


def _draft(proposal: Proposal, artifact: Artifact, author: str) -> Draft:
    told = proposal.wire()
    names = ("reason", "base_release_id", "onto_release_id", "changed")
    evidence = {"proposal": True, **{name: told[name] for name in names}}
    return Draft(artifact.content_id, "harness", Surface.HARNESS, Operation.TRAINING, author, evidence)


def _known_scenario(request: Request) -> str:
    """The scenario asked about. One that is not there yet counts as empty where it would be made at its first use."""
    deps, scenario = deps_of(request), scenario_of(request)
    if deps.log.scenarios.find(scenario) is None and not deps.settings.implicit_scenarios:
        raise ScenarioNotFound(f"there is no scenario named {scenario!r}", hint="create it with POST /reef/scenarios")
    return scenario


def _page_scenario(request: Request) -> str:
    """The scenario of a page: that of the link, else the one named like everywhere."""
    named = request.query.get("scenario")
    if named is None:
        return scenario_of(request)
    bound = principal_of(request).scenario
    if bound is not None and bound != named:
        raise Forbidden("this token belongs to another scenario", hint="use that scenario's own token")
    return check_scenario(named)
