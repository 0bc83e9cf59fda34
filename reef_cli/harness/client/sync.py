"""From the released tree to the folder the agent really uses, without ever losing a person's change.

Agents write into their config directory, so they get a copy. A file is updated when it still is what was put there before; a
file that a person changed, or that was there already, is kept and named. What the adapter lists as written by the agent itself
is not a change, and settings are compared by content without the keys the agent adds.
"""

from __future__ import annotations

import base64
import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .store import Place, digest, file_digest, get_json, inside, locked, put, put_json


def pristine(tree: Path) -> dict[str, Path]:
    """Files of a released tree by relative path."""
    return (
        {path.relative_to(tree).as_posix(): path for path in sorted(tree.rglob("*")) if path.is_file()} if tree.is_dir() else {}
    )


def sync(place: Place, config: str, drift: Mapping[str, Any]) -> list[str]:
    """Bring the used folder to the installed release; returns the paths that were kept because a person changed them."""
    with locked(place.root / "lock"):
        home = place.home / config
        home.mkdir(parents=True, exist_ok=True)
        before: dict[str, str] = get_json(place.synced, {})
        after: dict[str, str] = {}
        kept: list[str] = []
        files = pristine(place.tree)
        for path, source in files.items():
            target, data = inside(home, path), source.read_bytes()
            if _ours(target, path, before.get(path), place, drift):
                put(target, data, source.stat().st_mode & 0o777)
                after[path] = digest(data)
            elif file_digest(target) != digest(data):
                kept.append(path)
                if path in before:
                    after[path] = before[path]
            else:
                after[path] = digest(data)
        for path in set(before) - set(files):
            target = inside(home, path)
            if file_digest(target) == before[path]:
                target.unlink()
                _prune(target.parent, home)
            elif target.exists():
                kept.append(path)
        put_json(place.synced, after)
        if after:
            put_json(
                place.root / "synced-content.json",
                {path: files[path].read_text(errors="replace") for path in after if path.endswith(".json") and path in files},
            )
        return sorted(kept)


def seed(place: Place, config: str, seeds: Mapping[str, str]) -> None:
    """Write files the agent owns but must find at its first start; one that is there is never touched."""
    for path, data in seeds.items():
        target = inside(place.home / config, path)
        if not target.exists() and not target.is_symlink():
            put(target, base64.b64decode(data), 0o600)


def changes(place: Place, config: str, drift: Mapping[str, Any]) -> dict[str, str]:
    """How the used folder differs from what was synced: path -> changed, missing or added."""
    home = place.home / config
    before: dict[str, str] = get_json(place.synced, {})
    found: dict[str, str] = {}
    for path, known in before.items():
        target = inside(home, path)
        if not target.exists():
            found[path] = "missing"
        elif file_digest(target) != known and not _same_settings(target, path, place, drift):
            found[path] = "changed"
    for path in pristine(home):
        if path not in before and not _written(path, drift):
            found[path] = "added"
    return found


def _ours(target: Path, path: str, known: str | None, place: Place, drift: Mapping[str, Any]) -> bool:
    if not target.exists() and not target.is_symlink():
        return True
    return known is not None and (file_digest(target) == known or _same_settings(target, path, place, drift))


def _same_settings(target: Path, path: str, place: Place, drift: Mapping[str, Any]) -> bool:
    ignored = drift.get("semantic", {}).get(path)
    if ignored is None or not path.endswith(".json"):
        return False
    was = get_json(place.root / "synced-content.json", {}).get(path)
    try:
        old, new = json.loads(was or "null"), json.loads(target.read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(old, dict) or not isinstance(new, dict):
        return False
    return {k: v for k, v in old.items() if k not in ignored} == {k: v for k, v in new.items() if k not in ignored}


def _written(path: str, drift: Mapping[str, Any]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in drift.get("written", ()))


def _prune(folder: Path, root: Path) -> None:
    while folder != root and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
