"""Full checkpoints as differences: byte for byte, gc-safe, verifiable, whatever is killed or damaged; and files handed over."""

import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reef_cli.core.errors import StorageError
from reef_cli.releases import Keep, ReleaseService
from reef_cli.releases import objects as objects_module
from reef_cli.releases.compact import NEWEST, PERIOD

NUMBERS = 120_000


def checkpoint(folder: Path, weights: bytes, **metadata: str) -> Path:
    """A full checkpoint of one bf16 tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    header = {"w": {"dtype": "BF16", "shape": [len(weights) // 2], "data_offsets": [0, len(weights)]}}
    text = json.dumps({"__metadata__": metadata, **header} if metadata else header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + weights)
    return folder


def stepped(weights: bytes, seed: int) -> bytes:
    """Weights after a learning step: the lowest bit of one number in twenty."""
    changed = bytearray(weights)
    for index in random.Random(seed).sample(range(len(weights) // 2), len(weights) // 40):
        changed[2 * index] ^= 1
    return bytes(changed)


@pytest.fixture
def grown(service, tmp_path, draft):
    """`grown(n)`: a chain of n checkpoints, each one step after the one before; `(release, weights)` oldest first."""

    def grow(count, home=service):
        weights = random.Random(0).randbytes(2 * NUMBERS)
        made = []
        for step in range(count):
            metadata = {"step": str(step)} if step % 2 else {}
            folder = checkpoint(tmp_path / f"c{step}-{os.urandom(3).hex()}", weights, **metadata)
            artifact = home.store(folder, "checkpoint")
            made.append((home.publish("s", draft(artifact), None) if made else home.create("s", artifact), weights))
            weights = stepped(weights, step)
        return made

    return grow


def disk(service: ReleaseService) -> int:
    """Bytes of all large files, whatever name they have."""
    found = {(s.st_ino, s.st_size) for p in service.home.rglob("*") if p.is_file() and (s := p.stat()).st_size > 1000}
    return sum(size for _, size in found)


def same_bytes(service: ReleaseService, made) -> None:
    for release, weights in made:
        folder = service.directory(release.content_id)
        assert (folder / "model.safetensors").read_bytes()[-2 * NUMBERS :] == weights, release.release_id
        for file in service.artifact(release.content_id).files:
            path = folder / file.path
            assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256 and not path.stat().st_mode & 0o222


def test_older_checkpoints_become_small_and_come_back_byte_for_byte(service, grown):
    made = grown(12)
    same_bytes(service, made)
    before = disk(service)
    report = service.compact(idle_s=0)
    assert report.objects == 12 - NEWEST - 2, "the first, every eighth and the newest stay whole"
    assert report.bytes > 0.6 * before and disk(service) < 0.5 * before
    assert all(release.restorable for release in service.list("s")) and service.verify("s") == []
    same_bytes(service, made)
    fresh = ReleaseService(service.home)
    assert fresh.verify("s") == [] and all(release.restorable for release in fresh.list("s"))
    again = service.compact(idle_s=0)
    assert (again.objects, again.bytes) == (0, 0) and again.folders > 0
    objects = fresh._objects
    depths = [objects.depth(f.sha256) for r, _ in made for f in fresh.artifact(r.content_id).files if f.size > 100_000]
    assert max(depths) == PERIOD - 1 and depths[-NEWEST:] == [0, 0]


def test_a_folder_in_use_stays(service, grown):
    made = grown(6)
    folder = service.directory(made[1][0].content_id)
    service.compact()
    assert folder.is_dir()
    service.compact(idle_s=0)
    assert not folder.is_dir()


def test_old_content_is_served_again_from_its_delta(service, grown):
    made = grown(6)
    service.compact(idle_s=0)
    back = service.rollback("s", made[2][0].release_id)
    assert back.content_id == made[2][0].content_id
    same_bytes(service, made[2:3])
    service.compact(idle_s=0)
    assert service.directory(back.content_id).is_dir() and service.verify("s") == []
    same_bytes(service, made)


def test_the_collector_keeps_what_a_delta_is_made_from(service, grown):
    made = grown(7)
    service.compact(idle_s=0)
    keep = Keep(latest=1, pinned=frozenset({made[3][0].release_id}), gated=False, grace_s=0)
    planned = service.gc(dry_run=True, keep=keep)
    report = service.gc(dry_run=False, keep=keep)
    assert (report.objects, report.bytes) == (planned.objects, planned.bytes) and report.objects == 1
    restorable = [release.release_id for release in service.list("s") if release.restorable]
    assert made[3][0].release_id in restorable and made[4][0].release_id not in restorable
    same_bytes(service, [made[3], made[5], made[6]])
    assert {problem.kind for problem in service.verify("s")} <= {"dropped"}
    free = service.gc(dry_run=False, keep=Keep(latest=1, gated=False, grace_s=0))
    assert free.objects == 4, "with its last user the chain of deltas goes too"
    same_bytes(service, made[5:])


def test_a_damaged_or_missing_piece_is_told(service, grown):
    made = grown(5)
    service.compact(idle_s=0)
    paths = [path for path in (service.repo / "lfs" / "deltas").rglob("*") if path.is_file()]
    assert len(paths) == 2
    victim = max(paths, key=lambda path: service._objects.depth(path.name))
    whole = victim.read_bytes()
    victim.chmod(0o644)
    for broken in (whole[:-20], whole[:300] + b"\xff" + whole[301:], b"{}\n", whole.replace(b'"delta": 1', b'"delta": 9')):
        victim.write_bytes(broken)
        fresh = ReleaseService(service.home)
        assert {problem.kind for problem in fresh.verify("s")} == {"damaged"}, broken[:20]
        with pytest.raises(StorageError):
            fresh.directory(made[2][0].content_id)
    victim.write_bytes(whole)
    assert ReleaseService(service.home).verify("s") == []
    bases = {service._objects.facts(path.name).base for path in paths}
    next(path for path in (service.repo / "lfs" / "objects").rglob("*") if path.name in bases).unlink()
    fresh = ReleaseService(service.home)
    assert {problem.kind for problem in fresh.verify("s")} == {"dropped"}
    assert [release.restorable for release in fresh.list("s")] == [True, True, False, False, False]


COMPACT = """
import sys
from pathlib import Path
from reef_cli.releases import ReleaseService
service = ReleaseService(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(service.compact(idle_s=0).objects)
"""


def test_killed_at_any_moment_nothing_is_lost(service, grown):
    made = grown(5)
    for pause in (0.0, 0.004, 0.01, 0.02, 0.04):
        command = [sys.executable, "-c", COMPACT, str(service.home)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "ready\n"
            child.stdin.write("go\n")
            child.stdin.flush()
            time.sleep(pause)
            child.send_signal(signal.SIGKILL)
        assert service.verify("s") == []
    service.compact(idle_s=0)
    service.gc(dry_run=False, keep=Keep(grace_s=0))
    assert list((service.repo / "lfs" / "tmp").iterdir()) == []
    same_bytes(service, made)


def test_publishers_and_the_collector_beside_compaction(service, grown, draft, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    made = grown(6)
    with ThreadPoolExecutor(3) as pool:
        compacting = pool.submit(service.compact, idle_s=0)
        other = ReleaseService(service.home)
        collecting = pool.submit(other.gc, dry_run=False)
        artifact = other.store(checkpoint(tmp_path / "more", made[-1][1][:-2] + b"ab"), "checkpoint")
        newest = other.publish("s", draft(artifact), None)
        assert compacting.result().objects + collecting.result().kept_objects > 0
    assert service.verify("s") == [] and service.head("s").release_id == newest.release_id
    same_bytes(service, made)


def test_a_remote_folder_gets_whole_objects(service, grown, tmp_path):
    made = grown(5)
    service.compact(idle_s=0)
    remote = tmp_path / "remote.git"
    subprocess.run(["git", "init", "-q", "--bare", str(remote)], check=True)
    service.push(str(remote))
    stored = [path for path in (remote / "lfs" / "objects").rglob("*") if path.is_file()]
    assert len(stored) == 5 and all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in stored)
    other = ReleaseService(tmp_path / "other")
    other.fetch(str(remote))
    same_bytes(other, made)


def test_objects_are_whole_only_while_a_program_needs_them(service, grown):
    grown(4)
    service.compact(idle_s=0)
    packed = [path.name for path in (service.repo / "lfs" / "deltas").rglob("*") if path.is_file()]
    assert packed
    with service._objects.made_whole(packed):
        for oid in packed:
            assert hashlib.sha256(service._objects.path(oid).read_bytes()).hexdigest() == oid
    assert not any(service._objects.path(oid).exists() for oid in packed) and service.verify("s") == []


def test_what_saves_little_stays_whole(service, tmp_path, draft):
    for seed in range(4):
        artifact = service.store(checkpoint(tmp_path / f"r{seed}", random.Random(seed).randbytes(200_000)), "checkpoint")
        service.publish("s", draft(artifact), None) if seed else service.create("s", artifact)
    report = service.compact(idle_s=0)
    assert (report.objects, report.bytes) == (0, 0)
    calls = []
    prepare, service._objects.prepare_delta = service._objects.prepare_delta, lambda *names: calls.append(names)
    service.compact(idle_s=0)
    assert calls == [] and prepare, "what saved too little is not tried again"


# Files handed over


def test_a_file_handed_over_is_linked_not_copied(service, adapter, monkeypatch):
    folder = adapter(400_000)
    source = folder / "adapter_model.safetensors"
    monkeypatch.setattr(objects_module, "copy_hashed", lambda *_: pytest.fail("copied"))
    artifact = service.store(folder, "lora", take=True)
    stored = service._objects.path(hashlib.sha256(source.read_bytes()).hexdigest())
    assert stored.stat().st_ino == source.stat().st_ino and not source.stat().st_mode & 0o222
    shutil.rmtree(folder)
    service.create("s", artifact)
    assert service.verify("s") == []
    again = service.store(adapter(400_000), "lora", take=True)
    assert again == artifact


def test_what_cannot_be_linked_is_copied(service, adapter, monkeypatch):
    def refuse(*_, **__):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    folder = adapter(400_000)
    service.create("s", service.store(folder, "lora", take=True))
    assert service.verify("s") == [] and (folder / "adapter_model.safetensors").stat().st_mode & 0o200


def test_a_file_that_changes_while_it_is_handed_over_is_copied_as_it_then_is(service, adapter, monkeypatch):
    folder = adapter(400_000, seed=3)
    source = folder / "adapter_model.safetensors"
    later = adapter(400_000, seed=4) / "adapter_model.safetensors"
    real = hashlib.file_digest

    def digest(file, name):
        found = real(file, name)
        if source.exists():
            with source.open("r+b") as opened:
                opened.write(later.read_bytes())
        return found

    monkeypatch.setattr(hashlib, "file_digest", digest)
    artifact = service.store(folder, "lora", take=True)
    monkeypatch.undo()
    service.create("s", artifact)
    assert service.verify("s") == []


def test_without_copy_file_range_bytes_go_the_long_way(service, adapter, monkeypatch):
    def none(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "copy_file_range", none)
    service.create("s", service.store(adapter(9_000_000), "lora"))
    assert service.verify("s") == []
