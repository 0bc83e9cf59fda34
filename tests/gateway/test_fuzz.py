"""Anything at all, sent to every route: no failure of our own, no traceback, and what is refused stores nothing.

One gateway serves all examples; the properties hold for every order of them.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.config.schema import ReefSettings
from reef_cli.gateway.routes import all_routes
from tests.gateway.fakes import AUTH, House, house
from tests.gateway.fuzzing import FUZZ, Bodies, Calm, Headers, Names, Tally, Text, clean, mutants, sound

WRITES = sorted({(method, path) for method, path, _ in all_routes() if method != "GET"})
READS = sorted({path for method, path, _ in all_routes() if method == "GET"} - {"/reef/events"})

Send = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, tally: Tally) -> Iterator[tuple[House, Send, str]]:
    """The gateway, a blocking way to send to it, and a receipt that exists in `s1`. Its log stays calm."""
    calm = Calm()
    logging.getLogger().addHandler(calm)
    loop = asyncio.new_event_loop()
    made = house(tmp_path_factory.mktemp("fuzz"), ReefSettings(training_mode="manual", implicit_scenarios=False))
    reef = loop.run_until_complete(made.__aenter__())
    for name in ("s1", "s2"):
        loop.run_until_complete(reef.create(name))
    receipt = loop.run_until_complete(reef.chat("s1"))

    async def ask(method: str, path: str, headers: dict[str, str], data: bytes | None) -> tuple[int, str]:
        async with reef.client.request(method, path, headers={**AUTH, **headers}, data=data) as answer:
            assert answer.headers["x-request-id"]
            tally.add("routes", answer.status)
            calm.check()
            return answer.status, await answer.text()

    yield reef, lambda *call: loop.run_until_complete(ask(*call)), receipt
    loop.run_until_complete(made.__aexit__(None, None, None))
    loop.close()
    logging.getLogger().removeHandler(calm)
    calm.check()


def stored(reef: House) -> tuple[int, int, int]:
    with reef.log.read() as connection:
        count = connection.execute("SELECT count(*) FROM records").fetchone()[0]
    return count, len(reef.log.scenarios.list()), sum(len(reef.releases.list(name)) for name in ("s1", "s2"))


def fill(path: str, names: list[str]) -> str:
    for name in ("scenario", "record", "session", "release", "before", "after", "job", "model:.+"):
        if "{" + name + "}" in path:
            path = path.replace("{" + name + "}", names.pop() if names else "s1")
    return path


@FUZZ
@given(st.sampled_from(WRITES), st.lists(Names, max_size=3), Headers, Bodies)
def test_writes(
    gateway: tuple[House, Send, str], route: tuple[str, str], names: list[str], headers: dict[str, str], body: bytes
) -> None:
    reef, send, receipt = gateway
    if route[0] == "DELETE":
        names = ["absent"]
    before = stored(reef)
    status, text = send(route[0], fill(route[1], names), clean(headers), body.replace(b"RECEIPT", receipt.encode()))
    sound(status, text)
    if status >= 400:
        assert stored(reef) == before, (route, status, text)


IMPORT = {"id": "i:1", "dialect": "chat", "model": "m", "request": {"messages": []}, "response": {"role": "assistant"}}
TRACE = {
    "prompt_ids": [1],
    "output_ids": [2],
    "logprobs": [-0.5],
    "loss_mask": [1],
    "spans": [{"version": "base", "start": 0, "end": 1}],
}
GOOD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/reef/report", {"score": 1, "feedback": "x", "references": ["RECEIPT"], "metadata": {}, "agent_record_id": "g:1"}),
    ("/reef/train", {"text": "Answer in German.", "session": "a", "requires": ["env FOO"], "agent_record_id": "t:1"}),
    ("/reef/records", {**IMPORT, "tokens": TRACE, "tags": {}, "usage": {}, "timings": {}, "created_at": 1.0}),
    ("/reef/records", {"kind": "report", "id": "r:1", "score": 1, "references": ["RECEIPT"], "metadata": {}}),
    ("/reef/records", {"kind": "train", "id": "t:2", "text": "x", "session": "s", "metadata": {}}),
    ("/reef/scenarios", {"name": "s1", "training_mode": "manual"}),
    ("/reef/scenarios/s1/promote", {"release_id": "r0-00000000", "expected_head": "r0-00000000"}),
    ("/reef/scenarios/s2/rollback", {"release_id": "r0-00000000", "expected_head": "r0-00000000"}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}], "metadata": {}, "stream": False}),
)


@FUZZ
@given(mutants(GOOD), st.sampled_from(("s1", "s2")))
def test_nearly_good_bodies(gateway: tuple[House, Send, str], mutant: tuple[str, dict[str, Any]], scenario: str) -> None:
    reef, send, receipt = gateway
    path, body = mutant
    before = stored(reef)
    data = json.dumps(body).encode().replace(b"RECEIPT", receipt.encode())
    status, text = send("POST", path, {"x-reef-scenario": scenario}, data)
    sound(status, text)
    if status >= 400:
        assert stored(reef) == before
    if path == "/reef/records":
        # As a batch of one it must fare the same: stored already, or refused for the same reason.
        assert send("POST", "/reef/records/batch", {"x-reef-scenario": scenario}, b"[" + data + b"]")[0] == status


@FUZZ
@given(
    st.sampled_from(READS),
    st.lists(Names | Text.filter(bool), max_size=3),
    st.dictionaries(st.sampled_from(("limit", "after_sequence", "request_type", "order", "state", "before")), Text, max_size=2),
    Headers,
)
def test_reads(
    gateway: tuple[House, Send, str], path: str, names: list[str], query: dict[str, str], headers: dict[str, str]
) -> None:
    from urllib.parse import quote, urlencode

    reef, send, _ = gateway
    before = stored(reef)
    status, text = send(
        "GET", f"{fill(path, [quote(name, safe='') for name in names])}?{urlencode(query)}", clean(headers), None
    )
    if path == "/metrics" and status == 200:
        assert text.startswith("# HELP")
    else:
        sound(status, text)
    assert stored(reef) == before


def test_afterwards_every_page_is_strict_json(gateway: tuple[House, Send, str]) -> None:
    reef, send, _ = gateway
    for scenario in reef.log.scenarios.list():
        status, text = send("GET", f"/reef/scenarios/{scenario.name}/records?limit=1000", {}, None)
        assert status == 200
        for row in json.loads(text, parse_constant=pytest.fail)["records"]:
            found, document = send("GET", f"/reef/scenarios/{scenario.name}/records/{row['id']}", {}, None)
            assert found in (200, 404), document
            sound(found, document)
