"""What a request is about: who asks, for which scenario and session, pinned to which release, under which receipt.

The application's edge has authenticated before any handler runs and left a `Facts` on the request. An inference
handler parses its body first and then calls `open_context(request, body)`, so that a bad body creates no scenario:
the call resolves the scenario and, unless creation is switched off, creates it on first use. `read_context` does the
same without ever creating. Neither reads the body.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import orjson
from multidict import CIMultiDict

from reef_cli.core.errors import Forbidden, InvalidRequest, InvalidScenario, ScenarioNotFound
from reef_cli.core.ids import RecordId, ReleaseId, new_id, release_step, valid_scenario
from reef_cli.core.values import immutable
from reef_cli.gateway.auth import Principal
from reef_cli.gateway.deps import deps_of
from reef_cli.gateway.http import Request

SCENARIO_HEADER = "x-reef-scenario"
RELEASE_HEADER = "x-reef-release-id"
CAPTURE_HEADER = "x-reef-capture"
RECEIPT_HEADER = "x-reef-agent-record-id"
WEIGHT_HEADER = "x-reef-weight-version"
LEFT_OUT_HEADER = "x-reef-left-out"
TAG_PREFIX = "x-reef-tag-"
_SESSION_HEADERS = (
    "x-reef-session",
    "x-reef-tag-session",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "x-session-id",
    "x-session-affinity",
)
_SESSION_LIMIT = 256
_HINT_LIMIT, _MOST_HINTS = 64, 32
_unprintable = re.compile(r"[^!-+\--~]")
_SCENARIO_PATH = re.compile(r"/+s/([^/]*)/+(v1/.*)")


@dataclass(slots=True)
class Facts:
    """What the middleware knows of a request; `upstream_s` grows while a handler waits for the engine or provider."""

    request_id: str
    started: float
    dialect: str
    principal: Principal | None = None
    upstream_s: float = 0.0
    left_out: tuple[str, ...] = ()
    """What of an inference body had no effect: hints and tools that only a provider of its dialect understands."""


@immutable
class RequestContext:
    """One inference or report request, resolved. `started` is monotonic seconds; `receipt` is minted before the call."""

    request_id: str
    principal: Principal
    scenario: str
    session: str | None
    tags: Mapping[str, str]
    pin: ReleaseId | None
    capture: bool
    receipt: RecordId
    started: float
    facts: Facts = field(compare=False, repr=False)

    def waited(self, seconds: float) -> None:
        """Count time spent waiting for the engine or provider, so that the gateway's own overhead can be told apart."""
        self.facts.upstream_s += seconds

    def leave_out(self, names: Iterable[str]) -> None:
        """Say in the answer's headers, and in the record, that these had no effect."""
        self.facts.left_out = tuple(dict.fromkeys(_unprintable.sub("?", name)[:_HINT_LIMIT] for name in names))[:_MOST_HINTS]


def facts_of(request: Request) -> Facts:
    """The middleware's facts; every request that reached a handler has them."""
    facts: Facts = request.facts
    return facts


def principal_of(request: Request) -> Principal:
    principal = facts_of(request).principal
    assert principal is not None, "the authentication middleware runs before every handler that asks"
    return principal


def author_of(request: Request) -> str:
    """Who moved a release, as the chain records it: the caller's token digest, never the token."""
    return f"user:{principal_of(request).name}"


def split_scenario_path(path: str) -> tuple[str | None, str]:
    """`(scenario, rest)` of `/s/<scenario>/v1/...`, else `(None, path)`. Doubled slashes are tolerated everywhere but in
    place of the name, where they mean a blank one. `path` is raw; the name comes unquoted."""
    match = _SCENARIO_PATH.fullmatch(path)
    return (unquote(match[1]), f"/{match[2]}") if match else (None, path)


def session_from(headers: Mapping[str, str], body: Mapping[str, Any] | None = None) -> str | None:
    """The session a request names: our headers, then agents' own, then `metadata.user_id`, then `prompt_cache_key`."""
    for name in _SESSION_HEADERS:
        value = headers.get(name)
        if value is not None and (value := value.strip()):
            return value[:_SESSION_LIMIT]
    if body is None:
        return None
    metadata = body.get("metadata")
    found = _session_of_user(metadata.get("user_id")) if isinstance(metadata, dict) else None
    if found is None:
        key = body.get("prompt_cache_key")
        found = key.strip() if isinstance(key, str) else None
    return found[:_SESSION_LIMIT] if found else None


def _session_of_user(user_id: Any) -> str | None:
    """Claude Code's session: JSON `{..., "session_id": ...}` in `metadata.user_id`, in earlier versions `..._session_<id>`."""
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        try:
            parsed = orjson.loads(user_id)
        except orjson.JSONDecodeError:
            return None
        value = parsed.get("session_id") if isinstance(parsed, dict) else None
        return value if isinstance(value, str) and value else None
    _, mark, session = user_id.rpartition("_session_")
    return session if mark and session else None


