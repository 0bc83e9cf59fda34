"""`reef serve` over a real SGLang: capture, refusals, LoRA releases under live clients, a learning step, kills, restarts."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.server import SAO, Server, serving, stopped, streamed, until
from tests.e2e.test_swaps import clients, grown, publish
from tests.engines.live import make_model
from tests.sglang.adapters import make_adapter
from tests.sglang.running import CPU, CPU_LORA, python

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 600.0


def settings(**native: Any) -> dict[str, str]:
    flags = {f"engine.sglang.{key}": str(value).lower() for key, value in native.items()}
    return {
        "engine.kind": "sglang",
        "engine.python": python(),
        "engine.max_running_requests": "8",
        "engine.max_lora_rank": "8",
        "engine.start_timeout_s": "600",
        **flags,
    }


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights; SGLang's LoRA wants widths that are multiples of 64."""
    return make_model(tmp_path_factory.mktemp("small") / "m", width=192)


@pytest.fixture(scope="module")
def server(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Learns from every two reports, with LoRA adapters beside each other in one SGLang."""
    server = Server(tmp_path_factory.mktemp("home") / "h", {"engine.model": str(small), **SAO, **settings(**CPU_LORA)})
    with stopped(server):
        yield server.start().ready(LIMIT_S)


def engine_pid(server: Server) -> int:
    return next(pid for pid, words in server.children().items() if "sglang.launch_server" in words)


def record_of(server: Server, reply: httpx.Response) -> dict[str, Any]:
    return dict(server.get(f"/reef/scenarios/default/records/{reply.headers['x-reef-agent-record-id']}"))


def sound(record: dict[str, Any], version: str) -> None:
    """Tokens as the engine emitted them, each with its log-prob and its weights."""
    tokens = record["tokens"]
    assert record["complete"] and tokens["prompt_ids"]
    assert len(tokens["output_ids"]) == len(tokens["logprobs"]) > 0
    assert all(value <= 0 for value in tokens["logprobs"])
    assert tokens["spans"] == [{"version": version, "start": 0, "end": len(tokens["output_ids"])}]


def test_every_dialect_is_captured_token_by_token(server: Server) -> None:
    client = server.client()
    words = "the quick brown fox"
    chat = server.ask(words, max_tokens=8)
    sound(record_of(server, chat), "base")
    assert chat.json()["choices"][0]["finish_reason"] in ("stop", "length")
    asked = {"model": server.model, "max_tokens": 8, "messages": [{"role": "user", "content": words}]}
    message = client.post("/v1/messages", json=asked, headers={"anthropic-version": "2023-06-01"})
    assert message.status_code == 200, message.text
    sound(record_of(server, message), "base")
    response = client.post("/v1/responses", json={"model": server.model, "input": words, "max_output_tokens": 8})
    assert response.status_code == 200, response.text
    sound(record_of(server, response), "base")
    _, receipt, _ = streamed(client, server.body(words, max_tokens=8))
    sound(dict(server.get(f"/reef/scenarios/default/records/{receipt}")), "base")


def test_a_prefix_is_reused_and_told(server: Server) -> None:
    text = "wizards box in the warm autumn light and " * 4
    usages = [server.ask(text, max_tokens=2).json()["usage"] for _ in range(2)]
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] > usages[0]["prompt_tokens"] // 2


def test_what_sglang_would_not_survive_is_refused(server: Server) -> None:
    client = server.client()
    for body in ({"prompt": [5, 4000]}, {"prompt": [5], "logit_bias": {"4000": 1}}):
        reply = client.post("/v1/completions", json={"model": server.model, "max_tokens": 1, **body})
        assert reply.status_code == 400, reply.text
    long = client.post("/v1/completions", json={"model": server.model, "max_tokens": 1, "prompt": [5] * 600})
    assert long.status_code == 400 and "context" in long.text
    assert server.ask("still there", max_tokens=1).status_code == 200 and server.status()["engine"]["restarts"] == 0


def test_no_key_of_the_engine_is_written_or_listed(server: Server) -> None:
    config = server.home / "run" / "engine.yaml"
    assert config.stat().st_mode & 0o777 == 0o600
    keys = list(json.loads(config.read_text()).values())
    log = (server.home / "logs" / "engine.log").read_text()
    assert "server_args=" in log and not any(key in log for key in keys)
    family = [psutil.Process(engine_pid(server)), *psutil.Process(engine_pid(server)).children(recursive=True)]
    assert len(family) >= 3 and not any(key in " ".join(process.cmdline()) for process in family for key in keys)


def test_lora_releases_swap_under_streaming_clients(server: Server, small: Path, tmp_path: Path) -> None:
    first = server.head()
    with clients(server) as answers:
        grown(answers)
        releases = [first]
        for number in range(2):
            releases.append(publish(server.home, make_adapter(tmp_path / str(number), small, seed=number, strength=0.15)))
            until(lambda: server.ask("x").headers["x-reef-release-id"] == releases[-1], "the server following", LIMIT_S)
            grown(answers)
        back = server.client().post("/reef/scenarios/default/rollback", json={"release_id": first})
        assert back.status_code == 200, back.text
        releases.append(back.json()["release_id"])
        grown(answers)
    assert {release for _, _, release in answers} == set(releases)
    for text, receipt, release in answers:
        record = server.get(f"/reef/scenarios/default/records/{receipt}")
        version = "base" if release in (first, releases[-1]) else f"default@{release}"
        assert {span["version"] for span in record["tokens"]["spans"]} == {version} and text is not None


def test_a_learning_step_becomes_the_release_that_serves(server: Server) -> None:
    before, seen = server.greedy(), {job["id"] for job in server.ledger.jobs()}
    server.scored(2)

    def ended() -> list[dict[str, Any]]:
        return [job for job in server.ledger.jobs() if job["id"] not in seen and job["state"] in ("settled", "failed")]

    (job,) = until(ended, "a learning step", LIMIT_S)
    assert (job["state"], job["outcome"]) == ("settled", "select"), job
    released = server.releases()[0]
    assert released["release_id"] == job["release_id"] and released["kind"] == "lora"
    assert released["evidence"]["metrics"]["logprob_gap_lag0"] < 0.1, "engine and trainer agree on what was sampled"
    reply = server.ask("who answers")
    assert reply.headers["x-reef-weight-version"] == f"default@{released['release_id']}"
    sound(record_of(server, reply), f"default@{released['release_id']}")
    assert server.greedy() != before


def test_a_killed_engine_comes_back_with_the_heads_weights(server: Server) -> None:
    head, answer, dead = server.head(), server.greedy(), engine_pid(server)
    family = psutil.Process(dead).children(recursive=True)
    os.kill(dead, signal.SIGKILL)
    until(lambda: server.status()["engine"]["restarts"] == 1, "the restart", LIMIT_S)
    server.ready(LIMIT_S)
    until(lambda: answers_as(server, head), "the head's weights", LIMIT_S)
    assert server.greedy() == answer
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    log = (server.home / "logs" / "reef.log").read_text()
    assert "was killed by signal 9" in log


def answers_as(server: Server, release: str) -> bool:
    reply = server.client().post("/v1/chat/completions", json=server.body("who"))
    return reply.status_code == 200 and reply.headers["x-reef-release-id"] == release


def test_a_killed_server_leaves_no_engine_and_serves_again(server: Server) -> None:
    head, answer = server.head(), server.greedy()
    left = psutil.Process(engine_pid(server))
    family = [left, *left.children(recursive=True)]
    server.kill()
    gone = lambda: not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]  # noqa: E731
    until(gone, "the engine ending with its server", 60)
    server.start().ready(LIMIT_S)
    assert server.head() == head and server.greedy() == answer


def test_an_engine_that_runs_already_is_served_by_its_address(server: Server, small: Path, tmp_path: Path) -> None:
    """Attached by URL to the SGLang another server started; its own name for its weights is kept."""
    keys = json.loads((server.home / "run" / "engine.yaml").read_text())
    command = psutil.Process(engine_pid(server)).cmdline()
    url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
    flags = {
        "engine.kind": "sglang",
        "engine.url": url,
        "engine.api_key": keys["api-key"],
        "engine.admin_key": keys["admin-api-key"],
    }
    with serving(tmp_path / "h", small, **flags) as attached:
        reply = attached.ask("through the address")
        sound(record_of(attached, reply), "base")


def test_a_flag_sglang_does_not_have_ends_the_start_with_its_name(small: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "h", {"engine.model": str(small), **settings(**CPU), "engine.sglang.tp_sise": "2"})
    with stopped(server):
        assert server.start().ended(LIMIT_S) != 0
        assert "tp-sise is no flag of SGLang" in server.words() and "did you mean tp-size?" in server.words()
