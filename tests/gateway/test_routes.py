"""Scenarios, records, releases, jobs, routing, status and metrics over the wire."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from reef_cli.config.schema import ReefSettings
from reef_cli.core.errors import EngineError, JobNotFound
from reef_cli.core.ids import ReleaseId
from reef_cli.core.types import Release, Surface
from reef_cli.releases.routing import Auto, Policy
from tests.gateway.fakes import AUTH, House, house


def add_job(connection: Any, job_id: str, state: str, scenario: str = "s1") -> None:
    connection.execute(
        "INSERT INTO jobs (id, scenario, recipe, state, base_release_id, created_at, updated_at, outcome, reason, detail)"
        " VALUES (?, ?, 'sao', ?, 'r0-00000000', 1.0, 2.0, 'reject', 'no better', '{\"metrics\": {\"loss\": 0.5}}')",
        (job_id, scenario, state),
    )
    for number, name in enumerate(("reserved", state)):
        connection.execute(
            "INSERT INTO job_events (job_id, scenario, at, state, detail) VALUES (?, ?, ?, ?, '{}')",
            (job_id, scenario, number, name),
        )


async def ledger(reef: House, *jobs: tuple[str, str]) -> None:
    await reef.log.write(lambda connection: [add_job(connection, *job) for job in jobs] and None)


# Scenarios


async def test_making_and_changing_a_scenario(reef: House) -> None:
    status, body = await reef.send("POST", "/reef/scenarios", {"name": "s1", "training_mode": "hybrid"})
    assert status == 201
    assert (body["name"], body["training_mode"], body["paused"], body["step"]) == ("s1", "hybrid", False, 0)
    head = body["head"]
    assert (await reef.send("POST", "/reef/scenarios", {"name": "s1"}))[0] == 200
    assert (await reef.send("POST", "/reef/scenarios", {"name": "s1", "release_id": head}))[0] == 200
    assert (await reef.send("POST", "/reef/scenarios", {"name": "s1", "release_id": "r7-00000000"}))[0] == 404
    assert (await reef.send("POST", "/reef/scenarios", {"name": "new", "release_id": head}))[0] == 404
    status, body = await reef.send("POST", "/reef/scenarios/s1/update", {"training_mode": "manual"})
    assert (status, body["training_mode"]) == (200, "manual")
    assert (await reef.send("POST", "/reef/scenarios/s1/pause"))[1]["paused"] is True
    assert (await reef.send("POST", "/reef/scenarios/s1/resume"))[1]["paused"] is False
    listed = await reef.get("/reef/scenarios")
    assert [row["name"] for row in listed["scenarios"]] == ["s1"]
    contract = await reef.get("/reef/scenarios/s1/contract")
    assert contract["training_mode"] == "manual"
    assert "score" in contract["report"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/reef/scenarios", {}, 400),
        ("/reef/scenarios", {"name": ""}, 400),
        ("/reef/scenarios", {"name": 7}, 400),
        ("/reef/scenarios", {"name": "a b"}, 400),
        ("/reef/scenarios", {"name": "x", "training_mode": "sometimes"}, 400),
        ("/reef/scenarios", {"name": "x", "colour": "red"}, 400),
        ("/reef/scenarios", [], 400),
        ("/reef/scenarios/none/update", {"training_mode": "auto"}, 404),
        ("/reef/scenarios/none/pause", None, 404),
        ("/reef/scenarios/none/promote", {"release_id": "r1-00000000"}, 404),
        ("/reef/scenarios/none/rollback", {}, 404),
        ("/reef/scenarios/none/jobs", None, 404),
        ("/reef/scenarios/a%20b/pause", None, 400),
    ],
)
async def test_wrong_scenario_requests(reef: House, path: str, body: Any, status: int) -> None:
    found, answer = await reef.send("POST", path, body)
    assert found == status, answer
    assert reef.log.scenarios.list() == []


async def test_update_needs_a_mode(reef: House) -> None:
    await reef.chat()
    for body in ({}, {"training_mode": None}, {"training_mode": "x"}, {"mode": "auto"}):
        assert (await reef.send("POST", "/reef/scenarios/s1/update", body))[0] == 400


async def test_archiving(reef: House) -> None:
    receipt = await reef.chat()
    await reef.log.write(lambda connection: add_job(connection, "j1", "training"))
    status, body = await reef.send("DELETE", "/reef/scenarios/s1")
    assert (status, body["error"]["code"]) == (409, "job_out")
    await reef.log.write(lambda connection: connection.execute("UPDATE jobs SET state = 'settled'") and None)
    assert (await reef.send("DELETE", "/reef/scenarios/s1"))[0] == 200
    assert (await reef.send("DELETE", "/reef/scenarios/s1"))[0] == 404
    assert (await reef.get("/reef/scenarios"))["scenarios"] == []
    again = await reef.chat("s1")
    assert reef.records() == 1
    assert (await reef.send("GET", f"/reef/scenarios/s1/records/{receipt}"))[0] == 404
    assert (await reef.send("GET", f"/reef/scenarios/s1/records/{again}"))[0] == 200
    chain = (await reef.get("/reef/scenarios/s1/releases"))["releases"]
    assert [row["operation"] for row in chain] == ["creation"]


async def test_the_hook_archives_instead(tmp_path: Path) -> None:
    gone: list[str] = []

    async def delete(name: str) -> None:
        gone.append(name)

    async with house(tmp_path, delete_scenario=delete) as reef:
        await reef.chat()
        assert (await reef.send("DELETE", "/reef/scenarios/s1"))[0] == 200
        assert gone == ["s1"]


# Records


async def test_pages_of_records(reef: House) -> None:
    receipts = [await reef.chat(text=f"q{number}") for number in range(5)]
    await reef.send("POST", "/reef/report", {"score": 1, "references": receipts[:1]}, {"x-reef-scenario": "s1"})
    page = await reef.get("/reef/scenarios/s1/records?limit=2")
    assert [row["id"] for row in page["records"]] == receipts[:2]
    page = await reef.get(f"/reef/scenarios/s1/records?limit=4&after_sequence={page['next']}")
    assert [row["id"] for row in page["records"]][:3] == receipts[2:]
    assert len(page["records"]) == 4
    page = await reef.get("/reef/scenarios/s1/records?request_type=report")
    assert [row["kind"] for row in page["records"]] == ["report"]
    assert page["next"] is None
    page = await reef.get("/reef/scenarios/s1/records?order=newest&limit=1&request_type=inference")
    assert page["records"][0]["id"] == receipts[-1]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=x",
        "limit=",
        "after_sequence=-1",
        "limit=9999999999999999999",
        "request_type=x",
        "order=up",
        "limit=١",
    ],
)
async def test_wrong_page_parameters(reef: House, query: str) -> None:
    await reef.chat()
    assert (await reef.send("GET", f"/reef/scenarios/s1/records?{query}"))[0] == 400


async def test_one_record_and_its_session(reef: House) -> None:
    receipt = await reef.chat(**{"x-reef-tag-session": "my session/1"})
    record = await reef.get(f"/reef/scenarios/s1/records/{receipt}")
    assert record["kind"] == "inference"
    assert record["response"] == {"role": "assistant", "content": "ok"}
    status, body = await reef.send("GET", "/reef/scenarios/s1/records/nothing")
    assert (status, body["error"]["code"]) == (404, "record_not_found")
    sessions = (await reef.get("/reef/scenarios/s1/sessions"))["sessions"]
    assert [row["session"] for row in sessions] == ["my session/1"]
    tree = await reef.get("/reef/scenarios/s1/sessions/my%20session%2F1")
    assert tree["branches"][0]["turns"][0]["row"]["id"] == receipt
    assert (await reef.send("GET", "/reef/scenarios/s1/sessions/none"))[0] == 404


# Releases


async def publish(reef: House, text: str) -> Release:
    head = reef.publishing.served("s1")
    return await reef.publishing.publish("s1", reef.draft(text), ReleaseId(head.release_id))


async def test_the_catalogue_and_rollback(reef: House) -> None:
    await reef.chat()
    r0 = reef.publishing.served("s1")
    r1, r2 = await publish(reef, "one"), await publish(reef, "two")
    chain = (await reef.get("/reef/scenarios/s1/releases"))["releases"]
    assert [row["release_id"] for row in chain] == [r2.release_id, r1.release_id, r0.release_id]
    assert [row["current"] for row in chain] == [True, False, False]
    assert chain[0]["operation"] == "training"
    assert chain[0]["evidence"] == {"text": "two"}
    assert chain[0]["parent_release_id"] == r1.release_id
    status, r3 = await reef.send(
        "POST", "/reef/scenarios/s1/rollback", {"release_id": r0.release_id, "expected_head": r2.release_id}
    )
    assert status == 200
    assert (r3["content_id"], r3["parent_release_id"], r3["operation"], r3["step"]) == (
        r0.content_id,
        r2.release_id,
        "rollback",
        3,
    )
    assert r3["current"] is True
    assert r3["author"].startswith("user:")
    chain = (await reef.get("/reef/scenarios/s1/releases"))["releases"]
    assert len(chain) == 4
    assert chain[0]["release_id"] == r3["release_id"]
    status, body = await reef.send("POST", "/reef/scenarios/s1/rollback", {"expected_head": r2.release_id})
    assert (status, body["error"]["code"]) == (409, "head_moved")
    assert r3["release_id"] in str(body["error"])
    status, r4 = await reef.send("POST", "/reef/scenarios/s1/rollback")
    assert (status, r4["content_id"]) == (200, r2.content_id), "by default the previous content"
    one = await reef.get(f"/reef/scenarios/s1/releases/{r1.release_id}")
    assert one["release_id"] == r1.release_id
    assert one["current"] is False
    diff = await reef.get(f"/reef/scenarios/s1/releases/{r1.release_id}/diff/{r2.release_id}")
    assert [file["path"] for file in diff["changes"]["files"]] == ["adapter_config.json"]


async def test_two_rollbacks_at_once_lose_nothing(reef: House) -> None:
    await reef.chat()
    head = (await publish(reef, "one")).release_id
    body = {"expected_head": head}
    answers = await asyncio.gather(*(reef.send("POST", "/reef/scenarios/s1/rollback", body) for _ in range(3)))
    assert sorted(status for status, _ in answers) == [200, 409, 409]
    assert len((await reef.get("/reef/scenarios/s1/releases"))["releases"]) == 3


async def test_promoting(reef: House) -> None:
    await reef.chat()
    head = reef.publishing.served("s1")
    held = await reef.publishing.hold("s1", reef.draft("held"), ReleaseId(head.release_id))
    rows = (await reef.get("/reef/scenarios/s1/releases"))["releases"]
    assert [(row["release_id"], row["pending"], row["current"]) for row in rows] == [
        (held.release_id, True, False),
        (head.release_id, False, True),
    ]
    path = "/reef/scenarios/s1/promote"
    for body, status, code in (
        ({"release_id": "r9-00000000"}, 404, "release_not_found"),
        ({"release_id": "what"}, 404, "release_not_found"),
        ({"release_id": head.release_id}, 409, "not_pending"),
        ({"release_id": held.release_id, "expected_head": "r8-00000000"}, 409, "head_moved"),
        ({"release_id": held.release_id, "expected_head": "what"}, 400, "invalid_request"),
        ({}, 400, "invalid_request"),
        ({"release_id": held.release_id, "force": True}, 400, "invalid_request"),
    ):
        found, answer = await reef.send("POST", path, body)
        assert (found, answer["error"]["code"]) == (status, code), body
    assert reef.publishing.served("s1").release_id == head.release_id
    status, moved = await reef.send("POST", path, {"release_id": held.release_id})
    assert status == 200
    assert moved["release_id"] not in (held.release_id, head.release_id)
    assert (moved["content_id"], moved["operation"], moved["pending"]) == (held.content_id, "promote", False)
    assert (await reef.send("POST", path, {"release_id": held.release_id}))[0] == 409


async def test_a_load_that_fails_is_said(reef: House) -> None:
    await reef.chat()
    reef.publishing.broken = EngineError("could not be loaded")
    status, body = await reef.send("POST", "/reef/scenarios/s1/promote", {"release_id": "r1-00000000"})
    assert (status, body["error"]["code"]) == (502, "engine_error")


async def test_unknown_releases(reef: House) -> None:
    await reef.chat()
    for path in ("r9-00000000", "x", "..%2f..", "r0-00000000/diff/r1-00000000"):
        status, body = await reef.send("GET", f"/reef/scenarios/s1/releases/{path}")
        assert (status, body["error"]["code"]) in ((404, "release_not_found"), (404, "route_not_found")), path


async def test_dismissing_a_held_release(reef: House) -> None:
    await reef.chat()
    head = reef.publishing.served("s1")
    held = await reef.publishing.hold("s1", reef.draft("held"), ReleaseId(head.release_id))
    path = "/reef/scenarios/s1/dismiss"
    assert (await reef.send("POST", path, {}))[0] == 400
    assert (await reef.send("POST", path, {"release_id": "r9-00000000"}))[0] == 404
    status, body = await reef.send("POST", path, {"release_id": held.release_id})
    assert (status, body["release_id"], body["current"]) == (200, held.release_id, False)
    status, body = await reef.send("GET", "/reef/scenarios/s1/releases")
    assert [row["release_id"] for row in body["releases"]] == [head.release_id]
    status, body = await reef.send("POST", path, {"release_id": head.release_id})
    assert (status, body["error"]["code"]) == (409, "not_pending")


async def test_evaluating(tmp_path: Path) -> None:
    async def evaluate(scenario: str, body: Any) -> Any:
        return {"scenario": scenario, "asked": dict(body), "score": float("nan")}

    async with house(tmp_path, evaluate=evaluate) as reef:
        await reef.chat()
        head = reef.publishing.served("s1").release_id
        status, body = await reef.send("POST", "/reef/scenarios/s1/evaluate", {"release_id": head, "suite": "s.jsonl"})
        assert (status, body) == (200, {"scenario": "s1", "asked": {"release_id": head, "suite": "s.jsonl"}, "score": None})
        for wrong, status in (
            ({}, 400),
            ({"release_id": head, "candidate": "x"}, 400),
            ({"release_id": "r9-00000000"}, 404),
            ({"release_id": head, "suite": 1}, 400),
        ):
            assert (await reef.send("POST", "/reef/scenarios/s1/evaluate", wrong))[0] == status, wrong


async def test_what_a_deployment_lacks_is_said(reef: House) -> None:
    await reef.chat()
    head = reef.publishing.served("s1").release_id
    await ledger(reef, ("j1", "training"))
    for method, path, body in (
        ("POST", "evaluate", {"release_id": head}),
        ("POST", "jobs", None),
        ("POST", "jobs/j1/cancel", None),
        ("PUT", "routing", {"pin": head}),
    ):
        status, answer = await reef.send(method, f"/reef/scenarios/s1/{path}", body)
        assert (status, answer["error"]["code"]) == (501, "missing_dependency"), path


# Jobs


async def test_jobs_and_commits(tmp_path: Path) -> None:
    stopped: list[tuple[str, str]] = []
    steps: list[str] = []

    async def cancel(scenario: str, job_id: str) -> None:
        if job_id != "j2":
            raise JobNotFound("it is not running")
        stopped.append((scenario, job_id))

    async with house(tmp_path, cancel_job=cancel, request_step=steps.append) as reef:
        await reef.chat()
        await ledger(reef, ("j1", "settled"), ("j2", "training"), ("j3", "failed"))
        rows = (await reef.get("/reef/scenarios/s1/jobs"))["jobs"]
        assert [row["job_id"] for row in rows] == ["j3", "j2", "j1"]
        assert rows[0]["detail"] == {"metrics": {"loss": 0.5}}
        assert [row["job_id"] for row in (await reef.get("/reef/scenarios/s1/jobs?state=open"))["jobs"]] == ["j2"]
        assert [row["job_id"] for row in (await reef.get("/reef/scenarios/s1/jobs?state=failed"))["jobs"]] == ["j3"]
        commits = (await reef.get("/reef/scenarios/s1/commits"))["commits"]
        assert [(row["job_id"], row["outcome"], row["reason"]) for row in commits] == [
            ("j3", "reject", "no better"),
            ("j1", "reject", "no better"),
        ]
        one = await reef.get("/reef/scenarios/s1/jobs/j2")
        assert [event["state"] for event in one["transitions"]] == ["reserved", "training"]
        assert (await reef.send("GET", "/reef/scenarios/s1/jobs/nope"))[1]["error"]["code"] == "job_not_found"
        assert (await reef.send("GET", "/reef/scenarios/s1/jobs?state=%27;drop"))[0] == 400
        assert (await reef.send("POST", "/reef/scenarios/s1/jobs/j2/cancel"))[0] == 200
        assert (await reef.send("POST", "/reef/scenarios/s1/jobs/j1/cancel"))[1]["state"] == "settled"
        assert (await reef.send("POST", "/reef/scenarios/s1/jobs/nope/cancel"))[0] == 404
        assert stopped == [("s1", "j2")]
        assert (await reef.send("POST", "/reef/scenarios/s1/jobs"))[0] == 202
        assert steps == ["s1"]
        await reef.chat("s2")
        assert (await reef.send("GET", "/reef/scenarios/s2/jobs/j1"))[0] == 404


# Routing


class Router:
    """Routing over the chain alone: nothing is loaded."""

    auto = Auto(alpha=0.01)

    def __init__(self) -> None:
        self.reef: House

    def splits(self, scenario: str) -> bool:
        return False

    def policy(self, scenario: str) -> Any:
        return self.reef.releases.policy(self.reef.releases.head(scenario, Surface.ROUTING)).wire()

    async def view(self, scenario: str) -> Any:
        return {"policy": self.policy(scenario)}

    async def set(self, scenario: str, policy: Policy, expected_head: str | None, author: str) -> Release:
        return self.reef.releases.route(scenario, policy, expected_head, author)

    def shadows(self, scenario: str, limit: int) -> Any:
        return {"shadows": [], "limit": limit}


async def test_routing(tmp_path: Path) -> None:
    router = Router()
    async with house(tmp_path, routing=router) as reef:
        router.reef = reef
        await reef.chat()
        head = reef.publishing.served("s1").release_id
        other = (await publish(reef, "one")).release_id
        path = "/reef/scenarios/s1/routing"
        for body, status in (
            ({"shares": {head: 0.9, other: 0.1}}, 200),
            ({"pin": head}, 200),
            ({"shadow": other}, 200),
            ({"shares": {"head": 0.9, other: 0.1}, "auto": True}, 200),
            ({}, 400),
            ({"shares": {head: 1}, "pin": head}, 400),
            ({"shares": {head: 0.5}}, 400),
            ({"shares": {head: 2, other: -1}}, 400),
            ({"shares": {head: True}}, 400),
            ({"shares": {head: "1"}}, 400),
            ({"shares": {"r9-00000000": 1}}, 404),
            ({"shares": {"what": 1}}, 404),
            ({"pin": 7}, 400),
            ({"pin": "r9-00000000"}, 404),
            ({"mode": "x"}, 400),
            ({"pin": head, "expected_head": "what"}, 400),
            ({"pin": head, "expected_head": "none"}, 409),
            ({"pin": head, "expected_head": other}, 409),
        ):
            assert (await reef.send("PUT", path, body))[0] == status, body
        listed = (await reef.get(f"{path}/releases"))["releases"]
        assert [row["current"] for row in listed] == [True, False, False, False]
        assert listed[0]["policy"]["auto"]["alpha"] == 0.01 and listed[0]["author"].startswith("user:")
        seen = listed[0]["release_id"]
        assert (await reef.get("/reef/status"))["scenarios"][0]["routing"] == listed[0]["policy"]
        assert (await reef.send("DELETE", f"{path}?expected_head={other}"))[0] == 409
        status, cleared = await reef.send("DELETE", f"{path}?expected_head={seen}")
        assert (status, cleared["policy"], cleared["release"]["parent_release_id"]) == (200, {}, seen)
        assert (await reef.get(path))["policy"] == {}
        assert (await reef.get(f"{path}/shadows?limit=7"))["limit"] == 7


async def test_without_routing_the_head_serves_everything(reef: House) -> None:
    await reef.chat()
    head = reef.publishing.served("s1").release_id
    assert (await reef.get("/reef/scenarios/s1/routing"))["shares"] == {head: 1.0}


# Watching


async def test_status(tmp_path: Path) -> None:
    async with house(tmp_path, status=lambda: {"uptime_s": 3, "engine": {"kind": "embedded", "state": "ready"}}) as reef:
        await reef.chat()
        body = await reef.get("/reef/status")
        assert body["uptime_s"] == 3
        assert body["engine"] == {"kind": "embedded", "state": "ready"}
        (scenario,) = body["scenarios"]
        assert scenario["name"] == "s1"
        assert scenario["state"] == "collecting"
        assert scenario["served"] == scenario["head"]
        assert scenario["counts"]["records"] == 1
        assert body["ready"] is True


async def test_metrics(reef: House) -> None:
    receipt = await reef.chat()
    await reef.send("POST", "/reef/report", {"score": 1, "references": [receipt]}, {"x-reef-scenario": "s1"})
    await reef.send("GET", "/reef/scenarios/unknown-name/records")
    async with reef.client.get("/metrics", headers=AUTH) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await answer.text()
    head = reef.publishing.served("s1")
    for wanted in (
        'reef_requests_total{route="/v1/chat/completions",method="POST",status="200"} 1',
        'reef_requests_total{route="/reef/scenarios/{scenario}/records",method="GET",status="404"} 1',
        f'reef_release_info{{scenario="s1",release_id="{head.release_id}",content_id="{head.content_id}"}} 1',
        'reef_refused_total{code="scenario_not_found"} 1',
        'reef_gateway_overhead_seconds_count{route="/v1/chat/completions"} 1',
        'reef_queue_samples{scenario="s1"} 0',
        'reef_report_references_total{scenario="s1",reason="eligible"} 1',
    ):
        assert wanted in text, wanted
    oldest = next(line for line in text.splitlines() if line.startswith('reef_oldest_unread_seconds{scenario="s1"}'))
    assert float(oldest.split()[1]) > 0
    assert "unknown-name" not in text, "no label comes straight from a request's path"


async def test_metrics_can_be_switched_off(tmp_path: Path) -> None:
    async with house(tmp_path, metrics_on=False) as reef:
        assert (await reef.send("GET", "/metrics"))[0] == 404


async def test_reads_do_not_wait_for_a_slow_step(tmp_path: Path) -> None:
    """A promotion that hangs in the engine holds up nobody."""
    async with house(tmp_path, ReefSettings()) as reef:
        await reef.chat()
        held = asyncio.Event()

        async def slow(*_: Any) -> Release:
            await held.wait()
            return reef.publishing.served("s1")

        reef.publishing.promote = slow  # type: ignore[method-assign]
        pending = asyncio.create_task(reef.send("POST", "/reef/scenarios/s1/promote", {"release_id": "r1-00000000"}))
        for path in ("/reef/status", "/reef/scenarios/s1/releases", "/reef/scenarios/s1/records", "/reef/scenarios"):
            started = time.monotonic()
            await reef.get(path)
            assert time.monotonic() - started < 1
        await reef.chat()
        held.set()
        assert (await pending)[0] == 200
