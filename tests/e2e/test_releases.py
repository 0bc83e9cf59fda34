"""Chains from outside: what a rollback keeps, what waits for a person, the order of lists, new names in sight."""

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.upstream import Upstream
from tests.e2e.server import Server, reef, serving

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def rule(number: int) -> dict[str, Any]:
    return {"id": f"rule-{number}", "kind": "rules", "config": {"text": f"Say {number}."}}


def propose(server: Server, scenario: str, number: int) -> dict[str, Any]:
    """A harness release with one rule more."""
    mutations = [{"op": "create", "entry": rule(number)}]
    reply = server.client(**{"x-reef-scenario": scenario}).post("/reef/harness/proposals", json={"mutations": mutations})
    assert reply.status_code == 201, reply.text
    return dict(reply.json())


def manifest(server: Server, scenario: str) -> dict[str, Any]:
    reply = server.client(**{"x-reef-scenario": scenario}).get("/reef/harness")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def harness(server: Server, scenario: str) -> list[dict[str, Any]]:
    """The harness releases among all releases of a scenario, newest first."""
    return [row for row in server.releases(scenario) if row["surface"] == "harness"]


def test_a_rollback_is_a_release_of_its_own_and_the_chain_keeps_all(front: Server) -> None:
    r0, r1, r2 = (propose(front, "keeps", number) for number in range(3))
    back = front.client().post("/reef/scenarios/keeps/rollback", json={"release_id": r0["release_id"]})
    assert back.status_code == 200, back.text
    new = back.json()
    assert new["release_id"] not in {row["release_id"] for row in (r0, r1, r2)} and new["operation"] == "rollback"
    assert (new["content_id"], new["parent_release_id"], new["step"]) == (r0["content_id"], r2["release_id"], r2["step"] + 1)
    assert manifest(front, "keeps")["entries"] == [rule(0)]
    newest = [row["release_id"] for row in harness(front, "keeps")]
    assert newest == [row["release_id"] for row in (new, r2, r1, r0)]
    catalog = front.client(**{"x-reef-scenario": "keeps"}).get("/reef/harness/releases").json()["releases"]
    assert [row["release_id"] for row in catalog] == newest[::-1], "the catalogue of the harness begins with the oldest"
    assert [row["recorded_at"] for row in catalog] == sorted(row["recorded_at"] for row in catalog)
    assert [row["current"] for row in catalog] == [False, False, False, True]
    offline = reef("release", "list", "--json", "--scenario", "keeps", "--home", str(front.home))
    assert [row["release_id"] for row in json.loads(offline.stdout)["releases"] if row["surface"] == "harness"] == newest


