"""The chain: create, publish, hold, promote, rollback, and what a second process or a hostile environment changes (nothing)."""

import json
import os
import subprocess
import time

import pytest

from reef_cli.core.errors import (
    ConflictError,
    ContentConflict,
    HeadMoved,
    InvalidRequest,
    InvalidScenario,
    NotPending,
    NotRestorable,
    ReleaseNotFound,
)
from reef_cli.core.ids import ReleaseId, new_release_id
from reef_cli.core.types import Operation, Surface
from reef_cli.releases import ReleaseService
from reef_cli.releases.git import Git


def git(service: ReleaseService, *arguments: str) -> str:
    return subprocess.run(["git", f"--git-dir={service.repo}", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def contents(service, tree):
    return [service.store(tree({"AGENTS.md": f"version {index}\n"}), "harness") for index in range(4)]


def test_a_scenario_begins_with_its_creation_release(service, contents):
    assert service.head("s", Surface.HARNESS) is None and service.list("s") == []
    r0 = service.create("s", contents[0], {"why": "first request"})
    assert (r0.step, r0.operation, r0.parent_release_id, r0.surface) == (0, Operation.CREATION, None, Surface.HARNESS)
    assert r0.gated and r0.restorable and not r0.pending and r0.evidence == {"why": "first request"}
    assert service.create("s", contents[1]) == r0 == service.head("s", Surface.HARNESS)
    assert service.scenarios() == ["s"]


def test_publish_appends(service, contents, draft):
    r0 = service.create("s", contents[0])
    wanted = new_release_id(1)
    evidence = {"metrics": {"loss": 0.5}, "records": ["a", "b"], "recipe": "sao"}
    facts = draft(contents[1], evidence=evidence, job_id="j1", release_id=wanted, gated=True)
    r1 = service.publish("s", facts, r0.release_id)
    assert r1.release_id == wanted and r1.step == 1 and r1.parent_release_id == r0.release_id and r1.job_id == "j1"
    assert service.list("s") == [r1, r0] and service.head("s", Surface.HARNESS) == r1
    assert service.get("s", r1.release_id).evidence == evidence
    manifest = json.loads(git(service, "show", "refs/reef/s/head:manifest.json"))
    assert manifest["evidence"]["records"] == ["a", "b"] and manifest["parent_release_id"] == r0.release_id


def test_a_stale_publisher_gets_the_present_head(service, contents, draft):
    r0 = service.create("s", contents[0])
    r1 = service.publish("s", draft(contents[1]), r0.release_id)
    with pytest.raises(HeadMoved) as lost:
        service.publish("s", draft(contents[2]), r0.release_id)
    assert lost.value.details["head"] == r1.release_id
    assert service.list("s") == [r1, r0]
    assert service.publish("s", draft(contents[2]), None).parent_release_id == r1.release_id


def test_the_comparison_is_git_s_not_only_ours(service, contents, draft, monkeypatch):
    """A publisher that read the head just before another one moved it loses in `update-ref`."""
    r0 = service.create("s", contents[0])
    other = ReleaseService(service.home)
    r1 = other.publish("s", draft(contents[1]), r0.release_id)
    stale = service._chains.require("s")
    stale = type(stale)("s", stale.entries[1:], {})
    monkeypatch.setattr(service._chains, "require", lambda scenario: stale)
    with pytest.raises(HeadMoved) as lost:
        service.publish("s", draft(contents[2]), r0.release_id)
    assert lost.value.details["head"] == r1.release_id
    assert other.list("s") == [r1, r0]


def test_release_ids_are_used_once(service, contents, draft):
    r0 = service.create("s", contents[0])
    r1 = service.publish("s", draft(contents[1], release_id=new_release_id(1)), r0.release_id)
    with pytest.raises(ContentConflict):
        service.publish("s", draft(contents[2], release_id=r1.release_id), r1.release_id)
    with pytest.raises(InvalidRequest):
        service.publish("s", draft(contents[2], release_id=ReleaseId("latest")), r1.release_id)
    with pytest.raises(HeadMoved) as lost:
        service.publish("s", draft(contents[1], release_id=r1.release_id), r0.release_id)
    assert lost.value.details["head"] == r1.release_id, "a recovering job recognises its own release"


def test_evidence_must_be_json(service, contents, draft):
    r0 = service.create("s", contents[0])
    for bad in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(InvalidRequest, match="finite"):
            service.publish("s", draft(contents[1], evidence=bad), r0.release_id)
    assert service.head("s", Surface.HARNESS) == r0


def test_rollback_keeps_history(service, contents, draft):
    r0 = service.create("s", contents[0])
    r1 = service.publish("s", draft(contents[1]), r0.release_id)
    r2 = service.publish("s", draft(contents[2]), r1.release_id)
    back = service.rollback("s", r0.release_id, author="ann")
    assert back.release_id not in {r0.release_id, r1.release_id, r2.release_id}
    assert (back.content_id, back.parent_release_id, back.step) == (r0.content_id, r2.release_id, 3)
    assert (back.operation, back.source_release_id, back.author) == (Operation.ROLLBACK, r0.release_id, "ann")
    assert service.list("s") == [back, r2, r1, r0]
    with pytest.raises(HeadMoved):
        service.rollback("s", r1.release_id, expected_head=r2.release_id)
    with pytest.raises(ReleaseNotFound):
        service.rollback("s", ReleaseId("r9-00000000"))


def test_rollback_goes_to_the_nearest_other_content_of_the_surface(service, contents, draft, adapter):
    r0 = service.create("s", contents[0])
    r1 = service.publish("s", draft(contents[1]), r0.release_id)
    weights = service.store(adapter(), "lora")
    service.publish("s", draft(weights), r0.release_id)
    again = service.publish("s", draft(contents[1]), r1.release_id)
    assert again.step == 3 and again.content_id == r1.content_id
    assert service.rollback("s", expected_head=again.release_id).content_id == r0.content_id
    with pytest.raises(ConflictError, match="no earlier content"):
        service.create("lonely", contents[0])
        service.rollback("lonely")


def test_a_held_candidate_waits_and_is_promoted_once(service, contents, draft):
    r0 = service.create("s", contents[0])
    held = service.hold("s", draft(contents[1], evidence={"candidate_mean": 0.9}, gated=True), r0.release_id)
    assert held.pending and service.head("s", Surface.HARNESS) == r0
    assert service.list("s") == [held, r0] and service.get("s", held.release_id) == held
    with pytest.raises(NotRestorable):
        service.rollback("s", held.release_id)
    with pytest.raises(HeadMoved):
        service.promote("s", held.release_id, expected_head=ReleaseId("r7-00000000"))
    promoted = service.promote("s", held.release_id, expected_head=r0.release_id, author="ann")
    assert promoted.release_id != held.release_id and promoted.content_id == held.content_id
    assert (promoted.operation, promoted.source_release_id, promoted.gated) == (Operation.PROMOTE, held.release_id, True)
    assert promoted.evidence == {"candidate_mean": 0.9}
    assert service.list("s") == [promoted, r0] and service.head("s", Surface.HARNESS) == promoted
    with pytest.raises(NotPending) as again:
        service.promote("s", held.release_id)
    assert again.value.details["release_id"] == promoted.release_id
    with pytest.raises(NotPending):
        service.promote("s", r0.release_id)
    with pytest.raises(ReleaseNotFound):
        service.promote("s", ReleaseId("r9-00000000"))
    assert held.commit in git(service, "rev-list", "refs/reef/s/head"), "the held evidence stays in the history"


def test_a_promotion_cut_in_half_is_not_pending_again(service, contents, draft):
    """A crash between the two ref writes leaves the held ref; the chain tells the truth."""
    r0 = service.create("s", contents[0])
    held = service.hold("s", draft(contents[1]), r0.release_id)
    promoted = service.promote("s", held.release_id)
    git(service, "update-ref", f"refs/reef/s/held/{held.release_id}", held.commit)
    assert service.list("s") == [promoted, r0]
    with pytest.raises(NotPending):
        service.promote("s", held.release_id)


def test_a_dismissed_candidate_leaves_the_list(service, contents, draft):
    r0 = service.create("s", contents[0])
    held = service.hold("s", draft(contents[1]), r0.release_id)
    service.dismiss("s", held.release_id)
    assert service.list("s") == [r0]
    with pytest.raises(ReleaseNotFound):
        service.promote("s", held.release_id)


def test_other_instances_see_every_write_at_once(service, contents, draft):
    other = ReleaseService(service.home)
    r0 = service.create("s", contents[0])
    assert other.list("s") == [r0]
    r1 = other.publish("s", draft(contents[1]), r0.release_id)
    assert service.list("s") == [r1, r0] and service.head("s", Surface.HARNESS) == r1
    git(service, "pack-refs", "--all")
    r2 = service.publish("s", draft(contents[2]), r1.release_id)
    assert other.head("s", Surface.HARNESS) == r2 and other.list("s") == [r2, r1, r0]


def test_archiving_frees_the_name(service, contents, draft):
    r0 = service.create("s", contents[0])
    r1 = service.publish("s", draft(contents[1]), r0.release_id)
    kept = service.archive("s")
    assert service.list("s") == [] and service.head("s", Surface.HARNESS) is None
    assert git(service, "rev-parse", f"{kept}/head").strip() == r1.commit
    fresh = service.create("s", contents[2])
    assert service.list("s") == [fresh]
    assert service.archive("nobody") is None


def test_unknown_scenarios_and_bad_names(service, contents, draft):
    with pytest.raises(ReleaseNotFound):
        service.publish("s", draft(contents[0]), None)
    with pytest.raises(ReleaseNotFound):
        service.get("s", "r0-00000000")
    for name in ("../x", "a/b", "", "x.lock", "-x", "a..b"):
        with pytest.raises(InvalidScenario):
            service.create(name, contents[0])
    service.create("head", contents[0])
    service.create("a.b_c-d", contents[0])
    assert service.scenarios() == ["a.b_c-d", "head"]


def test_nothing_of_the_user_s_git_reaches_the_store(tmp_path, tree, draft, monkeypatch):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "reference-transaction").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "reference-transaction").chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text(f"[core]\n\thooksPath = {hooks}\n[user]\n\tname = Eve\n[commit]\n\tgpgsign = true\n")
    for key, value in {
        "GIT_CONFIG_GLOBAL": str(config), "GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "/nowhere/i", "GIT_AUTHOR_NAME": "Eve",
        "GIT_OBJECT_DIRECTORY": "/nowhere/o", "HOME": str(tmp_path), "LC_ALL": "de_DE.UTF-8",
    }.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    service = ReleaseService(tmp_path / "home")
    r0 = service.create("s", service.store(tree({"a": "1"}), "harness"))
    service.publish("s", draft(service.store(tree({"a": "2"}), "harness")), r0.release_id)
    monkeypatch.undo()
    people = git(service, "log", "--format=%an <%ae> %cn <%ce> %ad", "refs/reef/s/head").splitlines()
    assert {line.rpartition("> ")[0] for line in people} == {"Reef <reef@reef.invalid> Reef <reef@reef.invalid"}
    assert all(line.endswith("+0000") for line in people)


