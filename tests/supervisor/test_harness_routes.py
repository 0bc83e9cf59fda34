"""Harnesses through a real server: manifests, releases, pages, proposals, installing by pipe, running what was installed."""

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.background import background_upstream
from tests.doubles.upstream import Upstream
from tests.e2e.server import Server, reef, serving, stopped

RULES = {"id": "house", "kind": "rules", "config": {"text": "HOUSE-RULE: answer in one word."}}
SKILL = {"id": "pdf", "kind": "skill", "config": {"description": "Makes PDFs", "text": "# Steps"}}


def create(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"op": "create", "entry": entry} for entry in entries]


@pytest.fixture(scope="module")
def provider() -> Iterator[Upstream]:
    with background_upstream() as double:
        yield double


@pytest.fixture(scope="module")
def server(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An upstream deployment without a recipe; each test uses a scenario of its own."""
    home = tmp_path_factory.mktemp("harness") / "h"
    with serving(home, Path("stub-model"), **{"engine.kind": "upstream", "engine.url": provider.url}) as running:
        yield running


def propose(server: Server, scenario: str, mutations: Any, status: int = 201, **more: Any) -> Any:
    client = server.client(**{"x-reef-scenario": scenario})
    reply = client.post("/reef/harness/proposals", json={"mutations": mutations, **more})
    assert reply.status_code == status, reply.text
    return reply.json()


def read(server: Server, scenario: str, path: str = "/reef/harness", **query: Any) -> Any:
    reply = server.client(**{"x-reef-scenario": scenario}).get(path, params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(server: Server, scenario: str, **headers: str) -> httpx.Response:
    reply = server.client(**{"x-reef-scenario": scenario, **headers}).post("/v1/chat/completions", json=server.body("hello"))
    assert reply.status_code == 200, reply.text
    return reply


def test_a_proposal_becomes_the_harness_in_force(server: Server) -> None:
    empty = read(server, "s1")
    assert empty["release_id"] is None and empty["entries"] == [] and empty["model"] == "stub-model"
    made = propose(server, "s1", create(RULES), reason="shorter answers")
    assert (made["surface"], made["kind"], made["step"], made["current"], made["pending"]) == (
        "harness",
        "harness",
        1,
        True,
        False,
    )
    assert made["author"].startswith("user:") and made["gated"] is False
    assert made["evidence"] == {
        "proposal": True,
        "reason": "shorter answers",
        "base_release_id": None,
        "onto_release_id": None,
        "changed": "added rules house",
    }
    manifest = read(server, "s1", adapter="pi")
    assert manifest["release_id"] == made["release_id"] and manifest["entries"] == [RULES]
    second = propose(server, "s1", create(SKILL))
    rows = read(server, "s1", "/reef/harness/releases")["releases"]
    assert rows == read(server, "s1", "/reef/harness/versions")["releases"]
    assert [(row["release_id"], row["current"]) for row in rows] == [(made["release_id"], False), (second["release_id"], True)]
    assert read(server, "s1", release_id=made["release_id"])["entries"] == [RULES]
    unknown = server.client(**{"x-reef-scenario": "s1"}).get("/reef/harness", params={"release_id": "r9-00000000"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "release_not_found")


def test_inference_goes_on_beside_a_harness_and_names_the_weights(server: Server, provider: Upstream) -> None:
    before = ask(server, "s2")
    made = propose(server, "s2", create(RULES))
    after = ask(server, "s2", **{"x-reef-tag-harness": made["release_id"]})
    assert after.json()["choices"][0]["message"]["content"] == provider.text
    assert after.headers["x-reef-release-id"] == before.headers["x-reef-release-id"] != made["release_id"]
    record = server.get(f"/reef/scenarios/s2/records/{after.headers['x-reef-agent-record-id']}")
    assert record["release_id"] == before.headers["x-reef-release-id"]
    assert record["tags"]["harness"] == made["release_id"], "the agent says which harness it worked with"
    (row,) = [row for row in server.get("/reef/scenarios")["scenarios"] if row["name"] == "s2"]
    assert row["heads"] == {"weights": row["head"], "harness": made["release_id"]}
    client = server.client(**{"x-reef-scenario": "s2", "x-reef-release-id": made["release_id"]})
    refused = client.post("/v1/chat/completions", json=server.body("hello"))
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "release_not_servable", refused.text


def test_rollback_takes_the_first_harness_away_again(server: Server) -> None:
    first = propose(server, "s3", create(RULES))
    back = server.client().post("/reef/scenarios/s3/rollback", json={})
    assert back.status_code == 200 and back.json()["kind"] == "base", back.text
    manifest = read(server, "s3")
    assert manifest["release_id"] == back.json()["release_id"] and manifest["entries"] == []
    again = server.client().post("/reef/scenarios/s3/rollback", json={"release_id": first["release_id"]})
    assert again.status_code == 200 and read(server, "s3")["entries"] == [RULES]
    ask(server, "s3")


def test_the_example_of_the_documentation(server: Server) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "harness.md").read_text(encoding="utf-8")
    example = json.loads(page.partition("```json\n")[2].partition("```")[0])
    made = propose(server, "example", example["mutations"], reason=example["reason"])
    assert made["evidence"]["reason"] == "answers were too long" and len(read(server, "example")["entries"]) == 1


def test_collisions_and_bad_edits_are_refused_by_name(server: Server) -> None:
    base = propose(server, "s4", create(RULES))["release_id"]
    head = propose(server, "s4", [{"op": "update", "entry": {**RULES, "config": {"text": "Two words."}}}])["release_id"]
    clash = [{"op": "update", "entry": {**RULES, "config": {"text": "Three words."}}}]
    error = propose(server, "s4", clash, 409, base_release_id=base)["error"]
    assert error["code"] == "proposal_conflict" and error["details"]["head"] == head
    propose(server, "s4", create(SKILL), base_release_id=base)  # touches something else: carried over
    assert [entry["id"] for entry in read(server, "s4")["entries"]] == ["house", "pdf"]
    for mutations, code in (
        ([], "invalid_request"),
        ([{"op": "dance"}], "artifact_invalid"),
        (create({**RULES, "id": "k", "config": {"text": "key ghp_" + "a" * 24}}), "artifact_invalid"),
        (create({**SKILL, "id": "x", "config": {**SKILL["config"], "files": {"../x": {"text": "y"}}}}), "artifact_invalid"),
    ):
        assert propose(server, "s4", mutations, 400)["error"]["code"] == code
    client = server.client(**{"x-reef-scenario": "s4"})
    reply = client.post("/reef/harness/proposals", json={"mutation": []})
    assert reply.status_code == 400 and "mutation" in reply.json()["error"]["message"]
    assert client.get("/reef/harness/install").json()["error"]["code"] == "invalid_request"
    missing = client.get("/reef/harness/install", params={"adapter": "nobody"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "adapter_not_found")


def test_proposals_at_the_same_time_all_arrive(server: Server) -> None:
    propose(server, "s5", create(RULES))
    client = server.client(**{"x-reef-scenario": "s5"})
    replies: list[httpx.Response] = []

    def send(number: int) -> None:
        body = {"mutations": create({**SKILL, "id": f"skill-{number}"})}
        replies.append(client.post("/reef/harness/proposals", json=body))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.status_code for reply in replies] == [201] * 4, [reply.text for reply in replies]
    assert {entry["id"] for entry in read(server, "s5")["entries"]} == {"house", *(f"skill-{n}" for n in range(4))}


def test_pages_open_with_their_own_key_only(server: Server) -> None:
    made = propose(server, "s6", create({**RULES, "config": {"text": "<script>alert(1)</script>"}}))
    propose(server, "other", create(RULES))
    with httpx.Client(base_url=server.url) as nobody:
        page = nobody.get(made["page"])
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert "&lt;script&gt;" in page.text and "<script" not in page.text
        assert page.headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        base, _, key = made["page"].rpartition("key=")
        for path in (
            f"{base}key={'0' * len(key)}",
            f"{base}key=",
            f"/reef/harness/releases/1/page?scenario=other&key={key}",
            f"/reef/harness/releases/1/page?scenario=s6&key={server.token}",
            f"/reef/harness/releases/1/page?scenario=s6&token={server.token}",
            f"/reef/harness?scenario=s6&key={key}",
            f"/reef/harness/releases?scenario=s6&key={key}",
            f"/reef/scenarios/s6/releases?scenario=s6&key={key}",
        ):
            assert nobody.get(path).status_code == 401, path
        assert nobody.get(made["page"], headers={"authorization": "Bearer wrong"}).status_code == 401
        assert nobody.get(f"{base.replace('/1/page', '/9/page')}key={key}").status_code == 404
        assert nobody.get(f"{base.replace('/1/page', '/x/page')}key={key}").status_code == 400
    assert server.client().get("/reef/harness/releases/1/page", params={"scenario": "s6"}).status_code == 200
    secret = server.home / "page-secret"
    assert len(secret.read_bytes()) == 32 and secret.stat().st_mode & 0o777 == 0o600


@contextmanager
def small_token(server: Server) -> Iterator[None]:
    """While it lasts the server also takes `small-token`, bound to scenario s7."""
    file = server.home / "token"
    own = file.read_text()
    file.write_text(f"{own}small-token scopes=infer,report scenario=s7\n")
    try:
        yield
    finally:
        file.write_text(own)


def test_small_tokens_read_a_harness_and_may_not_change_it(server: Server) -> None:
    propose(server, "s7", create(RULES))
    with small_token(server), httpx.Client(base_url=server.url, headers={"authorization": "Bearer small-token"}) as small:
        for _ in range(100):
            if small.get("/reef/harness").status_code == 200:
                break
            threading.Event().wait(0.05)
        assert small.get("/reef/harness").json()["scenario"] == "s7"
        assert small.get("/reef/harness", headers={"x-reef-scenario": "s1"}).status_code == 403
        assert small.get("/reef/harness/releases/1/page", params={"scenario": "s1"}).status_code == 403
        assert small.post("/reef/harness/proposals", json={"mutations": create(SKILL)}).status_code == 403
        assert small.get("/reef/harness/install", params={"adapter": "native"}).status_code == 200
    assert {row["name"] for row in read(server, "s7", "/reef/harness/adapters")["adapters"]} >= {"native", "pi", "codex"}


def test_scripts_call_the_address_their_request_reached(server: Server) -> None:
    def gateway(**headers: str) -> str:
        reply = server.client(**headers).get("/reef/harness/install", params={"adapter": "native"})
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/x-shellscript"), reply.text
        assert server.token not in reply.text
        folder = server.home.with_name("probe")
        environment = {"HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        subprocess.run(["bash"], input=reply.text, text=True, env=environment, check=True, capture_output=True, timeout=60)
        spec = next(folder.glob(".local/share/reef-harness/native/scenarios/*/install.json"))
        return str(json.loads(spec.read_text())["gateway"])

    assert gateway() == server.url
    assert gateway(**{"x-forwarded-proto": "https", "x-forwarded-host": "reef.example, inner"}) == "https://reef.example"
    assert gateway(host="reef.example:81") == "http://reef.example:81"
    bad = server.client(**{"x-forwarded-host": "a'$(id)"}).get("/reef/harness/install", params={"adapter": "native"})
    assert bad.status_code == 400


def test_pipe_install_run_report_and_the_next_release(server: Server, provider: Upstream, tmp_path: Path) -> None:
    first = propose(server, "life", create(RULES))
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir(), work.mkdir()
    environment = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "REEF_TOKEN": server.token}
    pipe = (
        'curl -fsS -H "Authorization: Bearer $REEF_TOKEN" -H "x-reef-scenario: life" '
        f"'{server.url}/reef/harness/install?adapter=native' | bash"
    )
    done = subprocess.run(["bash", "-o", "pipefail", "-c", pipe], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "installed" in done.stderr, done.stderr

    def wrapper(*words: str) -> subprocess.CompletedProcess[str]:
        bare = {"HOME": str(home), "PATH": environment["PATH"]}
        command = [str(home / ".local/bin/reef-native"), *words]
        return subprocess.run(command, env=bare, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    ran = wrapper("-p", "say hello")
    assert (ran.returncode, ran.stdout.strip()) == (0, provider.text), ran.stderr
    assert "HOUSE-RULE" in json.dumps(provider.seen[-1].body) and provider.seen[-1].body["model"] == "stub-model"
    record = server.get("/reef/scenarios/life/records", order="newest", limit=1)["records"][0]
    assert record["kind"] == "inference" and record["release_id"].startswith("r0-")
    whole = server.get(f"/reef/scenarios/life/records/{record['id']}")
    assert whole["tags"]["harness"] == first["release_id"]
    assert whole["tags"]["client"] == "reef-native" and whole["session"] == whole["tags"]["session"]

    reported = wrapper("report", "--score", "1", "--feedback", "good")
    assert reported.returncode == 0 and "reported run" in reported.stderr, reported.stderr
    report = server.get("/reef/scenarios/life/records", order="newest", limit=1)["records"][0]
    assert (report["kind"], report["score"]) == ("report", 1.0)
    assert server.get(f"/reef/scenarios/life/records/{report['id']}")["references"] == [record["id"]]

    second = propose(server, "life", create(SKILL))
    offered = wrapper("-p", "again")
    assert f"release {second['release_id']} is available" in offered.stderr and "added skill pdf" in offered.stderr
    updated = wrapper("update")
    assert updated.returncode == 0, updated.stderr
    last = wrapper("-p", "and again")
    assert "available" not in last.stderr and "Makes PDFs" in json.dumps(provider.seen[-1].body)
    assert server.releases("life")[0]["release_id"] == second["release_id"]
    assert wrapper("doctor").returncode == 0
    assert wrapper("uninstall").returncode == 0 and not list(home.rglob("*"))


@pytest.mark.slow
def test_the_command_line_against_the_server(server: Server, tmp_path: Path) -> None:
    extra = {"HOME": str(tmp_path), "REEF_HOME": str(server.home), "REEF_SCENARIO": "words"}
    where = ["--prefix", str(tmp_path / "prefix")]

    def run(*words: str, code: int = 0) -> Any:
        done = reef("harness", *words, "--json", **extra)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    (tmp_path / "first.json").write_text(json.dumps(create(RULES)))
    first = run("propose", str(tmp_path / "first.json"), "--reason", "start")
    assert first["evidence"]["reason"] == "start"
    assert run("tree")["entries"] == [RULES]
    folder = tmp_path / "tree"
    assert run("pull", str(folder))["release_id"] == first["release_id"]
    assert run("diff", str(folder))["mutations"] == []
    (folder / "rules/house/text.md").write_text("Changed.")
    (changed,) = run("diff", str(folder))["mutations"]
    assert changed["op"] == "update" and changed["entry"]["config"]["text"] == "Changed."
    assert run("propose", str(folder), code=2)["error"]["hint"].startswith("--base")

    item = run("install", "--adapter", "native", "--release", first["release_id"], *where)
    assert item["release_id"] == first["release_id"] and Path(item["wrapper"]).parent == tmp_path / "prefix/bin"
    second = run("propose", str(folder), "--base", first["release_id"])
    assert [row["release_id"] for row in run("list", *where)["installed"]] == [first["release_id"]]
    moved = run("update", "native", *where)
    assert (moved["previous_release_id"], moved["release_id"]) == (first["release_id"], second["release_id"])
    assert run("doctor", *where)["ok"] is True
    assert run("install", "--adapter", "nobody", *where, code=3)["error"]["code"] == "adapter_not_found"
    refused = run("update", "--release", "r9-00000000", *where, code=1)["error"]
    assert refused["code"] == "install_failed" and "r9-00000000" in refused["message"]
    assert run("uninstall", "--yes", *where)["removed"] is True
    assert run("list", *where) == {"installed": []} and not list((tmp_path / "prefix").rglob("*"))


def test_review_holds_proposals_until_promoted(provider: Upstream, tmp_path: Path) -> None:
    settings = {"engine.kind": "upstream", "engine.url": provider.url, "reef.publish": "review"}
    root = tmp_path / "h" / "episodes" / "roots" / "left-behind"
    root.mkdir(parents=True)
    (root / "owner").write_text("999999999")
    with serving(tmp_path / "h", Path("stub-model"), **settings) as server:
        assert not root.exists(), "what a crash left of an episode goes at the next start"
        held = propose(server, "default", create(RULES))
        assert held["pending"] is True and held["current"] is False
        assert read(server, "default")["entries"] == []
        (row,) = read(server, "default", "/reef/harness/releases")["releases"]
        assert row["pending"] is True and row["current"] is False
        assert "waits for a person" in httpx.get(server.url + held["page"]).text
        promoted = server.client().post("/reef/scenarios/default/promote", json={"release_id": held["release_id"]})
        assert promoted.status_code == 200, promoted.text
        manifest = read(server, "default")
        assert manifest["release_id"] == promoted.json()["release_id"] and manifest["entries"] == [RULES]


@pytest.mark.slow
def test_harness_behind_an_embedded_engine_survives_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "h", {"engine.model": str(tiny_model)})
    with stopped(server):
        server.start().ready()
        before = server.greedy()
        made = propose(server, "default", create(RULES))
        reply = server.ask()
        assert (reply.headers["x-reef-release-id"], reply.headers["x-reef-weight-version"]) == (server.head(), "base")
        assert server.greedy() == before
        assert server.stop() == 0
        server.start().ready()
        assert server.head().startswith("r0-") and server.greedy() == before
        assert read(server, "default")["release_id"] == made["release_id"]
        assert read(server, "default")["entries"] == [RULES]


@pytest.mark.slow
def test_a_scenario_that_trains_weights_takes_proposals_too(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"reef.recipe": "recipes.sao.recipe:SAORecipe", "evaluation.smoke_items": "0"}
    with serving(tmp_path / "h", tiny_model, **settings) as server:
        weights = server.head()
        made = propose(server, "default", create(RULES))
        assert server.head() == weights == server.ask().headers["x-reef-release-id"], "the weights stay in service"
        assert read(server, "default")["release_id"] == made["release_id"]
        assert [(row["surface"], row["current"]) for row in server.releases()] == [("harness", True), ("weights", True)]


def test_a_damaged_page_secret_is_named_at_the_start(provider: Upstream, tmp_path: Path) -> None:
    home = tmp_path / "h"
    home.mkdir(mode=0o700)
    (home / "page-secret").write_bytes(b"short")
    words = ["serve", "--reef.home", str(home), "--reef.port", "0", "--engine.kind", "upstream", "--engine.url", provider.url]
    done = reef(*words)
    assert done.returncode == 2 and "page-secret" in done.stderr
