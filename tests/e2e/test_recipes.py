"""Recipes that need more than a score, end to end on the tiny model: groups, teachers in other contexts, demonstrations."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recipes.selfplay.play import connector, opened
from tests.e2e.server import Server, serving, streamed, until

pytestmark = pytest.mark.slow

LEARN_S = 180
SMALL = {
    "reef.batch_size": "4",
    "reef.policy_lr": "3e-3",
    "reef.off_policy.min_ess": "0",
    "reef.off_policy.max_masked": "1",
    "reef.gate_every": "1000",
    "evaluation.max_kl": "1000",
    "evaluation.smoke_items": "0",
}


def settled(server: Server, count: int) -> list[dict[str, Any]]:
    def ended() -> list[dict[str, Any]]:
        # On a slow machine the stream looks quiet between steps, and a gate that trains nothing comes in between.
        jobs = [job for job in server.get("/reef/scenarios/default/commits")["commits"] if not job["detail"].get("gate_only")]
        return jobs if len(jobs) >= count else []

    jobs = until(ended, f"{count} learning steps", LEARN_S)
    assert {job["state"] for job in jobs} == {"settled"}, jobs
    return jobs


def tell(server: Server, score: float, **metadata: Any) -> None:
    receipt = server.ask("what is it").headers["x-reef-agent-record-id"]
    body = {"score": score, "references": [receipt], "metadata": metadata}
    answer = server.client().post("/reef/report", json=body)
    assert answer.status_code == 200, answer.text


def test_a_group_teaches_itself_and_its_teacher_follows(tiny_model: Path, tmp_path: Path) -> None:
    """SDPO: whole groups only, the sibling's answer in the teacher's prompt, the moving average in the checkpoint."""
    recipe = {"reef.recipe": "recipes.sdpo.recipe:SDPORecipe", "reef.group_size": "4", "reef.top_k": "8"}
    with serving(tmp_path / "h", tiny_model, **SMALL, **recipe) as server:
        for step in range(2):
            tell(server, 1.0, group="lonely", rollout=step)
            for rollout in range(4):
                tell(server, float(rollout == 0), group=f"g{step}", rollout=rollout)
            jobs = settled(server, step + 1)
        for job in jobs:
            metrics = job["detail"]["metrics"]
            assert metrics["policy_updated"] is True and metrics["taught_samples"] == 3 and metrics["groups"] == 1
            assert metrics["logprob_gap_lag0"] < 0.1 and metrics["lag_histogram"] == {"0": 4}
        assert {job["detail"]["metrics"]["state"] for job in jobs} >= {"resumed"}
        assert Counter(server.ledger.samples().values()) == {"consumed": 8, "queued": 2}


def episode(server: Server, score: float, **metadata: Any) -> None:
    """Three turns, each prompt the last one with its answer and what came between, and one report about all three."""
    client, ids = server.client(**{"x-reef-tag-session": f"episode-{metadata['rollout']}"}), list(range(20, 30))
    receipts = []
    for _ in range(3):
        body = {"model": server.model, "prompt": ids, "max_tokens": 5, "ignore_eos": True, "temperature": 1.0}
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        receipts.append(reply.headers["x-reef-agent-record-id"])
        said = server.get(f"/reef/scenarios/default/records/{receipts[-1]}")["tokens"]["output_ids"]
        ids += [*said, 31, 32]
    told = {"score": score, "feedback": "the last turn decided", "references": receipts, "metadata": metadata}
    answer = client.post("/reef/report", json=told).json()
    assert [(one["reference"], one["eligible"]) for one in answer["eligible"]] == [(receipt, True) for receipt in receipts]


def test_a_report_about_several_turns_is_one_trajectory(tiny_model: Path, tmp_path: Path) -> None:
    """GRPO: six exchanges of two episodes are two samples, and what the policy said in each turn trains."""
    recipe = {"reef.recipe": "recipes.grpo.recipe:GRPORecipe", "reef.group_size": "2", "reef.batch_size": "2"}
    with serving(tmp_path / "h", tiny_model, **SMALL | recipe) as server:
        for rollout in range(2):
            episode(server, float(rollout), group="g", rollout=rollout)
        (job,) = settled(server, 1)
        metrics = job["detail"]["metrics"]
        assert metrics["policy_updated"] is True and metrics["logprob_gap_lag0"] < 0.1, metrics
        assert (metrics["samples"], metrics["trained_tokens"]) == (2, 2 * 3 * 5), metrics
        assert Counter(server.ledger.samples().values()) == {"consumed": 2}
        (release,) = [row for row in server.releases() if row["operation"] == "training"]
        assert len(release["evidence"]["consumed"]) == 2


def chat(server: Server, score: float, rollout: int) -> list[str]:
    """Three chat turns, each sending the conversation so far as text, and one report about all three; the receipts."""
    client, messages = server.client(**{"x-reef-tag-session": f"chat-{rollout}"}), []
    receipts = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"question {turn}"})
        if turn == 1:
            text, receipt, _ = streamed(client, server.body("", messages=messages))
        else:
            reply = client.post("/v1/chat/completions", json=server.body("", messages=messages))
            text, receipt = reply.json()["choices"][0]["message"]["content"], reply.headers["x-reef-agent-record-id"]
        messages.append({"role": "assistant", "content": text})
        receipts.append(receipt)
    told = {"score": score, "feedback": "fine", "references": receipts, "metadata": {"group": "c", "rollout": rollout}}
    answer = client.post("/reef/report", json=told).json()
    assert [(one["reference"], one["reason"]) for one in answer["eligible"]] == [(one, "eligible") for one in receipts]
    traces = [server.get(f"/reef/scenarios/default/records/{receipt}")["tokens"] for receipt in receipts]
    for before, after in pairwise(traces):
        history = [*before["prompt_ids"], *before["output_ids"]]
        assert after["prompt_ids"][: len(history)] == history, "the turn goes on with the tokens that were sampled"
    return receipts


def test_a_report_about_a_chat_is_one_trajectory(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing a random model says is encoded again as it was sampled, so this needs the tokens themselves."""
    recipe = {"reef.recipe": "recipes.grpo.recipe:GRPORecipe", "reef.group_size": "4", "reef.batch_size": "4"}
    with serving(tmp_path / "h", tiny_model, **SMALL | recipe) as server:
        receipts = [one for rollout in range(4) for one in chat(server, float(rollout % 2), rollout)]
        records = [server.get(f"/reef/scenarios/default/records/{receipt}") for receipt in receipts]
        said = sum(len(record["tokens"]["output_ids"]) for record in records)
        (job,) = settled(server, 1)
        metrics = job["detail"]["metrics"]
        assert metrics["policy_updated"] is True and metrics["logprob_gap_lag0"] < 0.1, metrics
        assert (metrics["samples"], metrics["trained_tokens"]) == (4, said), metrics
        assert Counter(server.ledger.samples().values()) == {"consumed": 4}


