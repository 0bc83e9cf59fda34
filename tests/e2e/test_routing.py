"""Routing by a real `reef serve` over the embedded engine: pins under load, sticky canaries, races, restarts, collection."""

import json
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from reef_cli.core.ids import ContentId
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases import Keep, ReleaseService
from tests.e2e.server import LIMIT_S, Server, clean_environment, command, reef, serving, until

PATH = "/reef/scenarios/default/routing"
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("home") / "h", tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def arms(server: Server, adapters: list[Path]) -> tuple[str, str]:
    """A released LoRA adapter at the head, and a held one."""
    service = ReleaseService(server.home)
    head = service.head("default")
    assert head is not None
    drafts = []
    for folder in adapters[:2]:
        artifact = service.store(folder, "lora")
        drafts.append(Draft(ContentId(artifact.content_id), "lora", Surface.WEIGHTS, Operation.TRAINING, "test"))
    released = service.publish("default", drafts[0], head.release_id)
    held = service.hold("default", drafts[1], released.release_id)
    until(lambda: server.ask("x").headers["x-reef-release-id"] == released.release_id, "the server following the head")
    return str(released.release_id), str(held.release_id)


@pytest.fixture(autouse=True)
def cleared(server: Server) -> Iterator[None]:
    # A test may have moved the chain's head itself; the server follows within a moment.
    until(lambda: server.ask("x").headers["x-reef-release-id"] == server.head(), "the server following the head")
    yield
    assert server.client().delete(PATH).status_code == 200


def put(server: Server, **policy: Any) -> dict[str, Any]:
    reply = server.client().put(PATH, json=policy)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def answered_by(server: Server, **headers: str) -> str:
    return str(
        server.client(**headers).post("/v1/chat/completions", json=server.body("hi", max_tokens=1)).headers["x-reef-release-id"]
    )


def test_two_clients_pinned_to_different_releases_get_the_right_one_under_load(server: Server, arms: tuple[str, str]) -> None:
    expected = {arm: server.greedy(PROMPT, **{"x-reef-release-id": arm}) for arm in arms}
    assert len(set(expected.values())) == 2
    put(server, pin=arms[1])
    assert answered_by(server) == arms[1], "a pinned policy answers whoever pins nothing"
    url, token, wrong, done = server.url, server.token, [], []

    def work(number: int) -> None:
        pin = arms[number % 2]
        headers = {"Authorization": f"Bearer {token}", "x-reef-release-id": pin}
        with httpx.Client(base_url=url, headers=headers, timeout=LIMIT_S) as client:
            for _ in range(6):
                body = server.body(PROMPT, temperature=0, ignore_eos=True, max_tokens=24)
                reply = client.post("/v1/chat/completions", json=body)
                text = reply.json()["choices"][0]["message"]["content"]
                record = client.get(f"/reef/scenarios/default/records/{reply.headers['x-reef-agent-record-id']}").json()
                spans = {span["version"] for span in record["tokens"]["spans"]}
                found = (reply.headers["x-reef-release-id"], record["release_id"], spans, text)
                (done if found == (pin, pin, {f"default@{pin}"}, expected[pin]) else wrong).append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not wrong and len(done) == 36


def test_a_canary_keeps_its_sessions_named_or_not(server: Server, arms: tuple[str, str]) -> None:
    head, canary = arms
    put(server, shares={"head": 0.5, canary: 0.5})
    view = server.get(PATH)
    assert view["shares"] == {head: 0.5, canary: 0.5} and view["release"]["surface"] == "routing"
    seen = {name: answered_by(server, **{"x-reef-session": name}) for name in (f"s{number}" for number in range(12))}
    assert set(seen.values()) == {head, canary}
    assert seen == {name: answered_by(server, **{"x-reef-session": name}) for name in seen}
    client = server.client()
    talks = set()
    for number in range(8):  # conversations that name no session: each goes on with the release that began it
        messages: list[dict[str, str]] = [{"role": "user", "content": f"talk {number}"}]
        makers = set()
        for turn in range(3):
            body = {"model": server.model, "messages": messages, "max_tokens": 4}
            reply = client.post("/v1/chat/completions", json=body)
            makers.add(reply.headers["x-reef-release-id"])
            answer = reply.json()["choices"][0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"and {turn}?"}]
        assert len(makers) == 1, (number, makers)
        talks |= makers
    assert talks == {head, canary}