def test_a_lock_left_by_a_killed_git_does_not_stop_the_chain(service, contents, draft):
    r0 = service.create("s", contents[0])
    lock = service.repo / "refs" / "reef" / "s" / "head.lock"
    lock.write_text("")
    old = time.time() - 60
    os.utime(lock, (old, old))
    r1 = service.publish("s", draft(contents[1]), r0.release_id)
    assert service.head("s", Surface.HARNESS) == r1 and not lock.exists()


def test_a_fresh_foreign_lock_is_waited_for(service, contents, draft):
    r0 = service.create("s", contents[0])
    lock = service.repo / "refs" / "reef" / "s" / "head.lock"
    lock.write_text("")
    started = time.monotonic()
    service.publish("s", draft(contents[1]), r0.release_id)
    assert time.monotonic() - started < 8, "the lock of a process that just died costs seconds, not the service"


def test_base_models_are_named_not_copied(service, tree, adapter, draft):
    model = tree({"config.json": '{"model_type": "x"}', "model.safetensors": os.urandom(200_000), "README.md": "no part of it"})
    base = service.base_artifact(model)
    assert base.kind == "base" and [file.path for file in base.files] == ["config.json", "model.safetensors"]
    assert service.base_artifact(model) == base
    r0 = service.create("s", base)
    assert service.directory(r0.content_id) is None and r0.restorable and r0.kind == "base"
    r1 = service.publish("s", draft(service.store(adapter(), "lora")), r0.release_id)
    assert service.rollback("s").content_id == base.content_id != r1.content_id
    assert service.verify("s") == []
    (model / "model.safetensors").write_bytes(os.urandom(200_000))
    assert service.base_artifact(model).content_id != base.content_id


def test_the_work_of_a_listing_does_not_grow_with_the_chain(service, adapter, draft, monkeypatch):
    """Git processes are what a listing costs: two for any length, none again, one for what was added meanwhile."""
    artifacts = [service.store(adapter(120_000, seed=seed), "lora") for seed in range(3)]
    service.create("s", artifacts[0])
    commands = []
    spawn = Git._spawn

    def counted(self, arguments, *rest, **more):
        commands.append(arguments[0])
        return spawn(self, arguments, *rest, **more)

    monkeypatch.setattr(Git, "_spawn", counted)
    for length in (4, 16):
        while len(service.list("s")) < length:
            service.publish("s", draft(artifacts[length % 3]), None)
        fresh = ReleaseService(service.home)
        commands.clear()
        assert len(fresh.list("s")) == length and commands == ["log", "cat-file"]
        commands.clear()
        fresh.list("s")
        assert commands == []
    stats = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda *args, **more: stats.append(args[0]) or stat(*args, **more))
    fresh.list("s")
    assert len([path for path in stats if "/lfs/" in str(path)]) <= 3, "each content's files are looked for once"
