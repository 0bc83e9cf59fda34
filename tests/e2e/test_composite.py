"""Weights and harness of one scenario learn from the same reports: real training, real episodes of the agent, two heads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reef_cli.harness import sandbox
from tests.e2e.server import LIMIT_S, Server, stopped, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem())),
]

SAO_MEMBER = {
    "recipe": "recipes.sao.recipe:SAORecipe",
    "critic_only_steps": 0,
    "policy_lr": 3e-3,
    "critic_width": 8,
    "level_decay": 1.0,
    "min_ess": 0.0,
    "max_masked": 1.0,
}
MEMBERS = [SAO_MEMBER, {"recipe": "recipes.harness_evolve.recipe:HarnessEvolveRecipe", "max_score": 0.5}]
SETTINGS = {
    "reef.recipe": "recipes.composite.recipe:CompositeRecipe",
    "reef.members": json.dumps(MEMBERS),
    "reef.batch_size": "3",  # of both members
    "reef.gate_every": "1000",
    "evaluation.max_kl": "1000",
    "evaluation.smoke_items": "0",
}
RULE = "Answer with a numbered list."


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "h", {"engine.model": str(tiny_model), **SETTINGS})
    with stopped(made):
        made.start().ready()
        yield made


def complain(server: Server, **headers: str) -> None:
    """Three answers that did not please, with the same words about each."""
    client = server.client()
    for number in range(3):
        words = {"x-reef-tag-session": f"run-{number}-{len(headers)}", **headers}
        reply = client.post("/v1/chat/completions", json=server.body(f"question {number}"), headers=words)
        assert reply.status_code == 200, reply.text
        report = {"score": number / 4, "feedback": RULE, "references": [reply.headers["x-reef-agent-record-id"]]}
        told = client.post("/reef/report", json=report)
        assert told.status_code == 200 and told.json()["eligible"][0]["eligible"], told.text


def jobs(server: Server) -> list[dict[str, Any]]:
    return list(server.get("/reef/scenarios/default/jobs")["jobs"])[::-1]


def ended(server: Server, count: int) -> list[dict[str, Any]]:
    def done() -> list[dict[str, Any]]:
        rows = jobs(server)
        return rows if len(rows) >= count and all(row["state"] in ("settled", "failed") for row in rows) else []

    found = until(done, f"{count} jobs", max(LIMIT_S, 240))
    assert {row["state"] for row in found} == {"settled"}, found
    return found


def heads(server: Server) -> dict[str, str]:
    row = server.get("/reef/scenarios")["scenarios"][0]
    return dict(row["heads"])


def test_both_surfaces_learn_from_the_same_reports_and_each_goes_back_alone(server: Server) -> None:
    before = server.greedy()
    complain(server)
    first, second = ended(server, 2)
    assert {first["recipe"], second["recipe"]} == {"sao", "harness_evolve"}
    assert [job["outcome"] for job in (first, second)] == ["select", "select"], (first["reason"], second["reason"])
    moved = heads(server)
    by = {job["recipe"]: job["release_id"] for job in (first, second)}
    assert moved == {"weights": by["sao"], "harness": by["harness_evolve"]}
    (entry,) = server.get("/reef/harness")["entries"]
    assert entry["config"] == {"text": RULE}
    reply = server.ask("who answers")
    assert reply.headers["x-reef-release-id"] == moved["weights"] and server.greedy() != before
    status = server.get("/reef/status")["scenarios"][0]
    assert set(status["surfaces"]) == {"weights", "harness"} and status["served"] == moved["weights"]

    client = server.client()
    refused = client.post("/reef/scenarios/default/rollback", json={})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "ambiguous_surface"
    back = client.post("/reef/scenarios/default/rollback", json={"surface": "weights"})
    assert back.status_code == 200 and back.json()["surface"] == "weights", back.text
    assert server.greedy() == before and heads(server)["harness"] == moved["harness"]
    bare = client.post("/reef/scenarios/default/rollback", json={"expected_head": moved["harness"]})
    assert bare.status_code == 200 and bare.json()["surface"] == "harness", bare.text
    assert server.get("/reef/harness")["entries"] == [] and heads(server)["weights"] == back.json()["release_id"]


def test_samples_of_an_earlier_harness_do_not_train_weights_after_a_restart(server: Server) -> None:
    """The agent still works with the harness before: its reports are evidence for the harness and train no weights."""
    complain(server)
    ended(server, 2)
    old = heads(server)["harness"]
    (entry,) = server.get("/reef/harness")["entries"]
    edit = {"mutations": [{"op": "remove", "id": entry["id"]}], "judged": False}
    made = server.client().post("/reef/harness/proposals", json=edit)
    assert made.status_code == 201, made.text
    weights = heads(server)["weights"]
    server.kill()
    server.start().ready()
    assert heads(server) == {"weights": weights, "harness": made.json()["release_id"]}
    client = server.client()
    told = []
    for number in range(3):
        tags = {"x-reef-tag-harness": old, "x-reef-tag-session": f"late-{number}"}
        reply = client.post("/v1/chat/completions", json=server.body(f"late {number}"), headers=tags)
        report = {"score": 1.0, "references": [reply.headers["x-reef-agent-record-id"]]}
        told.append(client.post("/reef/report", json=report).json())
    verdicts = [one for answer in told for one in answer["eligible"]]
    assert [(one["eligible"], one["reason"]) for one in verdicts] == [(False, "other_harness")] * 3
    assert len(jobs(server)) == 2