@pytest.mark.parametrize("named", [False, True])
def test_rollbacks_at_the_same_time_lose_no_release(front: Server, named: bool) -> None:
    """With the head they mean one wins, and the others are told who; without they follow each other."""
    scenario = f"races-{named}"
    r0, r1, r2 = (propose(front, scenario, number) for number in range(3))
    body = {"release_id": r0["release_id"]} | ({"expected_head": r2["release_id"]} if named else {})
    replies: list[httpx.Response] = []
    clients = [front.client() for _ in range(4)]

    def send(client: httpx.Client) -> None:
        replies.append(client.post(f"/reef/scenarios/{scenario}/rollback", json=body))

    threads = [threading.Thread(target=send, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    won = [reply.json() for reply in replies if reply.status_code == 200]
    lost = [reply.json()["error"] for reply in replies if reply.status_code != 200]
    assert len(replies) == 4 and won
    assert {error["code"] for error in lost} <= {"head_moved"} and {r.status_code for r in replies} <= {200, 409}, lost
    if named:
        assert len(won) == 1 and all(won[0]["release_id"] in json.dumps(error) for error in lost)
    rows = harness(front, scenario)
    assert {row["release_id"] for row in rows} == {row["release_id"] for row in (r0, r1, r2, *won)}
    assert len(rows) == 3 + len(won) and sum(row["current"] for row in rows) == 1
    assert [(row["release_id"], row["step"]) for row in rows] == sorted(
        ((row["release_id"], row["step"]) for row in rows), key=lambda one: -one[1]
    )
    parents = {row["release_id"]: row["parent_release_id"] for row in rows}
    assert [parents[row["release_id"]] for row in rows[:-1]] == [row["release_id"] for row in rows[1:]], "one line, no fork"
    assert manifest(front, scenario)["entries"] == [rule(0)]


@pytest.fixture(scope="module")
def reviewed(double: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Candidates wait for a person."""
    settings = {"engine.kind": "upstream", "engine.url": double.url, "reef.publish": "review"}
    with serving(tmp_path_factory.mktemp("reviewed") / "h", Path("stub-model"), **settings) as running:
        yield running


def test_what_waits_for_a_person_is_served_by_nobody(reviewed: Server, tmp_path: Path) -> None:
    client = reviewed.client(**{"x-reef-scenario": "waits"})
    path = "/reef/scenarios/waits"
    first = propose(reviewed, "waits", 0)
    old = client.post(f"{path}/promote", json={"release_id": first["release_id"]}).json()
    held = propose(reviewed, "waits", 1)
    assert held["pending"] is True and held["current"] is False
    assert manifest(reviewed, "waits")["release_id"] == old["release_id"]
    assert installed(reviewed, "waits", tmp_path / "before") == old["release_id"]
    (row,) = [row for row in harness(reviewed, "waits") if row["pending"]]
    assert row["release_id"] == held["release_id"]

    for release_id, status, code in (
        ("r9-00000000", 404, "release_not_found"),
        ("nonsense", 404, "release_not_found"),
        (old["release_id"], 409, "not_pending"),
        (first["release_id"], 409, "not_pending"),
    ):
        reply = client.post(f"{path}/promote", json={"release_id": release_id})
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
    stale = client.post(f"{path}/promote", json={"release_id": held["release_id"], "expected_head": first["release_id"]})
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "head_moved") and old["release_id"] in stale.text
    assert manifest(reviewed, "waits")["release_id"] == old["release_id"], "refusals move nothing"

    promoted = client.post(f"{path}/promote", json={"release_id": held["release_id"], "expected_head": old["release_id"]})
    assert promoted.status_code == 200, promoted.text
    new = promoted.json()
    assert new["release_id"] not in {row["release_id"] for row in (first, old, held)} and new["operation"] == "promote"
    assert (new["content_id"], new["parent_release_id"]) == (held["content_id"], old["release_id"])
    assert manifest(reviewed, "waits")["release_id"] == new["release_id"]
    assert manifest(reviewed, "waits")["entries"] == [rule(0), rule(1)]
    assert installed(reviewed, "waits", tmp_path / "after") == new["release_id"]
    assert not [row for row in harness(reviewed, "waits") if row["pending"]]


def installed(server: Server, scenario: str, home: Path) -> str:
    """The harness release that the install script brings to a machine."""
    home.mkdir()
    reply = server.client(**{"x-reef-scenario": scenario}).get("/reef/harness/install", params={"adapter": "native"})
    assert reply.status_code == 200, reply.text
    environment = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    subprocess.run(["sh"], input=reply.text, text=True, env=environment, check=True, capture_output=True, timeout=60)
    (spec,) = home.glob(".local/share/reef-harness/native/scenarios/*/install.json")
    return str(json.loads(spec.read_text())["release_id"])


def test_a_mistyped_scenario_is_in_sight(front: Server, provider: Upstream) -> None:
    """Where scenarios come with their first request, whoever looks sees the second one and what went there."""
    for name, times in (("typed", 3), ("typedx", 1)):
        for _ in range(times):
            assert front.client(**{"x-reef-scenario": name}).post(CHAT, json=ASK).status_code == 200
    rows = {row["name"]: row["counts"]["records"] for row in front.get("/reef/scenarios")["scenarios"]}
    assert (rows["typed"], rows["typedx"]) == (3, 1)
    told = {row["name"] for row in front.status()["scenarios"]}
    assert {"typed", "typedx"} <= told
    listed = reef("scenario", "list", "--home", str(front.home))
    assert listed.returncode == 0 and "typedx" in listed.stdout
    assert "typedx" in reef("status", "--home", str(front.home)).stdout
