"""The main job end to end on the tiny model: serve, report, a real training step, release, hot swap, rollback, restart."""

import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.types import Inference
from reef_cli.experience.log import ExperienceLog
from reef_cli.releases.service import ReleaseService
from tests.e2e.server import SAO, Server, reef, serving, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def learner(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Learns from every two reports; shared, so tests ask what happened since they began."""
    exact = {"engine.dtype": "float32"}  # one test compares tokens with another implementation
    with serving(tmp_path_factory.mktemp("home") / "h", tiny_model, **SAO, **exact) as server:
        yield server


def learned(server: Server, steps: int = 1) -> list[dict[str, Any]]:
    """Report as many samples as `steps` need and wait; the jobs that settled."""
    before = {job["id"] for job in server.ledger.jobs()}
    server.scored(2 * steps)
    return wait_settled(server, before, steps)


def wait_settled(server: Server, before: set[str], steps: int) -> list[dict[str, Any]]:
    def new() -> list[dict[str, Any]]:
        ended = [job for job in server.ledger.jobs() if job["id"] not in before and job["state"] in ("settled", "failed")]
        return ended if len(ended) >= steps else []

    jobs = until(new, f"{steps} learning steps", 180)
    assert {job["state"] for job in jobs} == {"settled"}, jobs
    return jobs


class Readers:
    """Reads the server's lists all the time, and remembers how long each took and whether a job was under way."""

    PATHS = ("/reef/status", "/reef/scenarios/default/releases", "/reef/harness", "/reef/harness/releases")

    def __init__(self, server: Server) -> None:
        self.client = server.client()
        self.done = threading.Event()
        self.took: list[float] = []
        self.busy = 0
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> "Readers":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join(60)

    def run(self) -> None:
        while not self.done.wait(0.4):
            for path in self.PATHS:
                began = time.monotonic()
                reply = self.client.get(path)
                self.took.append(time.monotonic() - began)
                assert reply.status_code == 200, reply.text
                if path == "/reef/status":
                    self.busy += reply.json()["scenarios"][0]["state"] not in ("idle", "collecting")

    def check(self) -> None:
        assert self.busy >= 3, "reads were answered while the step ran"
        assert statistics.median(self.took) < 1, sorted(self.took)[-5:]


def test_reports_become_a_release_that_serves_and_a_rollback_restores_the_tokens(learner: Server) -> None:
    first, before = learner.head(), learner.greedy()
    with Readers(learner) as readers:
        (job,) = learned(learner)
    readers.check()
    assert job["outcome"] == "select" and learner.ledger.history(job["id"]) == [
        *("reserved", "training", "candidate", "evaluating", "decided", "publishing", "loaded", "settled")
    ]
    released = learner.releases()[0]
    assert released["release_id"] == job["release_id"] == learner.head()
    assert released["operation"] == "training" and released["kind"] == "lora" and released["parent_release_id"] == first
    assert released["job_id"] == job["id"] and len(released["evidence"]["consumed"]) == 2
    assert released["evidence"]["metrics"]["policy_updated"] is True

    reply = learner.ask("who answers")
    assert reply.headers["x-reef-release-id"] == released["release_id"]
    assert reply.headers["x-reef-weight-version"] == f"default@{released['release_id']}"
    after = learner.greedy()
    assert after != before, "a step at this learning rate changes the greedy answer of a random model"

    # On a slow machine the quiet stream may have been judged meanwhile, which makes a release of its own.
    head = next(row for row in learner.releases() if row["current"])
    back = learner.client().post(
        "/reef/scenarios/default/rollback", json={"release_id": first, "expected_head": head["release_id"]}
    )
    assert back.status_code == 200, back.text
    restored = back.json()
    assert restored["operation"] == "rollback" and restored["release_id"] not in (first, released["release_id"])
    assert restored["parent_release_id"] == head["release_id"] and restored["step"] > head["step"]
    assert learner.greedy() == before
    assert learner.greedy(**{"x-reef-release-id": released["release_id"]}) == after, "the dropped release can still be pinned"
    assert len(learner.releases()) >= 3


def test_learning_goes_on_from_where_a_rollback_went(learner: Server) -> None:
    learned(learner)
    rolled = learner.client().post("/reef/scenarios/default/rollback", json={}).json()
    (job,) = learned(learner)
    chain = learner.releases()
    assert chain[0]["release_id"] == job["release_id"] and chain[0]["parent_release_id"] == rolled["release_id"]


def test_eligibility_is_answered_with_reasons(learner: Server) -> None:
    client = learner.client()

    def report(**body: Any) -> list[tuple[bool, str]]:
        reply = client.post("/reef/report", json=body)
        assert reply.status_code == 200, reply.text
        return [(one["eligible"], one["reason"]) for one in reply.json()["eligible"]]

    one, two, three = (learner.ask(f"eligible {n}").headers["x-reef-agent-record-id"] for n in range(3))
    assert report(feedback="wrong answer", references=[one]) == [(False, "needs_score")]
    assert report(score=0.5, references=[one, two]) == [(False, "needs_single_receipt")] * 2
    assert report(score=0.5, references=[one], metadata={"eligible": False}) == [(False, "opted_out")]
    assert report(score=0.5, references=[left_early(learner)]) == [(False, "incomplete")]
    cold = client.post("/v1/chat/completions", json=learner.body("cold", temperature=0)).headers["x-reef-agent-record-id"]
    assert report(score=0.5, references=[cold]) == [(False, "greedy")]
    # A recorded reward is given once: it pairs with the next one into a step.
    assert report(score=0.5, references=[three]) == [(True, "eligible")]
    assert report(score=0.9, references=[three])[0][1] in ("already_sampled", "already_trained")
    before = {job["id"] for job in learner.ledger.jobs()}
    learner.scored(1)
    wait_settled(learner, before, 1)


def left_early(server: Server) -> str:
    """The receipt of an answer whose client did not wait for its end."""
    client = server.client()
    body = server.body("leaving", stream=True, max_tokens=400, ignore_eos=True)
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        receipt = reply.headers["x-reef-agent-record-id"]
        next(reply.iter_raw())
    path = f"/reef/scenarios/default/records/{receipt}"
    until(lambda: client.get(path).status_code == 200, "the record of what was answered")
    assert client.get(path).json()["complete"] is False
    return receipt


def test_a_record_never_trains_twice(learner: Server) -> None:
    before = {job["id"] for job in learner.ledger.jobs()}
    ids = learner.scored(2, "once")
    wait_settled(learner, before, 1)
    client = learner.client()
    for number, id_ in enumerate(ids):
        record = learner.get(f"/reef/scenarios/default/records/{id_}")
        same = {"agent_record_id": id_, "score": record["score"], "references": record["references"]}
        assert client.post("/reef/report", json=same).status_code == 200
        assert client.post("/reef/report", json=same | {"score": 17.0}).status_code == 409
        new = {"agent_record_id": f"new{number}:{id_}", "score": 1.0, "references": record["references"]}
        reply = client.post("/reef/report", json=new).json()
        assert reply["eligible"] == [{"reference": record["references"][0], "eligible": False, "reason": "already_trained"}]
    learned(learner)
    consumed = [one for row in learner.releases() for one in row["evidence"].get("consumed", ())]
    assert len(consumed) == len(set(consumed))
    assert not any(one.startswith("new") for one in consumed)


def test_the_published_adapter_says_the_same_in_plain_transformers_and_peft(learner: Server, tiny_model: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learned(learner)
    head = learner.releases()[0]
    assert head["current"] and head["kind"] == "lora"
    fixed = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
    reply = learner.ask("the quick brown fox", **fixed)
    assert reply.headers["x-reef-release-id"] == head["release_id"]
    record = learner.get(f"/reef/scenarios/default/records/{reply.headers['x-reef-agent-record-id']}")
    prompt, served = record["tokens"]["prompt_ids"], record["tokens"]["output_ids"]
    assert len(served) == 24

    folder = ReleaseService(learner.home).directory(head["content_id"])
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder))
    choice = {"do_sample": False, "max_new_tokens": 24, "min_new_tokens": 24, "pad_token_id": 0, "eos_token_id": None}

    def greedy() -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **choice)
        return made[0, len(prompt) :].tolist()

    assert greedy() == served
    with model.disable_adapter():
        assert greedy() != served, "the adapter is what makes the difference"


