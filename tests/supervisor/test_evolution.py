"""A harness that evolves, through a real server, real agents in sandboxes and a stub model that heeds what it is told."""

import json
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from aiohttp import web

from reef_cli.harness import sandbox
from tests.doubles.background import background_upstream
from tests.doubles.upstream import Chat, Upstream
from tests.e2e.server import LIMIT_S, Server, serving, stopped, until

pytestmark = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))

LIST = "Answer with a numbered list."
SING = "Sing your answers."
SUITE = "\n".join(
    json.dumps(
        {
            "id": f"three-{n}",
            "messages": [{"role": "user", "content": f"Name three things of kind {n}."}],
            "grader": {"kind": "regex", "pattern": "(?m)^1\\. .*\\n2\\. "},
        }
    )
    for n in range(24)
)
KEY = "provider-key-" + "4d5e6f70"


async def heeding(request: web.Request, raw: bytes) -> web.StreamResponse:
    """The model: lists when a rule asks for lists, and sings instead when one asks for songs."""
    body = orjson.loads(raw)
    told = json.dumps(body["messages"])
    text = "la la la" if SING in told else "1. one\n2. two\n3. three" if LIST in told else "one, two, three"
    return web.json_response(Chat(Upstream(text=text), body).whole())


@pytest.fixture(scope="module")
def provider() -> Iterator[Upstream]:
    with background_upstream() as double:
        double.script = heeding
        yield double


def settings(provider: Upstream, tmp: Path, **more: str) -> dict[str, str]:
    suite = tmp / "suite.jsonl"
    suite.write_text(SUITE)
    return {
        "engine.kind": "upstream",
        "engine.url": provider.url,
        "engine.api_key": KEY,
        "reef.recipe": "recipes.harness_evolve.recipe:HarnessEvolveRecipe",
        "reef.batch_size": "3",
        "reef.training_mode": "hybrid",
        "evaluation.suite": str(suite),
        "evaluation.concurrency": "2",
        "evaluation.alpha": "0.2",
        **more,
    }