def test_a_demonstration_is_imitated(tiny_model: Path, tmp_path: Path) -> None:
    """SFT: the demonstration is written by the model's own chat template and becomes likelier."""
    recipe = {key: value for key, value in SMALL.items() if "off_policy" not in key}
    with serving(tmp_path / "h", tiny_model, **recipe, **{"reef.recipe": "recipes.sft.recipe:SFTRecipe"}) as server:
        for step in range(2):
            for _ in range(4):
                tell(server, 0.0, demonstration="It is a small house.")
            jobs = settled(server, step + 1)
        losses = [job["detail"]["metrics"]["policy_loss"] for job in sorted(jobs, key=lambda job: job["created_at"])]
        assert losses[1] < losses[0] and all(job["detail"]["metrics"]["imitated_tokens"] > 16 for job in jobs)


def test_the_next_message_of_a_session_is_the_feedback(tiny_model: Path, tmp_path: Path) -> None:
    """OpenClaw-RL: nobody reports; corrections become votes and hints, thanks become votes, and the policy learns from both."""
    words = ["No, answer in French from now on.", "Thanks, that is great!"]
    with serving(
        tmp_path / "h", tiny_model, **SMALL, **{"reef.recipe": "recipes.openclawrl.recipe:OpenClawRLRecipe"}
    ) as server:
        client = server.client()
        for number in range(4):
            asked = [{"role": "user", "content": f"question {number}"}]
            first = client.post("/v1/chat/completions", json=server.body("", messages=asked))
            answer = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
            after = [*asked, answer, {"role": "user", "content": words[number % 2]}]
            assert client.post("/v1/chat/completions", json=server.body("", messages=after)).status_code == 200
        (job,) = settled(server, 1)
        metrics = job["detail"]["metrics"]
        assert (metrics["good_share"], metrics["bad_share"], metrics["hinted_share"]) == (0.5, 0.5, 0.5)
        assert metrics["policy_updated"] is True and metrics["teacher_gap"] > 0 and metrics["logprob_gap_lag0"] < 0.1
        assert Counter(server.ledger.samples().values()) == {"consumed": 4}, "the last turn of a session does not train"


def test_a_game_of_self_play(tiny_model: Path, tmp_path: Path) -> None:
    """Tasks are attempted with and without the hint, both roles are reported, and whole groups train; the hint never does."""
    recipe = {"reef.recipe": "recipes.selfplay.recipe:SelfPlayRecipe", "reef.group_size": "2", "reef.proposals": "4"}
    with serving(tmp_path / "h", tiny_model, **SMALL, **recipe) as server:
        drawn = opened(connector(server.home), "default", tmp_path / "tasks.jsonl", random_tasks=True).generation()
        assert all(one.trial and len(one.trial.plain) == 2 and len(one.trial.hinted) == 2 for one in drawn)
        proposed = opened(connector(server.home), "default", tmp_path / "tasks.jsonl").generation()
        assert all((one.task is None) == (one.trial is None) for one in proposed)
        jobs = settled(server, 3)
        roles = [(job["detail"]["metrics"]["proposals"], job["detail"]["metrics"]["samples"]) for job in jobs]
        assert (0, 4) in roles and any(proposals == 4 for proposals, _ in roles)
        attempts = 2 * sum(one.trial is not None for one in (*drawn, *proposed))
        assert len(server.ledger.samples()) == attempts + 4 and "refused" not in server.ledger.samples().values()
