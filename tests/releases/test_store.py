"""Artifacts: what is refused, how bytes are kept, and what a full disk leaves behind."""

import errno
import hashlib
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from reef_cli.core.errors import InvalidRequest, MissingDependency, NotRestorable, StorageError, UnsupportedArtifact
from reef_cli.core.ids import ContentId
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases import ReleaseService, intake
from reef_cli.releases import objects as objects_module


def objects_of(service: ReleaseService) -> list[Path]:
    return [path for path in (service.repo / "lfs").rglob("*") if path.is_file()]


def test_bytes_come_back_from_a_read_only_folder(service, tree):
    big = os.urandom(300_000)
    source = tree({"AGENTS.md": "be brief\n", "skills/a/SKILL.md": "x", "data/big.txt": big})
    (source / "skills/a/SKILL.md").chmod(0o755)
    artifact = service.store(source, "harness")
    folder = service.directory(artifact.content_id)
    assert (folder / "AGENTS.md").read_text() == "be brief\n"
    assert (folder / "data/big.txt").read_bytes() == big
    for path in folder.rglob("*"):
        if path.is_file():
            assert not path.stat().st_mode & 0o222, path
    assert (folder / "skills/a/SKILL.md").stat().st_mode & stat.S_IXUSR
    assert [file.path for file in artifact.files] == sorted(file.path for file in artifact.files)
    assert artifact.size == 300_000 + 9 + 1
    assert service.directory(artifact.content_id) == folder


def test_large_files_lie_where_git_lfs_looks_for_them(service, tree):
    big = os.urandom(150_000)
    oid = hashlib.sha256(big).hexdigest()
    artifact = service.store(tree({"big.txt": big, "small.txt": "s"}), "harness")
    path = service.repo / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
    assert path.read_bytes() == big
    ref = f"refs/reef-content/{artifact.content_id.removeprefix('sha256:')}"
    shown = subprocess.run(
        ["git", f"--git-dir={service.repo}", "show", f"{ref}:artifact/big.txt"], capture_output=True, check=True
    )
    assert shown.stdout.decode() == f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 150000\n"
    linked = service.directory(artifact.content_id) / "big.txt"
    assert linked.stat().st_ino == path.stat().st_ino, "materialising costs no second copy"


def test_equal_bytes_are_kept_once(service, tree):
    big = os.urandom(150_000)
    first = service.store(tree({"a.txt": big}), "harness")
    again = service.store(tree({"a.txt": big}), "harness")
    other = service.store(tree({"b.txt": big}), "harness")
    assert first.content_id == again.content_id != other.content_id
    assert len(objects_of(service)) == 1


def test_content_id_sees_mode_name_and_kind(service, tree):
    plain = tree({"run": "echo"})
    executable = tree({"run": "echo"})
    (executable / "run").chmod(0o755)
    ids = {service.store(plain, "harness").content_id, service.store(executable, "harness").content_id}
    ids.add(service.store(tree({"walk": "echo"}), "harness").content_id)
    ids.add(service.store(plain, "routing").content_id)
    assert len(ids) == 4


def test_a_file_that_looks_like_a_pointer_stays_a_file(service, tree):
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 5\n"
    artifact = service.store(tree({"pointer.txt": text}), "harness")
    assert (service.directory(artifact.content_id) / "pointer.txt").read_text() == text


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "x.pkl", "weights.ckpt", "a.npz", "evil.py"])
def test_weights_are_safetensors_only(service, adapter, name):
    folder = adapter()
    (folder / name).write_bytes(b"x")
    with pytest.raises(UnsupportedArtifact, match="not allowed"):
        service.store(folder, "lora")


def test_a_pickle_is_known_by_its_bytes(service, tree):
    with pytest.raises(UnsupportedArtifact, match="pickle"):
        service.store(tree({"notes.txt": pickle.dumps({"a": 1})}), "harness")


def test_links_and_special_files_are_refused(service, tree):
    folder = tree({"a.txt": "a"})
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(UnsupportedArtifact, match="symbolic link"):
        service.store(folder, "harness")
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(UnsupportedArtifact, match="neither"):
        service.store(folder, "harness")
    (folder / "pipe").unlink()
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("[core]")
    with pytest.raises(UnsupportedArtifact, match=r"\.git"):
        service.store(folder, "harness")
    assert objects_of(service) == []