def test_a_shadow_answers_for_people_only(server: Server, arms: tuple[str, str]) -> None:
    head, shadow = server.head(), arms[1]
    expected = {name: server.greedy(PROMPT, **{"x-reef-release-id": name}) for name in (head, shadow)}
    put(server, shadow=shadow)
    before = server.status()["scenarios"][0]["counts"]["records"]
    assert [server.greedy(PROMPT) for _ in range(3)] == [expected[head]] * 3
    found = until(lambda: (v := server.get(f"{PATH}/shadows"))["shadows"][2:] and v, "the shadow's answers", 30)
    assert [(row["text"], row["shadow_text"]) for row in found["shadows"]] == [(expected[head], expected[shadow])] * 3
    assert {row["release_id"] for row in found["shadows"]} == {shadow} and found["summary"][0]["same"] == 0
    assert server.status()["scenarios"][0]["counts"]["records"] == before + 3, "only what clients got is a record"


def report(server: Server, score_of: Mapping[str, float], **headers: str) -> str:
    """One answer and its report, scored by the release that made it; that release."""
    client = server.client(**headers)
    reply = client.post("/v1/chat/completions", json=server.body("hi", max_tokens=1))
    body = {"score": score_of[reply.headers["x-reef-release-id"]], "references": [reply.headers["x-reef-agent-record-id"]]}
    assert client.post("/reef/report", json=body).status_code == 200
    return reply.headers["x-reef-release-id"]


def test_a_canary_that_is_worse_on_live_reports_rolls_itself_back(server: Server, arms: tuple[str, str]) -> None:
    head, canary = server.head(), arms[1]
    released = put(server, shares={"head": 0.5, canary: 0.5}, auto=True)["release"]["release_id"]
    for number in range(60):
        report(server, {head: 1.0, canary: 0.0}, **{"x-reef-session": f"live {number}"})
        if number % 10 == 9 and server.get(PATH)["policy"] == {}:
            break
    view = until(lambda: (v := server.get(PATH))["policy"] == {} and v, "the canary going back", 30)
    back = view["release"]
    assert (back["operation"], back["parent_release_id"]) == ("rollback", released)
    assert back["evidence"]["canary"] == canary and "shown worse" in back["evidence"]["reason"]
    assert server.head() == head and {report(server, {head: 1.0}) for _ in range(8)} == {head}
    with server.client().stream("GET", "/reef/events", params={"after": "0.0.0", "limit": 2000}) as events:
        lines = (line for line in events.iter_lines() if "canary_returned" in line)
        assert back["release_id"] in next(lines)


@pytest.mark.slow
def test_racing_setters_have_one_winner_with_a_server_and_without(server: Server, arms: tuple[str, str]) -> None:
    won = put(server, pin=arms[0])["release"]["release_id"]
    for online in (True, False):
        if not online:
            assert server.stop() == 0
        words = ["route", "set", "--pin", arms[1], "--expected-head", won, "--json", "--yes", "--home", str(server.home)]
        running = [
            subprocess.Popen(command(*words), stdout=-1, stderr=-1, text=True, env=clean_environment()) for _ in range(2)
        ]
        ended = [(*process.communicate(timeout=LIMIT_S), process.returncode) for process in running]
        assert sorted(code for *_, code in ended) == [0, 4], ended
        won = next(json.loads(out) for out, _, code in ended if code == 0)["release"]["release_id"]
        for out, _, code in ended:
            if code == 4:
                error = json.loads(out)["error"]
                assert error["code"] == "head_moved" and won in error["message"], error
    server.start().ready()
    assert answered_by(server) == arms[1], "a restart keeps the policy"
    assert server.get(PATH)["release"]["release_id"] == won