def tags_from(headers: CIMultiDict[str]) -> dict[str, str]:
    """`x-reef-tag-<name>: value` headers as `{name: value}`; names in lower case, empty names and values dropped."""
    tags = {}
    for name, value in headers.items():
        if name[0] in "xX" and (lowered := name.lower()).startswith(TAG_PREFIX):
            label, text = lowered[len(TAG_PREFIX) :], value.strip()
            if label and text:
                tags[label] = text
    return tags


def named_scenario(request: Request) -> str | None:
    """The scenario a request names by path, header or bound token; None when it names none.

    Raises `InvalidScenario` for a blank or malformed name or two that differ, `Forbidden` when the token is bound to another.
    """
    path = request.path
    by_path = split_scenario_path(path)[0] if path.startswith(("/s/", "//")) else None
    by_header = request.headers.get(SCENARIO_HEADER)
    named = None
    for given in (by_path, by_header):
        if given is not None:
            name = check_scenario(given.strip())
            if named is not None and name != named:
                raise InvalidScenario(
                    "the path and the x-reef-scenario header name different scenarios", hint="send only one of them"
                )
            named = name
    bound = principal_of(request).scenario
    if named is not None and bound is not None and named != bound:
        raise Forbidden("this token belongs to another scenario", hint="use that scenario's own token, or an administrator's")
    return bound if named is None else named


def check_scenario(name: str) -> str:
    """The name itself, or `InvalidScenario`."""
    if not name.strip():
        raise InvalidScenario("the scenario name is blank", hint="send x-reef-scenario: <name>, or leave the header out")
    if not valid_scenario(name):
        raise InvalidScenario(
            "the scenario name is malformed",
            why="names are 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit",
        )
    return name


def scenario_of(request: Request) -> str:
    """The scenario named, or the configured default; `InvalidScenario` when neither is there."""
    name = named_scenario(request) or deps_of(request).settings.default_scenario
    if name is None:
        raise InvalidScenario("the x-reef-scenario header is missing", hint="send x-reef-scenario: <name>")
    return name


def pinned_release(headers: Mapping[str, str]) -> ReleaseId | None:
    """The release `x-reef-release-id` pins; whether it exists is `Publishing.resolve`'s to say."""
    value = headers.get(RELEASE_HEADER)
    if value is None:
        return None
    if release_step(value.strip()) is None:
        raise InvalidRequest("x-reef-release-id is not a release id", hint="release ids look like r3-0a1b2c3d")
    return ReleaseId(value.strip())


def captures(headers: Mapping[str, str]) -> bool:
    """Whether to record: `x-reef-capture: off` says no."""
    given = headers.get(CAPTURE_HEADER)
    if given is None:
        return True
    value = given.strip().lower()
    if value not in ("on", "off"):
        raise InvalidRequest("x-reef-capture must be 'on' or 'off'")
    return value == "on"


async def ensure_scenario(request: Request, scenario: str) -> None:
    """Create the scenario on first use; `ScenarioNotFound` when that is switched off."""
    deps = deps_of(request)
    if deps.log.scenarios.find(scenario) is not None:
        return
    if not deps.settings.implicit_scenarios:
        raise ScenarioNotFound(
            f"there is no scenario named {scenario!r}", hint="create it with POST /reef/scenarios, or check the spelling"
        )
    await create_scenario(request, scenario)


async def create_scenario(request: Request, scenario: str) -> None:
    """Make a scenario everywhere; idempotent."""
    deps = deps_of(request)
    if deps.create_scenario is not None:
        await deps.create_scenario(scenario)
    else:
        await deps.log.scenarios.ensure(scenario, deps.recipe_name, mode=deps.settings.training_mode)


def read_context(request: Request, body: Mapping[str, Any] | None = None) -> RequestContext:
    """Who, which scenario, which session, which pin; creates nothing."""
    facts = facts_of(request)
    headers = request.headers
    principal = principal_of(request)
    tags, session = tags_from(headers), session_from(headers, body)
    if principal.episode is not None:
        # Whatever the agent inside says of itself: what an episode makes is a trial of that episode.
        tags["trial"] = principal.episode
        session = session or principal.episode
    return RequestContext(
        request_id=facts.request_id,
        principal=principal,
        scenario=scenario_of(request),
        session=session,
        tags=tags,
        pin=pinned_release(headers),
        capture=captures(headers),
        receipt=RecordId(new_id()),
        started=facts.started,
        facts=facts,
    )


async def open_context(request: Request, body: Mapping[str, Any] | None = None) -> RequestContext:
    """`read_context`, and the scenario exists afterwards (created on first use, or 404)."""
    context = read_context(request, body)
    if deps_of(request).log.scenarios.find(context.scenario) is None:
        await ensure_scenario(request, context.scenario)
    return context
