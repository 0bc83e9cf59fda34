"""A harness's release chain as an ordinary git repository: a commit for every release, for `git log -p` and `git blame`.

The folder holds the tree as `reef harness pull` writes it. Each commit carries the release's author, time and reason, and its
id in the trailer `Reef-Release`; written again, the repository goes on after the last one. It belongs to the person: one that
was changed by hand, or whose last release is no longer in the chain, is left alone (GitPython).
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from git import Actor, InvalidGitRepositoryError, NoSuchPathError, Repo

from reef_cli.core.errors import ConflictError, UsageError
from reef_cli.harness.install import pull

Row = Mapping[str, Any]
TRAILER = "Reef-Release"


def write(folder: Path, releases: Sequence[Row], entries_of: Callable[[str], Sequence[Row]]) -> list[str]:
    """Commit what `folder` lacks of `releases` (oldest first); the ids that were written.

    `entries_of(release_id)` gives a release's tree as `GET /reef/harness` lists it. `ConflictError` when the repository has
    changes of its own or another history, `UsageError` when the folder holds something else.
    """
    with _own_environment(), _repository(folder) as repo:
        written = []
        for row in _missing(repo, releases):
            _lay(repo, entries_of(str(row["release_id"])))
            _commit(repo, row)
            written.append(str(row["release_id"]))
    return written


class _own_environment:
    """The caller's `GIT_*` variables would lead git elsewhere."""

    def __enter__(self) -> None:
        self._taken = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("GIT_")}

    def __exit__(self, *_: object) -> None:
        os.environ.update(self._taken)


def _repository(folder: Path) -> Repo:
    try:
        repo = Repo(folder)
    except (NoSuchPathError, InvalidGitRepositoryError):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is no git repository and not empty", hint="name a new folder") from None
        return Repo.init(folder, mkdir=True, initial_branch="main")
    if repo.bare or (repo.head.is_valid() and _release_of(repo) is None):
        raise UsageError(
            f"{folder} holds another repository", why=f"its last commit has no {TRAILER}", hint="name a new folder"
        )
    if repo.is_dirty(untracked_files=True):
        raise ConflictError(
            f"{folder} has changes of its own", hint="commit them on a branch of yours and switch back, or stash"
        )
    return repo


def _release_of(repo: Repo) -> str | None:
    """The release of the last commit."""
    lines = str(repo.head.commit.message).splitlines()
    return next((line.partition(": ")[2] for line in reversed(lines) if line.startswith(f"{TRAILER}: ")), None)


def _missing(repo: Repo, releases: Sequence[Row]) -> Iterator[Row]:
    last = _release_of(repo) if repo.head.is_valid() else None
    ids = [row["release_id"] for row in releases]
    if last is not None and last not in ids:
        raise ConflictError(
            f"{repo.working_dir} ends at {last}", why="that release is not in the chain", hint="name a new folder"
        )
    return iter(releases[ids.index(last) + 1 if last is not None else 0 :])


def _lay(repo: Repo, entries: Sequence[Row]) -> None:
    """Make the work tree and the index hold exactly this tree."""
    root = Path(repo.working_dir)
    with tempfile.TemporaryDirectory(prefix="reef-") as temporary:
        made = Path(temporary) / "tree"
        pull(entries, made)
        for path in root.iterdir():
            if path.is_dir() and path.name != ".git":
                shutil.rmtree(path)
            elif path.is_file():
                path.unlink()
        for path in made.iterdir():
            shutil.move(path, root / path.name)
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and ".git" not in path.parts}
    gone = [str(path) for path, _ in repo.index.entries if str(path) not in names]
    if gone:
        repo.index.remove(gone)
    repo.index.add(sorted(names))


def _commit(repo: Repo, row: Row) -> None:
    evidence = row.get("evidence") or {}
    back = f"rollback to {row['source_release_id']}" if row.get("source_release_id") else None
    title = evidence.get("changed") or back or evidence.get("reason") or row.get("operation") or "release"
    body = "\n".join(
        str(evidence[name]) for name in ("reason", "instruction") if evidence.get(name) and evidence[name] != title
    )
    facts = {TRAILER: row["release_id"], "Reef-Operation": row.get("operation"), "Reef-Content": row.get("content_id")}
    trailers = "\n".join(f"{name}: {value}" for name, value in facts.items() if value)
    message = "\n\n".join(part for part in (" ".join(str(title).split()), body, trailers) if part)
    at = datetime.fromtimestamp(float(row.get("recorded_at") or 0.0), UTC)
    actor = Actor(str(row.get("author") or "reef"), "reef@localhost")
    repo.index.commit(message + "\n", author=actor, committer=actor, author_date=at, commit_date=at, skip_hooks=True)