def test_collecting_garbage_never_takes_what_the_policy_serves(
    server: Server, arms: tuple[str, str], adapters: list[Path]
) -> None:
    service = ReleaseService(server.home)
    put(server, shares={"head": 0.5, arms[0]: 0.5})
    for folder in (adapters[2], adapters[3], adapters[2]):
        artifact = service.store(folder, "lora")
        draft = Draft(ContentId(artifact.content_id), "lora", Surface.WEIGHTS, Operation.TRAINING, "test")
        service.publish("default", draft, None)
    keep = Keep(latest=1, gated=False, grace_s=0.0)
    service.gc(dry_run=False, keep=keep)
    assert service.get("default", arms[0]).restorable
    assert answered_by(server, **{"x-reef-release-id": arms[0]}) == arms[0]
    assert {problem.kind for problem in service.verify("default")} <= {"dropped"}


def test_the_command_shows_sets_and_clears(server: Server, arms: tuple[str, str]) -> None:
    def route(*words: str) -> Any:
        done = reef("route", *words, "--json", "--home", str(server.home))
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    plan = route("set", "--canary", arms[1][:6], "--share", "0.25", "--shadow", arms[0], "--dry-run")
    assert plan["applied"] is False and server.get(PATH)["policy"] == {}
    done = route("set", "--canary", arms[1], "--share", "0.25", "--no-auto", "--yes")
    assert done["policy"]["shares"] == {"head": 0.75, arms[1]: 0.25} and "auto" not in done["policy"]
    assert route("log")["releases"][0]["release_id"] == done["release"]["release_id"]
    assert route("show")["policy"] == done["policy"]
    assert route("clear", "--yes")["policy"] == {} == server.get(PATH)["policy"]
    for words, code in ((("set",), 2), (("set", "--pin", "r9-00000000", "--yes"), 3)):
        assert reef("route", *words, "--json", "--home", str(server.home)).returncode == code, words


def test_a_canary_that_is_better_becomes_the_head(server: Server, arms: tuple[str, str]) -> None:
    before, canary = server.head(), arms[1]
    put(server, shares={"head": 0.5, canary: 0.5}, auto=True)
    scores = defaultdict(lambda: 1.0, {before: 0.0})
    for number in range(60):
        report(server, scores, **{"x-reef-session": f"better {number}"})
        if number % 10 == 9 and server.head() != before:
            break
    head = until(lambda: (now := server.head()) != before and now, "the promotion", 30)
    row = next(row for row in server.releases() if row["release_id"] == head)
    assert (row["operation"], row["source_release_id"], row["parent_release_id"]) == ("promote", canary, before)
    assert "shown better" in row["evidence"]["canary"]["reason"]
    until(lambda: server.get(PATH)["policy"] == {}, "the policy ending", 30)
    assert server.get(PATH)["release"]["operation"] == "promote"


@pytest.mark.slow
def test_a_release_that_drifted_goes_back_by_itself(
    server: Server, tiny_model: Path, tmp_path: Path, adapters: list[Path]
) -> None:
    """The suite asks for what the base model says; a LoRA adapter says something else."""
    base = {"x-reef-release-id": server.releases()[-1]["release_id"]}
    items = [
        {
            "id": f"i{number}",
            "messages": [{"role": "user", "content": f"question {number} about foxes"}],
            "grader": {"kind": "contains", "all": [server.greedy(f"question {number} about foxes", **base)[:12]]},
            "max_new_tokens": 24,
        }
        for number in range(14)
    ]
    suite = tmp_path / "suite.jsonl"
    suite.write_text("\n".join(map(json.dumps, items)))
    service = ReleaseService(tmp_path / "h")
    first = service.create("default", service.base_artifact(tiny_model))
    artifact = service.store(adapters[0], "lora")
    draft = Draft(ContentId(artifact.content_id), "lora", Surface.WEIGHTS, Operation.TRAINING, "test")
    drifted = service.publish("default", draft, None)
    settings = {
        "evaluation.suite": str(suite),
        "evaluation.split": "all",
        "evaluation.drift": "rollback",
        "evaluation.drift_every_s": "1",
    }
    with serving(tmp_path / "h", tiny_model, **settings) as watched:
        back = until(lambda: (row := watched.releases()[0])["operation"] == "rollback" and row, "the way back")
        assert (back["parent_release_id"], back["source_release_id"]) == (drifted.release_id, first.release_id)
        assert "shown worse" in back["evidence"]["reason"] and back["author"] == "reef: drift"
        until(lambda: answered_by(watched) == back["release_id"], "the predecessor's content being served")
