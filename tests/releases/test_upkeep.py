"""Garbage collection, verification, diffs, model cards, and chains on a remote."""

import os
import shutil
import subprocess

import pytest
import yaml

from reef_cli.core.errors import ConflictError, MissingDependency, NotRestorable, StorageError, UnavailableError
from reef_cli.core.types import Operation
from reef_cli.releases import Keep, ReleaseService


class Hand:
    """A clock a test moves."""

    def __init__(self) -> None:
        self.at = 1_800_000_000.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


@pytest.fixture
def clock():
    return Hand()


@pytest.fixture
def timed(tmp_path, clock):
    return ReleaseService(tmp_path / "timed", clock=clock)


def grow(service, adapter, draft, count, **facts):
    """A chain of `count` adapters on top of the first; newest first."""
    service.create("s", service.store(adapter(seed=0), "lora"))
    for seed in range(1, count):
        service.publish("s", draft(service.store(adapter(seed=seed), "lora"), **facts), None)
    return service.list("s")


def oids(service):
    return {path.name for path in (service.repo / "lfs" / "objects").rglob("*") if path.is_file()}


def test_by_default_nothing_of_a_chain_is_ever_collected(timed, adapter, draft, clock):
    releases = grow(timed, adapter, draft, 4)
    held = timed.hold("s", draft(timed.store(adapter(seed=50), "lora")), None)
    before = oids(timed)
    clock.at += 1e9
    report = timed.gc(dry_run=False)
    assert report.objects == 0 and oids(timed) == before
    for release in (held, *releases):
        assert timed.directory(release.content_id).is_dir() and timed.get("s", release.release_id).restorable


def test_unpublished_contents_go_after_the_grace_period(timed, adapter, draft, clock):
    grow(timed, adapter, draft, 1)
    orphan = timed.store(adapter(seed=9), "lora")
    timed.directory(orphan.content_id)
    assert timed.gc(dry_run=False).objects == 0
    clock.at += 25 * 3600
    dry = timed.gc(dry_run=True)
    assert (dry.objects, dry.contents) == (1, (orphan.content_id,)) and dry.bytes > 200_000
    assert timed.directory(orphan.content_id).is_dir(), "a dry run removes nothing"
    wet = timed.gc(dry_run=False)
    assert (wet.objects, wet.bytes, wet.contents) == (dry.objects, dry.bytes, dry.contents)
    with pytest.raises(NotRestorable):
        timed.directory(orphan.content_id)
    with pytest.raises(NotRestorable):
        timed.publish("s", draft(orphan), None)
    assert timed.verify("s") == []


def test_storing_again_renews_the_grace_period(timed, adapter, draft, clock):
    grow(timed, adapter, draft, 1)
    folder = adapter(seed=9)
    artifact = timed.store(folder, "lora")
    clock.at += 23 * 3600
    timed.store(folder, "lora")
    clock.at += 23 * 3600
    timed.gc(dry_run=False)
    timed.publish("s", draft(artifact), None)


def test_a_keep_policy_names_the_restorable_set(timed, adapter, draft, clock):
    grow(timed, adapter, draft, 3, gated=True)
    for seed in range(3, 8):
        timed.publish("s", draft(timed.store(adapter(seed=seed), "lora")), None)
    clock.at += 1e6
    releases = timed.list("s")
    pinned = releases[4].release_id
    keep = Keep(latest=2, pinned=frozenset({pinned}))
    dry = timed.gc(dry_run=True, keep=keep)
    lost = {release.release_id for release in releases[2:4]}
    assert {identifier for _, identifier in dry.releases} == lost and dry.objects == 2
    timed.gc(dry_run=False, keep=keep)
    assert {release.release_id for release in timed.list("s") if not release.restorable} == lost
    target = next(release for release in timed.list("s") if not release.restorable)
    with pytest.raises(NotRestorable):
        timed.rollback("s", target.release_id)
    assert timed.rollback("s").content_id == releases[1].content_id
    assert {problem.kind for problem in timed.verify("s")} == {"dropped"}
    again = timed.store(adapter(seed=int(target.step)), "lora")
    assert again.content_id == target.content_id and timed.get("s", target.release_id).restorable