@pytest.mark.parametrize("path", ["../x", "/abs", "a//b", "a/../b", ".", "a\\b", "a\nb", ".GIT/hooks", ""])
def test_names_that_leave_the_folder(path):
    from reef_cli.releases.artifact import check_path

    with pytest.raises(UnsupportedArtifact):
        check_path(path)


def test_damaged_safetensors_are_refused(service, adapter):
    folder = adapter()
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[:-1], whole + b"x", b"\xff" * 40, b"", b"\x10\0\0\0\0\0\0\0not json here!!!"):
        weights.write_bytes(broken)
        with pytest.raises(UnsupportedArtifact, match="safetensors"):
            service.store(folder, "lora")
    assert objects_of(service) == []


def test_a_lora_artifact_must_be_one(service, adapter, tree, safetensors):
    folder = adapter()
    safetensors(folder / "adapter_model.safetensors", {"model.weight": b"abc"})
    with pytest.raises(UnsupportedArtifact, match="no LoRA tensors"):
        service.store(folder, "lora")
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(UnsupportedArtifact):
        service.store(folder, "lora")
    with pytest.raises(UnsupportedArtifact, match=r"adapter_config\.json"):
        service.store(tree({"x.json": "{}"}), "lora")
    with pytest.raises(UnsupportedArtifact, match="unknown kind"):
        service.store(folder, "model")
    with pytest.raises(InvalidRequest):
        service.store(folder, "base")


def test_unknown_contents(service):
    with pytest.raises(NotRestorable):
        service.directory(ContentId("sha256:" + "0" * 64))
    with pytest.raises(NotRestorable):
        service.directory(ContentId("../../etc"))


def test_a_full_disk_leaves_nothing_behind(service, adapter, draft, monkeypatch):
    base = service.store(adapter(120_000, seed=9), "lora")
    r0 = service.create("s", base)
    before = sorted(objects_of(service))
    written = 0

    def copy(source: int, target: int, count: int, *offsets: int | None) -> int:
        nonlocal written
        if written > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += 50_000
        return copy_file_range(source, target, min(count, 50_000), *offsets)

    copy_file_range = os.copy_file_range
    monkeypatch.setattr(intake.os, "copy_file_range", copy)
    with pytest.raises(StorageError, match="No space left"):
        service.store(adapter(400_000, seed=1), "lora")
    monkeypatch.undo()
    assert sorted(objects_of(service)) == before
    assert list((service.repo / "reef-tmp").iterdir()) == []
    assert service.head("s") == r0
    assert service.verify("s") == []
    service.store(adapter(400_000, seed=1), "lora")


LIMITED = """
import resource, sys
from pathlib import Path
from reef_cli.core.errors import StorageError
from reef_cli.releases import ReleaseService
service = ReleaseService(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    service.store(Path(sys.argv[2]), "lora")
except StorageError as error:
    print("refused:", error.code)
"""


def test_a_file_size_limit_of_the_system_is_a_storage_error(tmp_path, adapter):
    home = tmp_path / "limited"
    done = subprocess.run([sys.executable, "-c", LIMITED, str(home), str(adapter(500_000))], capture_output=True, text=True)
    assert done.stdout == "refused: storage_error\n", done.stderr
    assert [path for path in (home / "releases.git" / "lfs").rglob("*") if path.is_file()] == []


def test_a_source_that_changes_while_it_is_read_is_stored_as_it_was_read(service, adapter, monkeypatch):
    folder = adapter(300_000)
    real = objects_module.copy_hashed

    def copy(source, target):
        result = real(source, target)
        (folder / "adapter_model.safetensors").write_bytes(b"overwritten")
        return result

    monkeypatch.setattr(objects_module, "copy_hashed", copy)
    artifact = service.store(folder, "lora")
    r0 = service.create("s", artifact)
    assert r0.restorable and service.verify("s") == []


def test_lfs_always_needs_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="git-lfs"):
        ReleaseService(tmp_path / "home", lfs="always")


def test_kind_of_the_draft_must_be_the_content_s(service, tree):
    artifact = service.store(tree({"a": "1"}), "harness")
    r0 = service.create("s", artifact)
    wrong = Draft(artifact.content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, "x")
    with pytest.raises(InvalidRequest, match="kind"):
        service.publish("s", wrong, r0.release_id)
