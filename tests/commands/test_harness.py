"""`reef harness` in front of a server that answers from a script: what is asked, what is printed, how it fails."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.commands.runner import Done, Reef
from tests.control.fake_reef import FakeReef, release

RULES = {"id": "house", "kind": "rules", "config": {"text": "One word.\nAlways."}}
SKILL = {"id": "pdf", "kind": "skill", "config": {"description": "Makes PDFs", "text": "# Steps"}}
MANIFEST: dict[str, Any] = {
    "scenario": "default",
    "release_id": "r1-aaaaaaaa",
    "content_id": "sha256:1",
    "step": 1,
    "changed": "added rules house",
    "model": "m",
    "requires": [],
    "needs_nothing": "r1-aaaaaaaa",
    "entries": [RULES, SKILL],
}


def answering(server: FakeReef, manifest: dict[str, Any] = MANIFEST) -> None:
    server.overrides["GET", "/reef/harness"] = lambda *_: (200, manifest)
    server.overrides["POST", "/reef/harness/proposals"] = lambda *_: (
        201,
        {"release_id": "r2-bbbbbbbb", "pending": True, "changed": "changed rules house (text)"},
    )


def error(done: Done) -> tuple[int, str]:
    return done.code, done.json["error"]["code"]


def test_the_tree_is_shown_an_entry_a_line(reef: Reef, server: FakeReef) -> None:
    answering(server)
    done = reef("harness", "tree", "-s", "other")
    assert done.code == 0 and "house\trules\tOne word.\n" in done.out and "pdf\tskill\t# Steps\n" in done.out
    assert "next: reef harness pull" in done.err
    ((query, _, headers),) = server.asked("GET", "/reef/harness")
    assert query == {} and headers["x-reef-scenario"] == "other"
    assert reef("harness", "tree", "--release", "r1-aaaaaaaa", "--json").json == MANIFEST
    assert server.asked("GET", "/reef/harness")[1][0] == {"release_id": "r1-aaaaaaaa"}


def test_a_pulled_folder_is_edited_and_proposed_against_its_release(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    answering(server)
    done = reef("harness", "pull", "t")
    assert done.code == 0 and "--base r1-aaaaaaaa" in done.err
    assert (tmp_path / "t/rules/house/text.md").read_text() == RULES["config"]["text"]  # type: ignore[index]
    assert error(reef("harness", "pull", "t", "--json"))[0] == 2
    assert "no difference" in reef("harness", "diff", "t").err
    (tmp_path / "t/rules/house/text.md").write_text("Two words.")
    assert reef("harness", "diff", "t").out == "update\thouse\trules\n"
    refused = reef("harness", "propose", "t", "--json")
    assert error(refused) == (2, "usage") and "--base" in refused.json["error"]["hint"]
    done = reef("harness", "propose", "t", "--base", "r1-aaaaaaaa", "-m", "shorter")
    assert done.out == "r2-bbbbbbbb held for review: changed rules house (text)\n"
    assert "reef release promote r2-bbbbbbbb" in done.err
    ((_, body, _),) = server.asked("POST", "/reef/harness/proposals")
    changed = {"op": "update", "id": "house", "entry": {**RULES, "config": {"text": "Two words."}}}
    assert body == {"mutations": [changed], "base_release_id": "r1-aaaaaaaa", "reason": "shorter"}


def test_mutations_come_from_a_file_or_from_stdin(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    answering(server)
    remove = {"op": "remove", "id": "house"}
    (tmp_path / "one.json").write_text(json.dumps({"mutations": [remove], "reason": "old"}))
    assert reef("harness", "propose", "one.json").code == 0
    assert reef("harness", "propose", "-", stdin=json.dumps(remove)).code == 0
    bodies = [body for _, body, _ in server.asked("POST", "/reef/harness/proposals")]
    assert bodies == [{"mutations": [remove], "reason": "old"}, {"mutations": remove}]
    (tmp_path / "bad.json").write_text("{")
    assert error(reef("harness", "propose", "bad.json", "--json")) == (2, "invalid_request")
    assert error(reef("harness", "propose", "missing.json", "--json")) == (2, "usage")
    assert error(reef("harness", "diff", "missing", "--json")) == (3, "not_found")


def test_a_conflict_keeps_its_code_across_the_wire(reef: Reef, server: FakeReef) -> None:
    body = {"error": {"code": "proposal_conflict", "message": "collides", "details": {"head": "r3-cccccccc"}}}
    server.overrides["POST", "/reef/harness/proposals"] = lambda *_: (409, body)
    done = reef("harness", "propose", "-", "--json", stdin='{"op": "remove", "id": "x"}')
    assert error(done) == (4, "proposal_conflict") and done.json["error"]["details"]["head"] == "r3-cccccccc"


def test_install_list_doctor_uninstall(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    answering(server)
    done = reef("harness", "install", "--adapter", "native")
    assert done.code == 0 and "with release r1-aaaaaaaa of default installed" in done.out, done.err
    token = tmp_path / ".local/share/reef-harness/native/scenarios/default/token"
    assert token.read_text().strip() == "fake-token" and token.stat().st_mode & 0o777 == 0o600
    assert reef("harness", "install", "-a", "native", "-s", "two").code == 0
    rows = [line.split("\t") for line in reef("harness", "list").out.splitlines()]
    assert [(row[0], row[1], row[2]) for row in rows] == [("native", name, "r1-aaaaaaaa") for name in ("default", "two")]
    assert error(reef("harness", "doctor", "--json")) == (2, "usage")
    assert reef("harness", "doctor", "-s", "two", "--json").json["ok"] is True
    server.close()
    sick = reef("harness", "doctor", "-s", "two")
    assert sick.code == 1 and "FAIL\tgateway\t" in sick.out
    failed = reef("harness", "update", "native", "-s", "two", "--json")
    assert error(failed) == (1, "install_failed") and "no answer" in failed.json["error"]["message"]
    assert error(reef("harness", "uninstall", "-s", "two", "--json")) == (2, "usage")
    assert reef("harness", "uninstall", "-s", "two", "-y").code == 0
    assert reef("harness", "uninstall", "native", "--yes", "--json").json["removed"] is True
    assert error(reef("harness", "uninstall", "native", "-y", "--json")) == (3, "not_found")
    assert not (tmp_path / ".local").exists()


def test_what_an_agent_cannot_take_is_not_installed(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    answering(server, {**MANIFEST, "entries": [{"id": "a", "kind": "agent", "config": {"description": "d", "text": "t"}}]})
    done = reef("harness", "install", "--adapter", "native", "--json")
    assert error(done) == (2, "artifact_invalid")
    assert error(reef("harness", "install", "--adapter", "nobody", "--json")) == (3, "adapter_not_found")
    assert not (tmp_path / ".local").exists()


def test_adapters_and_a_new_one(shell: Reef, tmp_path: Path) -> None:
    listed = {row["name"]: row for row in shell("harness", "adapters", "--json").json["adapters"]}
    assert {"native", "pi", "claude-code", "codex", "opencode"} <= set(listed)
    assert shell("harness", "adapters").out.splitlines()[0].startswith("claude-code\t")
    done = shell("harness", "new-adapter", "my-agent")
    assert done.code == 0 and (tmp_path / "adapters/my-agent/adapter.yaml").is_file()
    assert shell("harness", "new-adapter", "my-agent", "--json").json["error"]["code"] == "config_invalid"
    assert shell("harness", "new-adapter", "Bad_Name", "--json").code == 2
    found = shell("harness", "adapters", "--json", env={"REEF_ADAPTERS": str(tmp_path / "adapters")})
    assert "my-agent" in {row["name"] for row in found.json["adapters"]}


def test_without_a_server(shell: Reef) -> None:
    for words in (["tree"], ["pull", "x"], ["install", "--adapter", "native"]):
        assert error(shell("harness", *words, "--json")) == (6, "not_running")
    assert shell("harness", "list", "--json").json == {"installed": []}


def test_the_releases_of_a_harness_become_commits(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    answering(server)
    back = release(3, "d", surface="harness", operation="rollback", source_release_id="r1-aaaaaaaa", evidence={})
    first = release(1, "a", surface="harness", evidence={"changed": "added rules house"})
    server.releases = [release(4, "e", surface="harness", pending=True), back, release(2, "c"), first, release(0, "b")]
    done = reef("harness", "history", "mine", "--json")
    assert done.json["written"] == ["r1-aaaaaaaa", "r3-dddddddd"] and done.json["releases"] == 2
    assert [query for query, *_ in server.asked("GET", "/reef/harness")] == [
        {"release_id": "r1-aaaaaaaa"},
        {"release_id": "r3-dddddddd"},
    ]
    log = subprocess.run(["git", "-C", tmp_path / "mine", "log", "--format=%s"], capture_output=True, text=True, check=True)
    assert log.stdout.splitlines() == ["rollback to r1-aaaaaaaa", "added rules house"]
    assert reef("harness", "history", "mine").out == "0 of 2 releases are new in mine\n"