def test_the_rollback_target_survives_the_tightest_policy(timed, adapter, draft, clock):
    first, second = timed.store(adapter(seed=1), "lora"), timed.store(adapter(seed=2), "lora")
    timed.create("s", first)
    for _ in range(3):
        timed.publish("s", draft(second), None)
    clock.at += 1e6
    assert timed.gc(dry_run=False, keep=Keep(latest=1, gated=False)).objects == 0
    assert timed.rollback("s").content_id == first.content_id


def test_objects_shared_by_a_kept_content_stay(timed, tree, draft, clock):
    big, other = os.urandom(150_000), os.urandom(150_000)
    timed.create("s", timed.store(tree({"a": "0", "big": big}), "harness"))
    for index in range(1, 4):
        extra = {"other": other} if index == 1 else {}
        timed.publish("s", draft(timed.store(tree({"a": str(index), "big": big, **extra}), "harness")), None)
    clock.at += 1e6
    assert timed.gc(dry_run=False, keep=Keep(latest=1, gated=False)).objects == 1
    restorable = [release.restorable for release in timed.list("s")]
    assert restorable == [True, True, False, True]


def test_archived_chains_stay_whole(timed, adapter, draft, clock):
    releases = grow(timed, adapter, draft, 3)
    timed.archive("s")
    clock.at += 1e6
    assert timed.gc(dry_run=False, keep=Keep(latest=1)).objects == 0
    assert all(timed.directory(release.content_id) for release in releases)


def test_leftovers_of_dead_processes_are_swept(service, adapter, draft):
    grow(service, adapter, draft, 1)
    (service.repo / "lfs" / "tmp" / "123-dead").write_bytes(b"x")
    dead = service.home / "artifacts" / ".tmp-1-dead"
    dead.mkdir(parents=True)
    assert service.gc(dry_run=True).leftovers == 2
    service.gc(dry_run=False)
    assert not dead.exists() and list((service.repo / "lfs" / "tmp").iterdir()) == []


def test_packing_keeps_the_chain(service, tree, draft, monkeypatch):
    from reef_cli.releases import collect

    monkeypatch.setattr(collect, "PACK_ABOVE", 0)
    service.create("s", service.store(tree({"a": "0"}), "harness"))
    for index in range(3):
        service.publish("s", draft(service.store(tree({"a": f"{index + 1}"}), "harness")), None)
    before = service.list("s")
    service.gc(dry_run=False)
    assert not list(service.repo.glob("objects/??/*"))
    assert ReleaseService(service.home).list("s") == before
    assert service.publish("s", draft(service.store(tree({"a": "9"}), "harness")), before[0].release_id).step == 4
    assert service.verify("s") == []


def test_verify_names_what_is_damaged(service, adapter, draft):
    releases = grow(service, adapter, draft, 3)
    assert service.verify("s") == []
    weights = next(file for file in service.artifact(releases[1].content_id).files if file.size > 100_000)
    path = service.repo / "lfs" / "objects" / weights.sha256[:2] / weights.sha256[2:4] / weights.sha256
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (problem,) = service.verify("s")
    assert (problem.kind, problem.release_id, problem.path) == ("damaged", releases[1].release_id, "adapter_model.safetensors")


