"""A harness's releases as a git repository: one commit each, going on where it ended, never over a person's own work."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import ConflictError, UsageError
from reef_cli.harness import history

AT = 1_800_000_000


def rule(identity: str, text: str) -> dict[str, Any]:
    return {"id": identity, "kind": "rules", "config": {"text": text}}


SCRIPT = {"id": "pdf", "kind": "skill", "config": {"description": "Makes PDFs", "text": "# Steps"}}
TREES = {
    "r0-a": [],
    "r1-b": [rule("house", "One word.\nAlways.\n"), SCRIPT],
    "r2-c": [rule("house", "Two words.\nAlways.\n")],
    "r3-d": [],
}


def row(release: str, author: str = "job", **evidence: str) -> dict[str, Any]:
    step = int(release[1])
    facts = {"content_id": f"sha256:{step}", "operation": "training" if step else "creation", "recorded_at": AT + step}
    return {"release_id": release, "author": author, "evidence": evidence, **facts}


CHAIN = [row("r0-a"), row("r1-b", changed="added rules house"), row("r2-c", author="Ann", reason="shorter"), row("r3-d")]


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True).stdout


def write(folder: Path, count: int) -> list[str]:
    return history.write(folder, CHAIN[:count], TREES.__getitem__)


def test_a_commit_for_every_release(tmp_path: Path) -> None:
    folder = tmp_path / "h"
    assert write(folder, 3) == ["r0-a", "r1-b", "r2-c"]
    lines = git(folder, "log", "--format=%an|%at|%s|%(trailers:key=Reef-Release,valueonly,separator=)").splitlines()
    assert lines == [
        f"Ann|{AT + 2}|shorter|r2-c",
        f"job|{AT + 1}|added rules house|r1-b",
        f"job|{AT}|creation|r0-a",
    ]
    blamed = git(folder, "blame", "-s", "rules/house/text.md").splitlines()
    last, before = (git(folder, "rev-parse", name)[:7] for name in ("HEAD", "HEAD~1"))
    assert [line[:7] for line in blamed] == [last, before], "the second line is older"
    assert "skills" not in "".join(git(folder, "ls-files")) and not any(
        (folder / name).exists() for name in ("skills", "skill")
    )
    assert git(folder, "status", "--porcelain") == ""


def test_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    folder = tmp_path / "h"
    assert write(folder, 2) == ["r0-a", "r1-b"] and write(folder, 2) == []
    before = git(folder, "rev-parse", "HEAD")
    assert write(folder, 4) == ["r2-c", "r3-d"]
    assert git(folder, "rev-parse", "HEAD~2") == before
    again = tmp_path / "again"
    write(again, 4)
    assert git(again, "rev-parse", "HEAD") == git(folder, "rev-parse", "HEAD"), "the same releases are the same commits"
    assert git(folder, "ls-files") == git(again, "ls-files")


def test_a_persons_own_work_is_left_alone(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        write(full, 2)
    assert [path.name for path in full.iterdir()] == ["notes.txt"]
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", str(other)], check=True)
    git(other, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "mine")
    with pytest.raises(UsageError, match="another repository"):
        write(other, 2)
    mine = tmp_path / "mine"
    write(mine, 2)
    (mine / "rules" / "house" / "text.md").write_text("edited")
    with pytest.raises(ConflictError, match="changes of its own"):
        write(mine, 3)
    git(mine, "checkout", "-q", ".")
    with pytest.raises(ConflictError, match="ends at r1-b"):
        history.write(mine, [CHAIN[0], CHAIN[2]], TREES.__getitem__)
    assert (mine / "rules" / "house" / "text.md").read_text() == "One word.\nAlways.\n"


def test_the_callers_git_settings_lead_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    subprocess.run(["git", "init", "-q", str(elsewhere)], check=True)
    with monkeypatch.context() as patch:
        patch.setenv("GIT_DIR", str(elsewhere / ".git"))
        patch.setenv("GIT_INDEX_FILE", str(elsewhere / "index"))
        write(tmp_path / "h", 3)
        assert os.environ["GIT_DIR"] == str(elsewhere / ".git")
    assert git(tmp_path / "h", "status", "--porcelain") == "" and not (elsewhere / "index").exists()