@pytest.fixture(scope="module")
def server(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tmp = tmp_path_factory.mktemp("evolution")
    with serving(tmp / "h", Path("stub-model"), **settings(provider, tmp)) as running:
        yield running


def complain(server: Server, scenario: str, feedback: str, times: int = 3) -> None:
    client = server.client(**{"x-reef-scenario": scenario})
    for number in range(times):
        body = {"model": "m", "messages": [{"role": "user", "content": f"Name three things, please ({number})."}]}
        asked = client.post(
            "/v1/chat/completions", json=body, headers={"x-reef-tag-session": f"{scenario}-{feedback}-{number}"}
        )
        receipt = asked.headers["x-reef-agent-record-id"]
        stored = client.post("/reef/report", json={"score": 0, "feedback": feedback, "references": [receipt]})
        assert stored.status_code == 200, stored.text


def jobs(server: Server, scenario: str) -> list[dict[str, Any]]:
    """Newest first."""
    return list(server.get(f"/reef/scenarios/{scenario}/jobs")["jobs"])


def ended(server: Server, scenario: str, count: int = 1) -> dict[str, Any]:
    """The newest job, once `count` of them have ended."""

    def done() -> list[dict[str, Any]]:
        rows = jobs(server, scenario)
        return rows if len(rows) >= count and all(row["state"] in ("settled", "failed") for row in rows) else []

    return until(done, f"the end of job {count} of {scenario}", every_s=0.2)[0]


def entries(server: Server, scenario: str) -> list[dict[str, Any]]:
    reply = server.client(**{"x-reef-scenario": scenario}).get("/reef/harness")
    assert reply.status_code == 200, reply.text
    return list(reply.json()["entries"])


def test_a_rule_that_helps_is_released_and_one_that_harms_is_undone(server: Server, provider: Upstream) -> None:
    complain(server, "s1", LIST)
    job = ended(server, "s1")
    assert (job["state"], job["outcome"]) == ("settled", "select"), job["reason"]
    (entry,) = entries(server, "s1")
    assert entry["config"] == {"text": LIST} and entry["kind"] == "rules"
    head = server.releases("s1")[0]
    assert head["surface"] == "harness" and head["gated"] and head["author"] == "recipe harness_evolve"
    evidence = head["evidence"]
    assert evidence["metrics"]["changed"] == f"added rules {entry['id']}" and evidence["metrics"]["touched"] == [entry["id"]]
    verdict = evidence["verdict"]["evidence"]
    assert verdict["losses"] == 0 and verdict["candidate_mean"] == 1.0 and verdict["current_mean"] == 0.0
    assert verdict["stopped_early"] and len(evidence["consumed"]) == 3

    complain(server, "s1", SING)
    job = ended(server, "s1", 2)
    assert (job["state"], job["outcome"]) == ("settled", "reject") and "shown worse" in job["reason"], job
    assert entries(server, "s1") == [entry] and server.releases("s1")[0]["release_id"] == head["release_id"]
    assert roots(server) == []


def test_episodes_are_kept_and_linked_to_their_records(server: Server) -> None:
    rows = server.get("/reef/scenarios/s1/records", order="oldest", limit=200)["records"]
    records = [server.get(f"/reef/scenarios/s1/records/{row['id']}") for row in rows if row["kind"] == "inference"]
    trials = [record for record in records if "trial" in record["tags"]]
    assert len(trials) >= 8
    for record in trials[:4]:
        kept = server.home / "episodes" / "kept" / record["tags"]["trial"]
        told = json.loads((kept / "episode.json").read_text())
        assert [item["receipt"] for item in told["receipts"]] == [record["id"]] and told["outcome"] == "ran"
        assert list(kept.glob("trajectory/sessions/*.jsonl")) and record["session"] == record["tags"]["trial"]
    sides = {record["tags"]["harness"] for record in trials}
    assert sides == {job[side] for job in jobs(server, "s1") for side in ("candidate_id", "base_release_id")}
    assert [job["release_id"] for job in jobs(server, "s1")] == [None, server.releases("s1")[0]["release_id"]], (
        "the rejected one made none"
    )
    client = server.client(**{"x-reef-scenario": "s1"})
    told = client.post("/reef/report", json={"score": 0, "feedback": SING, "references": [trials[0]["id"]]})
    assert told.status_code == 200
    until(lambda: server.ledger.rows("SELECT 1 FROM sample_state WHERE scenario = 's1' AND reason = 'trial'"), "the refusal")


def test_a_request_in_words_is_judged_at_once(server: Server) -> None:
    client = server.client(**{"x-reef-scenario": "s3"})
    client.post("/reef/scenarios", json={"name": "s3"})
    asked = client.post("/reef/train", json={"text": LIST})
    assert asked.status_code == 200, asked.text
    assert ended(server, "s3")["outcome"] == "select"
    assert [entry["config"]["text"] for entry in entries(server, "s3")] == [LIST]


def test_edits_are_judged_before_they_are_released(server: Server) -> None:
    client = server.client(**{"x-reef-scenario": "s4"})

    def propose(text: str, **more: Any) -> httpx.Response:
        entry = {"id": f"rule-{len(text)}", "kind": "rules", "config": {"text": text}}
        return client.post("/reef/harness/proposals", json={"mutations": [{"op": "create", "entry": entry}], **more})

    first = propose(LIST, reason="lists are easier to read")
    assert first.status_code == 202 and first.json()["state"] == "queued" and entries(server, "s4") == [], first.text
    job = ended(server, "s4")
    assert job["outcome"] == "select" and job["detail"]["metrics"]["reason"] == "lists are easier to read"
    assert len(entries(server, "s4")) == 1
    assert propose(SING).status_code == 202
    assert ended(server, "s4", 2)["outcome"] == "reject" and len(entries(server, "s4")) == 1
    unjudged = propose(SING, judged=False)
    assert unjudged.status_code == 201 and unjudged.json()["gated"] is False and len(entries(server, "s4")) == 2
    assert propose(SING).status_code == 400  # it exists: told at once
    assert len(jobs(server, "s4")) == 2


def test_an_edit_the_agent_does_not_start_with_is_refused_before_any_task(server: Server) -> None:
    client = server.client(**{"x-reef-scenario": "s5"})
    bad = {"id": "c", "kind": "config", "config": {"value": {"max_turns": "many"}}}
    assert client.post("/reef/harness/proposals", json={"mutations": [{"op": "create", "entry": bad}]}).status_code == 202
    job = ended(server, "s5")
    assert (job["state"], job["outcome"]) == ("settled", "reject") and "does not start with it" in job["reason"]
    assert entries(server, "s5") == [] and "verdict" not in job["detail"]


def test_a_client_cannot_pass_an_edit_off_as_feedback(server: Server) -> None:
    client = server.client(**{"x-reef-scenario": "s6"})
    client.post("/reef/scenarios", json={"name": "s6"})
    entry = {"id": "rule", "kind": "rules", "config": {"text": LIST}}
    wish = {"kind": "proposal", "text": "", "mutations": [{"op": "create", "entry": entry}], "origin": "me", "mark": "0" * 64}
    stored = client.post("/reef/report", json={"feedback": wish, "references": []})
    if stored.status_code == 200:
        job = ended(server, "s6")
        assert job["outcome"] == "reject" and "routes" in job["reason"]
    assert entries(server, "s6") == []


def test_no_key_or_token_is_in_anything_an_episode_or_a_release_leaves(server: Server) -> None:
    wanted = [KEY.encode(), server.token.encode()]
    for path in server.home.rglob("*"):
        if path.is_file() and path.name not in ("token", "serve.json"):
            data = path.read_bytes()
            assert not any(secret in data for secret in wanted), path
    blobs = subprocess.run(
        ["git", "--git-dir", str(server.home / "releases.git"), "cat-file", "--batch-all-objects", "--batch"],
        capture_output=True,
        check=True,
    ).stdout
    assert not any(secret in blobs for secret in wanted)


def roots(server: Server) -> list[str]:
    folder = server.home / "episodes" / "roots"
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def gone(server: Server, names: list[str]) -> None:
    """Nothing is left of episodes: no root, no process, no socket folder."""
    assert roots(server) == [] and not any(sandbox.marked(name) for name in names)
    assert not [path for path in Path(tempfile.gettempdir()).glob("reef-ep-*") if path.exists()]


def no_secret_inside(server: Server, names: list[str]) -> None:
    """Neither the provider's key nor the server's token is in the roots or the processes of episodes under way."""
    secrets = (KEY.encode(), server.token.encode())
    for pid in {pid for name in names for pid in sandbox.marked(name)}:
        for part in ("environ", "cmdline"):
            with suppress(OSError):
                assert not any(secret in Path(f"/proc/{pid}/{part}").read_bytes() for secret in secrets)
    for name in names:
        for path in (server.home / "episodes" / "roots" / name).rglob("*"):
            with suppress(OSError):
                assert not path.is_file() or not any(secret in path.read_bytes() for secret in secrets)


def test_kill_nine_at_any_moment_is_undone_or_finished_once(provider: Upstream, tmp_path: Path) -> None:
    server = Server(tmp_path / "h", {"engine.model": "stub-model", **settings(provider, tmp_path)})
    with stopped(server):
        server.start().ready()
        complain(server, "mount", LIST)
        with server.ledger.held("training", LIMIT_S):
            server.kill()
        names = roots(server)
        server.start().ready()
        assert ended(server, "mount", 2)["outcome"] == "select"
        assert [job["state"] for job in jobs(server, "mount")] == ["settled", "failed"]
        assert len(server.releases("mount")) == 2
        gone(server, names)

        complain(server, "episode", LIST)
        until(lambda: len(roots(server)) >= 2 and jobs(server, "episode")[0]["state"] == "evaluating", "episodes")
        names = roots(server)
        no_secret_inside(server, names)
        server.kill()
        server.start().ready()
        assert ended(server, "episode")["outcome"] == "select" and len(server.releases("episode")) == 2
        gone(server, names)

        complain(server, "publish", LIST)
        with server.ledger.held("publishing", LIMIT_S):
            server.kill()
        server.start().ready()
        job = ended(server, "publish")
        assert (job["state"], job["outcome"]) == ("settled", "select") and len(jobs(server, "publish")) == 1
        assert [release["job_id"] for release in server.releases("publish")] == [job["job_id"], None]
        gone(server, [])

        complain(server, "stop", LIST)
        until(lambda: roots(server), "an episode")
        names = roots(server)
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        gone(server, names)


SOLVE = "Write the solution into answer.txt before you answer."


async def proposing_and_coding(request: web.Request, raw: bytes) -> web.StreamResponse:
    """Two models in one: shown failures it writes an edit, and as an agent it writes a file when a rule says so."""
    body = orjson.loads(raw)
    told = json.dumps(body["messages"])
    if "You improve the harness of an agent" in told:
        entry = {"id": "write", "kind": "rules", "config": {"text": SOLVE}}
        text = json.dumps({"mutations": [{"op": "create", "entry": entry}], "reason": "the file was missing"})
        return web.json_response(Chat(Upstream(text=text), body).whole())
    wanted = re.search(r"double of (\d+)", told)
    if SOLVE in told and wanted and body["messages"][-1]["role"] == "user":
        arguments = json.dumps({"path": "answer.txt", "content": str(2 * int(wanted[1]))})
        return web.json_response(Chat(Upstream(calls=[("c1", "write", arguments)]), body).whole())
    return web.json_response(Chat(Upstream(text="Done."), body).whole())


def coding_tasks(folder: Path, count: int) -> None:
    for number in range(1, count + 1):
        (folder / f"t{number}" / "tests").mkdir(parents=True)
        (folder / f"t{number}" / "task.toml").write_text(f"prompt = 'Put the double of {number} into answer.txt.'\n")
        (folder / f"t{number}" / "tests" / "test_answer.py").write_text(
            "import unittest\nfrom pathlib import Path\nclass T(unittest.TestCase):\n"
            f" def test_it(self): self.assertEqual(Path('answer.txt').read_text(), '{2 * number}')\n"
        )


def test_a_model_that_only_reasons_proposes_nothing_and_the_job_says_what_to_raise(provider: Upstream, tmp_path: Path) -> None:
    more = {
        "reef.proposer": "reef_cli.harness.proposers:LanguageModel",
        "reef.proposer_settings": '{"max_tokens": 64}',
    }
    message = {"role": "assistant", "content": "", "reasoning_content": "Well, let me think about that. " * 20}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    provider.replies(200, {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})
    try:
        with serving(tmp_path / "h", Path("stub-model"), **settings(provider, tmp_path, **more)) as server:
            before = len(provider.seen)
            complain(server, "s", "too long")
            job = ended(server, "s")
            assert (job["state"], job["outcome"]) == ("settled", "unchanged"), job
            assert "budget of 64 tokens on reasoning" in job["reason"] and "max_tokens" in job["reason"], job["reason"]
            proposing = [seen for seen in provider.seen[before:] if seen.method == "POST" and seen.body.get("max_tokens") == 64]
            assert "reef.proposer_settings" in job["reason"] and len(proposing) == 1, "asking again spends the same"
            assert len(server.releases("s")) == 1 and entries(server, "s") == []
    finally:
        provider.script = heeding


def test_a_model_proposes_coding_tasks_judge_and_a_person_promotes(provider: Upstream, tmp_path: Path) -> None:
    coding_tasks(tmp_path / "tasks", 4)
    more = {
        "reef.publish": "review",
        "reef.proposer": "reef_cli.harness.proposers:LanguageModel",
        "reef.tasks": str(tmp_path / "tasks"),
        "reef.task_attempts": "2",
        "reef.promote": "1",
        "reef.promote_grader": '{"kind": "contains", "value": "Done"}',
        "evaluation.alpha": "0.2",
    }
    # No key either: a provider on loopback wants none, and episodes must run all the same.
    left_out = ("evaluation.suite", "engine.api_key")
    facts = {key: value for key, value in settings(provider, tmp_path, **more).items() if key not in left_out}
    provider.script = proposing_and_coding
    try:
        with serving(tmp_path / "h", Path("stub-model"), **facts) as server:
            complain(server, "s", "the file is missing")
            job = ended(server, "s")
            assert (job["state"], job["outcome"]) == ("settled", "select"), job["reason"]
            assert job["detail"]["metrics"]["reason"] == "the file was missing"
            verdict = job["detail"]["verdict"]["evidence"]
            assert verdict["suite"]["name"] == "tasks and 1 promoted prompts" and verdict["suite"]["items"] == 9
            graded = next(row for row in verdict["samples"] if row["id"].startswith("t"))
            assert re.search(r"\[episode \S+: 1 of 1 tests passed\]", graded["candidate"]["text"]), graded
            assert entries(server, "s") == [] and server.releases("s")[0]["pending"]
            held = server.client().post("/reef/scenarios/s/promote", json={"release_id": job["release_id"]})
            assert held.status_code == 200, held.text
            assert [entry["config"]["text"] for entry in entries(server, "s")] == [SOLVE]
    finally:
        provider.script = heeding