def test_verify_sees_a_forged_manifest(service, tree, draft):
    """A commit put on the ref by hand, with a parent that is not what its manifest says."""
    r0 = service.create("s", service.store(tree({"a": "0"}), "harness"))
    r1 = service.publish("s", draft(service.store(tree({"a": "1"}), "harness")), r0.release_id)

    def git(*arguments, stdin=None):
        environment = {**os.environ, **{f"GIT_{r}_{k}": "x@y" for r in ("AUTHOR", "COMMITTER") for k in ("NAME", "EMAIL")}}
        command = ["git", f"--git-dir={service.repo}", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, env=environment).stdout.strip()

    forged = git("commit-tree", f"{r0.commit}^{{tree}}", "-p", r1.commit, stdin="forged")
    git("update-ref", "refs/reef/s/head", forged)
    problems = ReleaseService(service.home).verify("s")
    assert any("twice" in problem.what for problem in problems)
    assert any("step 0" in problem.what for problem in problems)


def test_verify_finds_a_lost_git_object(service, tree, draft):
    r0 = service.create("s", service.store(tree({"a": "0"}), "harness"))
    blob = subprocess.run(
        ["git", f"--git-dir={service.repo}", "rev-parse", f"{r0.commit}:artifact/a"], capture_output=True, text=True, check=True
    ).stdout.strip()
    (service.repo / "objects" / blob[:2] / blob[2:]).unlink()
    kinds = {problem.kind for problem in service.verify("s")}
    assert {"git", "missing"} <= kinds


def test_diff_shows_text_and_digests(service, tree, draft):
    r0 = service.create("s", service.store(tree({"a.md": "one\ntwo\n", "gone": "x", "big": os.urandom(150_000)}), "harness"))
    new = service.store(tree({"a.md": "one\n2\n", "new": "y", "big": os.urandom(150_000), "raw": b"\0\1"}), "harness")
    r1 = service.publish("s", draft(new), None)
    found = service.diff(r0, r1)
    by_path = {file.path: file for file in found.files}
    assert {path: file.change for path, file in by_path.items()} == {
        "a.md": "changed", "gone": "removed", "big": "changed", "new": "added", "raw": "added",
    }  # fmt: skip
    assert "-two\n+2" in by_path["a.md"].text and "+y" in by_path["new"].text and "-x" in by_path["gone"].text
    assert by_path["big"].text is None and by_path["raw"].text is None
    assert by_path["big"].before.sha256 != by_path["big"].after.sha256
    assert service.diff(r1, r1.content_id).same and service.diff(r1, r1).files == ()


def card_of(service, release):
    shown = ["git", f"--git-dir={service.repo}", "show", f"{release.commit}:README.md"]
    return subprocess.run(shown, capture_output=True, text=True, check=True).stdout


def test_model_card_says_what_the_evidence_says(service, adapter, draft):
    grow(service, adapter, draft, 1)
    gate = {"candidate_mean": 0.75, "current_mean": 0.5, "difference": 0.25, "suite": {"name": "facts.jsonl"}, "pairs": 40}
    evidence = {"gate": gate, "metrics": {"loss": 1.25}, "reason": "shown better"}
    release = service.publish("s", draft(service.store(adapter(seed=3), "lora"), evidence=evidence), None)
    text = card_of(service, release)
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["library_name"] == "peft" and front["base_model"] == "tiny", "no folder of this machine in a card"
    assert "/home/someone" not in text
    metrics = front["model-index"][0]["results"][0]["metrics"]
    assert {metric["type"]: metric["value"] for metric in metrics} == {
        "candidate_mean": 0.75, "current_mean": 0.5, "difference": 0.25,
    }  # fmt: skip
    assert front["model-index"][0]["results"][0]["dataset"]["name"] == "facts.jsonl"
    assert "| gate.pairs | 40 |" in text and "| metrics.loss | 1.25 |" in text


def test_a_card_without_evidence_claims_nothing(service, adapter, tree, draft):
    r0 = service.create("s", service.store(adapter(), "lora"))
    front = yaml.safe_load(card_of(service, r0).split("---\n")[1])
    assert "model-index" not in front and "metrics" not in front
    harness = service.create("h", service.store(tree({"a": "1"}), "harness"))
    assert card_of(service, harness).startswith("# h r0-")