def test_a_scenario_is_not_archived_under_its_job(learner: Server) -> None:
    client, receipts = learner.client(**{"x-reef-scenario": "leaves"}), []
    for number in range(2):
        receipt = client.post("/v1/chat/completions", json=learner.body(f"q {number}")).headers["x-reef-agent-record-id"]
        assert client.post("/reef/report", json={"score": number, "references": [receipt]}).status_code == 200
        receipts.append(receipt)
    (job,) = until(lambda: learner.get("/reef/scenarios/leaves/jobs", state="open")["jobs"], "a job", every_s=0.01)
    refused = client.delete("/reef/scenarios/leaves")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_out"), refused.text
    until(lambda: learner.get(f"/reef/scenarios/leaves/jobs/{job['job_id']}")["state"] == "settled", "the end of the job", 180)
    trained, _ = learner.releases("leaves")
    assert client.delete("/reef/scenarios/leaves").status_code == 200
    assert client.get("/reef/scenarios/leaves/releases").status_code == 404
    assert "leaves" not in [row["name"] for row in learner.get("/reef/scenarios")["scenarios"]]
    assert client.post("/v1/chat/completions", json=learner.body("again")).status_code == 200
    assert [row["operation"] for row in learner.releases("leaves")] == ["creation"], "the name is free, the chain empty"
    log = ExperienceLog.open(learner.home / "experience.db")
    try:
        (old,) = log.archived()
        kept = [log.get(old.name, receipt) for receipt in receipts]
    finally:
        log.close()
    assert [isinstance(record, Inference) and record.tokens is not None for record in kept] == [True, True]
    git = ["git", "--git-dir", str(learner.home / "releases.git"), "for-each-ref", "refs/reef-archive/leaves/"]
    assert "leaves" in subprocess.run(git, capture_output=True, text=True, check=True).stdout, "its chain is put aside"
    assert ReleaseService(learner.home).directory(trained["content_id"]) is not None, "and its weights are on disk"


