"""`POST /reef/train`: a person's instruction in words, screened and stored as a record of kind `train`.

It never creates a scenario, and it is refused where learning starts by itself, because nobody would read it there.
"""

from typing import Any

from reef_cli.core.errors import InvalidRequest, ModeRefused
from reef_cli.gateway.answers import answer
from reef_cli.gateway.bodies import kind_of, only, read_object, text_field
from reef_cli.gateway.context import RECEIPT_HEADER, scenario_of, session_from, tags_from
from reef_cli.gateway.deps import Route, deps_of
from reef_cli.gateway.http import Request, Response
from reef_cli.gateway.lookup import find_release, find_scenario
from reef_cli.gateway.routes.reports import record_id_field
from reef_cli.gateway.screening import check_requires, screen

_FIELDS = ("text", "session", "release_id", "requires", "agent_record_id")


async def train(request: Request) -> Response:
    """Store an instruction and ask for a step."""
    deps = deps_of(request)
    body = await read_object(request, deps.options.small_limit_bytes)
    only(body, _FIELDS)
    text = body.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("text must be a string", hint=f"it is {kind_of(text)}", param="text")
    screen(text)
    requires = check_requires(body.get("requires"))
    session = text_field(body, "session") or session_from(request.headers)
    release_id = text_field(body, "release_id", longest=64)
    record_id = record_id_field(body)
    scenario = find_scenario(deps, scenario_of(request))
    if scenario.mode == "auto":
        raise ModeRefused(
            f"scenario {scenario.name!r} learns by itself and takes no instructions",
            hint="set its training_mode to manual or hybrid",
        )
    if release_id is not None:
        await find_release(deps, scenario.name, release_id)
    metadata: dict[str, Any] = {"release_id": release_id, "requires": requires, "tags": tags_from(request.headers)}
    stored = await deps.log.instruct(
        scenario.name,
        text,
        session=session,
        metadata={key: value for key, value in metadata.items() if value},
        record_id=record_id,
    )
    deps.metrics.records.inc(scenario=scenario.name, kind="train")
    if deps.request_step is not None:
        deps.request_step(scenario.name)
    if deps.learning is not None:
        deps.learning.wake(scenario.name)
    return answer(
        {"agent_record_id": stored, "scenario": scenario.name, "request_type": "train"}, headers={RECEIPT_HEADER: stored}
    )


ROUTES: tuple[Route, ...] = (("POST", "/reef/train", train),)
