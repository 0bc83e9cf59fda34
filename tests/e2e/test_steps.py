"""A harness that learns, seen from outside while it does: reads during a step, what each end is called, what reaches the
proposer, both sides under the same conditions, and what an agent can find out where it runs.

The provider plays the proposer, which the test tells what to propose, and the agents' model.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from reef_cli.harness import sandbox
from tests.doubles.background import background_upstream
from tests.doubles.upstream import Chat, Upstream
from tests.e2e.server import Server, serving, until
from tests.e2e.test_feedback import talk
from tests.supervisor.test_evolution import KEY, LIST, SING, ended, entries, jobs, roots, settings

pytestmark = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
PROPOSER = "You improve the harness of an agent"


@dataclass
class Player:
    """Both models. `rule` is what is proposed next, None for nothing; while `held` names one of them it does not answer."""

    rule: str | None = None
    held: str | None = None
    slow_after: int | None = None
    probe: str | None = None
    sides: list[bool] = field(default_factory=list)
    """Per answered call of an agent: whether the proposed rule was in force."""
    tools: list[str] = field(default_factory=list)

    async def __call__(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        body = orjson.loads(raw)
        told = json.dumps(body["messages"])
        who = "proposer" if PROPOSER in told else "agent" if "Name three things of kind" in told else "user"
        while self.held == who:
            await asyncio.sleep(0.02)
        if self.slow_after is not None and len(self.sides) > self.slow_after:
            await asyncio.sleep(0.2)
        return web.json_response(Chat(self._proposer() if who == "proposer" else self._agent(body, told, who), body).whole())

    def _proposer(self) -> Upstream:
        entry = {"id": f"rule-{len(self.rule or '')}", "kind": "rules", "config": {"text": self.rule}}
        mutations = [{"op": "create", "entry": entry}] if self.rule else []
        return Upstream(text=json.dumps({"mutations": mutations, "reason": "told so"}))

    def _agent(self, body: Any, told: str, who: str) -> Upstream:
        if who == "agent":
            self.sides.append(bool(self.rule and self.rule in told))
            if self.probe and body["messages"][-1]["role"] == "user":
                return Upstream(calls=[("c1", "bash", json.dumps({"command": self.probe}))])
            self.tools += [str(one["content"]) for one in body["messages"] if one["role"] == "tool"]
        return Upstream(text="la la la" if SING in told else "1. one\n2. two\n3. three" if LIST in told else "one, two, three")


@pytest.fixture(scope="module")
def provider() -> Iterator[Upstream]:
    with background_upstream() as double:
        yield double


@pytest.fixture
def player(provider: Upstream) -> Iterator[Player]:
    made = Player()
    provider.script = made
    provider.seen.clear()
    yield made
    made.held = None


@pytest.fixture(scope="module")
def server(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tmp = tmp_path_factory.mktemp("steps")
    more = {"reef.proposer": "reef_cli.harness.proposers:LanguageModel"}
    with serving(tmp / "h", Path("stub-model"), **settings(provider, tmp, **more)) as running:
        yield running


def complain(server: Server, scenario: str, times: int = 3) -> None:
    client = server.client(**{"x-reef-scenario": scenario})
    for number in range(times):
        (receipt,) = talk(server.client(**{"x-reef-scenario": scenario, "x-reef-tag-session": f"{scenario}-{number}"}))
        reply = client.post("/reef/report", json={"score": 0, "feedback": f"not so {number}", "references": [receipt]})
        assert reply.status_code == 200 and reply.json()["eligible"][0]["eligible"], reply.text


class Reader(threading.Thread):
    """Reads every list again and again; how long each read took."""

    def __init__(self, server: Server, scenario: str) -> None:
        super().__init__(daemon=True)
        self.client = server.client(**{"x-reef-scenario": scenario})
        paths = ("releases", "jobs", "commits", "records")
        self.paths = ["/reef/harness", "/reef/harness/releases", "/reef/status", "/reef/scenarios"]
        self.paths += [f"/reef/scenarios/{scenario}/{path}" for path in paths]
        self.took: list[tuple[float, str]] = []
        self.enough = threading.Event()
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while not self.enough.wait(0.2):
                for path in self.paths:
                    begun = time.monotonic()
                    assert self.client.get(path).status_code == 200, path
                    self.took.append((time.monotonic() - begun, path))
        except BaseException as error:  # shown by the test: a thread's own exception would be lost
            self.failure = error


@contextmanager
def reading(server: Server, scenario: str) -> Iterator[None]:
    """Every list is answered within a second while the body runs."""
    reader = Reader(server, scenario)
    try:
        yield
    finally:
        reader.enough.set()
        reader.join(60)
    assert reader.failure is None and len(reader.took) > 5 * len(reader.paths), reader.failure
    assert max(reader.took) < (1.0, ""), sorted(reader.took)[-5:]


def state(server: Server, scenario: str) -> dict[str, Any]:
    return dict(next(row for row in server.status()["scenarios"] if row["name"] == scenario))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["proposer", "agent"])
def test_nobody_waits_for_a_step(server: Server, player: Player, who: str) -> None:
    """The step stands still in the proposer's hands, then in the agents'; reads and inference go on."""
    scenario = f"held-{who}"
    player.rule, player.held = LIST, who
    complain(server, scenario)
    wanted = "training" if who == "proposer" else "evaluating"
    until(lambda: [job for job in jobs(server, scenario) if job["state"] == wanted], f"a step that is {wanted}")
    with reading(server, scenario):
        assert state(server, scenario)["state"].startswith(wanted)
        begun = time.monotonic()
        talk(server.client(**{"x-reef-scenario": scenario}), 3)
        assert time.monotonic() - begun < 3
        time.sleep(5)
    assert jobs(server, scenario)[0]["state"] == wanted, "it was held all the time"
    player.held = None
    assert ended(server, scenario)["outcome"] == "select"


def test_every_end_has_its_name_reason_and_times(server: Server, player: Player) -> None:
    scenario = "ends"
    begun = time.time()
    player.held = "proposer"
    complain(server, scenario)
    until(lambda: state(server, scenario)["state"] not in ("idle", "collecting"), "a step under way")
    assert server.get(f"/reef/scenarios/{scenario}/commits")["commits"] == []
    (open_job,) = server.get(f"/reef/scenarios/{scenario}/jobs", state="open")["jobs"]
    assert open_job["outcome"] is None and open_job["created_at"] >= begun
    player.held = None
    nothing = ended(server, scenario)
    assert (nothing["state"], nothing["outcome"]) == ("settled", "unchanged"), nothing
    assert nothing["reason"] == "no proposal: told so", "and the proposer's own words"
    assert state(server, scenario)["last_outcome"]["reason"] == nothing["reason"]

    player.rule = LIST
    complain(server, scenario)
    better = ended(server, scenario, 2)
    assert better["outcome"] == "select" and better["release_id"] == server.releases(scenario)[0]["release_id"], better
    player.rule = SING
    complain(server, scenario)
    worse = ended(server, scenario, 3)
    assert worse["outcome"] == "reject" and "shown worse" in worse["reason"], worse
    told = state(server, scenario)
    assert told["last_outcome"]["outcome"] == "reject" and told["last_outcome"]["reason"] == worse["reason"]
    assert told["state"] in ("idle", "collecting") and server.releases(scenario)[0]["release_id"] == better["release_id"]
    commits = server.get(f"/reef/scenarios/{scenario}/commits")["commits"]
    assert [commit["outcome"] for commit in commits] == ["reject", "select", "unchanged"]
    assert len({commit["reason"] for commit in commits}) == 3
    for later, commit in zip([time.time(), *(c["created_at"] for c in commits)], commits, strict=False):
        assert begun <= commit["created_at"] <= commit["updated_at"] <= later
    assert [commit["release_id"] is None for commit in commits] == [True, False, True]


def test_a_report_about_a_conversation_reaches_the_proposer_whole(server: Server, player: Player, provider: Upstream) -> None:
    client = server.client(**{"x-reef-scenario": "whole", "x-reef-tag-session": "whole"})
    receipts = talk(client, 3)
    told = client.post("/reef/report", json={"score": 0, "feedback": "FEEDBACK-SEEN", "references": receipts}).json()
    assert [(one["reference"], one["eligible"]) for one in told["eligible"]] == [(receipt, True) for receipt in receipts]
    complain(server, "whole", 2)
    ended(server, "whole")
    assert server.ledger.rows("SELECT count(*) FROM sample_state WHERE scenario = 'whole' AND state = 'consumed'") == [(3,)]
    (asked,) = [one.body for one in provider.seen if one.method == "POST" and PROPOSER in json.dumps(one.body)]
    text = json.dumps(asked["messages"])
    assert text.count("FEEDBACK-SEEN") == 1, "three turns are one piece of evidence"
    places = [text.index(f"turn {number}", text.index("FEEDBACK-SEEN") - 3000) for number in range(3)]
    assert places == sorted(places)


def test_an_answer_that_broke_off_never_teaches(server: Server, player: Player, provider: Upstream) -> None:
    chunk = b'data: {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "Half"}}]}\n\n'
    provider.streams([chunk])
    client = server.client(**{"x-reef-scenario": "halves"})
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "stream": True}
    for _ in range(3):
        reply = client.post("/v1/chat/completions", json=body)
        assert "Half" in reply.text and '"reef"' not in reply.text
        receipt = reply.headers["x-reef-agent-record-id"]
        assert client.get(f"/reef/scenarios/halves/records/{receipt}").json()["complete"] is False
        told = client.post("/reef/report", json={"score": 0, "feedback": "bad", "references": [receipt]}).json()
        assert told["eligible"] == [{"reference": receipt, "eligible": False, "reason": "incomplete"}]
    refused = "SELECT reason FROM sample_state WHERE scenario = 'halves'"
    until(lambda: server.ledger.rows(refused) == [("incomplete",)] * 3, "the refusals")
    assert jobs(server, "halves") == []


@pytest.mark.slow
def test_both_sides_meet_the_same_conditions(server: Server, player: Player) -> None:
    """The provider slows down in the middle of a comparison: candidate and current release were asked before it and after."""
    player.rule, player.slow_after = SING, 12
    complain(server, "fair")
    assert ended(server, "fair")["outcome"] == "inconclusive", "neither side lists, so every task is asked"
    sides = player.sides
    assert len(sides) >= 24
    for part in (sides[:12], sides[12:], sides[4:8], sides[8:16]):
        assert abs(sum(part) - len(part) / 2) <= 2, sides


PROBE = (
    "echo searched; grep -rl 'provider-''key' \"$HOME\" . /reef /home /tmp 2>/dev/null; echo done; env; "
    "cat /proc/self/environ /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'"
)


def test_an_agent_finds_no_key_where_it_runs(server: Server, player: Player) -> None:
    player.rule, player.probe = LIST, PROBE
    complain(server, "probed")
    assert ended(server, "probed")["state"] == "settled"
    assert len(player.tools) >= 4, "episodes of both sides looked"
    for found in player.tools:
        files, _, variables = found.partition("searched\n")[2].partition("done\n")
        assert files == "" and "PATH=" in variables, found
        assert KEY not in found and server.token not in found, found
    assert entries(server, "probed") and roots(server) == []


def test_a_provider_that_wants_no_key_gets_episodes_too(provider: Upstream, player: Player, tmp_path: Path) -> None:
    facts = settings(provider, tmp_path, **{"reef.proposer": "reef_cli.harness.proposers:LanguageModel"})
    del facts["engine.api_key"]
    player.rule = LIST
    with serving(tmp_path / "h", Path("stub-model"), **facts) as server:
        complain(server, "s")
        job = ended(server, "s")
        assert (job["state"], job["outcome"]) == ("settled", "select"), job["reason"]
        assert player.sides.count(True) >= 4 and player.sides.count(False) >= 4, "the provider was called by both sides"
        assert not [seen for seen in provider.seen if "Authorization" in seen.headers]
        assert [entry["config"]["text"] for entry in entries(server, "s")] == [LIST]