def test_a_restart_keeps_everything(learner: Server) -> None:
    (trained,) = learned(learner)
    answer, chain, jobs = learner.greedy(), learner.releases(), learner.ledger.jobs()
    assert learner.stop() == 0
    offline = json.loads(reef("release", "list", "--json", "--home", str(learner.home)).stdout)["releases"]
    assert [row["release_id"] for row in offline] == [row["release_id"] for row in chain]
    learner.start().ready()
    assert learner.greedy() == answer and learner.ledger.jobs() == jobs
    assert [row["release_id"] for row in learner.releases()] == [row["release_id"] for row in chain]
    used = next(row for row in chain if row["release_id"] == trained["release_id"])["evidence"]["consumed"]
    for id_ in used:
        record = learner.get(f"/reef/scenarios/default/records/{id_}")
        same = {"agent_record_id": id_, "score": record["score"], "references": record["references"]}
        assert learner.client().post("/reef/report", json=same).status_code == 200, "known, and not trained again"
        assert learner.client().post("/reef/report", json=same | {"score": 17.0}).status_code == 409
    (job,) = learned(learner)
    assert learner.releases()[0]["release_id"] == job["release_id"]
    assert not set(used) & set(learner.releases()[0]["evidence"]["consumed"])
    sound = reef("release", "verify", "--home", str(learner.home))
    assert sound.returncode == 0, sound.stdout


def test_what_was_trained_and_evicted_is_known_for_ever(learner: Server) -> None:
    """Retention drops the bodies of what a job consumed; a report of it sent again is neither trained nor silently changed."""
    learned(learner)
    used = learner.releases()[0]["evidence"]["consumed"]
    path = "/reef/scenarios/default/records"
    reports = [learner.get(f"{path}/{id_}") for id_ in used]
    jobs = learner.ledger.jobs()
    assert learner.stop() == 0
    learner.settings["storage.keep_bytes"] = "0"
    try:
        client = learner.start().ready().client()
        cited = [reference for report in reports for reference in report["references"]]
        until(lambda: {client.get(f"{path}/{one}").status_code for one in cited} == {404}, "the bodies being dropped")
        for report in reports:
            same = {"agent_record_id": report["id"], "score": report["score"], "references": report["references"]}
            assert client.post("/reef/report", json=same).json()["agent_record_id"] == report["id"]
            for change in ({"score": 17.0}, {"feedback": "other"}):
                refused = client.post("/reef/report", json=same | change)
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "content_conflict")
        assert {learner.ledger.samples()[id_] for id_ in used} == {"consumed"} and learner.ledger.jobs() == jobs
    finally:
        learner.stop()
        del learner.settings["storage.keep_bytes"]
        learner.start().ready()