# Remotes


@pytest.fixture
def remote(tmp_path):
    path = tmp_path / "remote.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(path)], check=True)
    return str(path)


def test_a_chain_travels_whole(service, adapter, draft, remote, tmp_path):
    grow(service, adapter, draft, 3)
    held = service.hold("s", draft(service.store(adapter(seed=40), "lora")), None)
    sent = service.push(remote)
    assert sent.scenarios == ("s",) and sent.objects == 4 and sent.bytes > 800_000
    assert service.push(f"file://{remote}").objects == 0
    other = ReleaseService(tmp_path / "other")
    got = other.fetch(remote)
    assert got.objects == 4 and other.list("s") == service.list("s")
    assert other.verify("s") == [] and other.get("s", held.release_id).pending
    head = other.head("s")
    assert sorted(path.name for path in other.directory(head.content_id).iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    mine = other.rollback("s")
    other.push(remote, ["s"])
    service.fetch(remote, ["s"])
    assert service.head("s").release_id == mine.release_id


def test_chains_that_grew_apart_are_a_conflict(service, adapter, draft, remote, tmp_path):
    grow(service, adapter, draft, 2)
    service.push(remote)
    other = ReleaseService(tmp_path / "other")
    other.fetch(remote)
    other.rollback("s")
    other.push(remote)
    mine = service.rollback("s")
    with pytest.raises(ConflictError, match="moved on"):
        service.push(remote)
    with pytest.raises(ConflictError, match="differs"):
        service.fetch(remote)
    assert service.head("s") == mine and service.verify("s") == []
    assert service._git.refs("refs/reef-incoming/") == {}


def test_a_remote_that_is_behind_changes_nothing(service, adapter, draft, remote):
    grow(service, adapter, draft, 2)
    service.push(remote)
    mine = service.rollback("s")
    service.fetch(remote)
    assert service.head("s") == mine


def test_a_damaged_object_is_not_taken_from_a_remote(service, adapter, draft, remote, tmp_path):
    grow(service, adapter, draft, 1)
    service.push(remote)
    for path in (tmp_path / "remote.git" / "lfs" / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(b"\0" * path.stat().st_size)
    other = ReleaseService(tmp_path / "other")
    with pytest.raises(StorageError, match="damaged"):
        other.fetch(remote)
    assert other.list("s") == [] and oids(other) == set()


def test_a_server_needs_git_lfs_for_large_files(tmp_path, adapter, draft):
    service = ReleaseService(tmp_path / "home", lfs="never")
    grow(service, adapter, draft, 1)
    with pytest.raises(MissingDependency, match="git-lfs"):
        service.push("https://user:secret@127.0.0.1:1/x.git")
    with pytest.raises(UnavailableError):
        service.fetch(str(tmp_path / "nothing-there"))
    with pytest.raises(ConflictError, match="no git remote"):
        service.fetch("--upload-pack=touch /tmp/x")


@pytest.mark.skipif(shutil.which("git-lfs") is None, reason="git-lfs is not installed")
def test_git_lfs_itself_checks_out_what_reef_stored(service, adapter, draft, remote, tmp_path):
    releases = grow(service, adapter, draft, 2)
    service.push(remote)
    clone = tmp_path / "clone"

    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=clone, check=True, capture_output=True)

    clone.mkdir()
    git("init", "--quiet")
    git("lfs", "install", "--local")
    git("remote", "add", "origin", f"file://{remote}")
    git("fetch", "--quiet", "origin", "refs/reef/s/head")
    git("checkout", "--quiet", "FETCH_HEAD")
    git("lfs", "fsck")
    ours = service.directory(releases[0].content_id)
    assert (clone / "artifact/adapter_model.safetensors").read_bytes() == (ours / "adapter_model.safetensors").read_bytes()
    assert releases[0].operation is Operation.TRAINING