def test_reads_do_not_wait_for_a_trainer_that_stands_still(learner: Server) -> None:
    learner.scored(2, "slow")
    (pid,) = until(learner.trainer_pids, "the trainer")
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: learner.ledger.open_jobs(), "a step")
        with Readers(learner) as readers:
            time.sleep(6)
            assert learner.ask("meanwhile").status_code == 200
        readers.check()
        assert len(readers.took) >= 20 and max(readers.took) < 1, sorted(readers.took)[-5:]
        assert learner.ledger.open_jobs(), "it was held all the time"
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not learner.ledger.open_jobs(), "the end of the step", 180)


def stopped_child(find: Callable[[], list[int]], what: str) -> int:
    """A child process, standing still from soon after its start."""
    (pid,) = until(find, what, every_s=0.002)
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_after_kill_9_nobody_is_fooled_by_what_the_old_server_left(learner: Server) -> None:
    """Its announcement is still there. Clients and steps wait for the new engine and the new trainer, however slow."""
    learned(learner)
    old = {learner.engine_pid(), *learner.trainer_pids()}
    learner.kill()
    place = {"REEF_HOME": str(learner.home)}
    assert (learner.home / "run" / "serve.json").exists()
    assert reef("status", **place).returncode == 6

    learner.start()
    engine = stopped_child(
        lambda: [pid for pid, words in learner.children().items() if "engines.embedded" in words], "an engine"
    )
    time.sleep(3)
    assert not learner.serves(), "the engine has not started"
    told = reef("status", "--json", **place)
    assert told.returncode == 6 or json.loads(told.stdout)["ready"] is False, told.stdout
    os.kill(engine, signal.SIGCONT)
    learner.ready()
    assert learner.ask("there again").status_code == 200

    before = {job["id"] for job in learner.ledger.jobs()}
    learner.scored(2, "again")
    trainer = stopped_child(learner.trainer_pids, "a trainer")
    assert {engine, trainer}.isdisjoint(old)
    time.sleep(3)
    assert [job["state"] for job in learner.ledger.jobs() if job["id"] not in before] == ["training"], "it waits"
    os.kill(trainer, signal.SIGCONT)
    wait_settled(learner, before, 1)


def test_queued_reports_survive_a_stop(tiny_model: Path, tmp_path: Path) -> None:
    """18 reports arrive fast with one sample per step; the server stops after the first step, and the rest trains later."""
    with serving(tmp_path / "h", tiny_model, **{**SAO, "reef.batch_size": "1", "reef.max_staleness": "50"}) as server:
        ids = server.scored(18)
        until(lambda: server.ledger.settled() >= 1, "the first step", 180)
        assert server.stop() == 0
        samples = server.ledger.samples()
        assert set(samples) == set(ids)
        waiting = sum(state != "consumed" for state in samples.values())
        assert 1 <= waiting <= 17
        server.start().ready()
        assert not [state for state in server.ledger.samples().values() if state in ("dropped", "refused")]
        until(lambda: set(server.ledger.samples().values()) == {"consumed"}, "all reports trained", 240)
        consumed = [one for row in server.releases() for one in row["evidence"].get("consumed", ())]
        assert sorted(consumed) == sorted(ids)


def test_no_update_no_release(tiny_model: Path, tmp_path: Path) -> None:
    """While the critic warms up nothing is published, and the status says so."""
    with serving(tmp_path / "h", tiny_model, **{**SAO, "reef.critic_only_steps": "5"}) as server:
        head = server.head()
        (job,) = learned(server)
        assert job["outcome"] == "unchanged" and server.head() == head
        row = next(row for row in server.status()["scenarios"] if row.get("scenario", row.get("name")) == "default")
        assert row["last_outcome"]["outcome"] == "unchanged" and row["last_outcome"]["reason"]
        (commit,) = server.get("/reef/scenarios/default/commits")["commits"]
        assert (commit["outcome"], commit["reason"]) == ("unchanged", row["last_outcome"]["reason"])
        assert commit["created_at"] < commit["updated_at"] and commit["release_id"] is None, "it made none"
        assert set(server.ledger.samples().values()) == {"consumed"}
