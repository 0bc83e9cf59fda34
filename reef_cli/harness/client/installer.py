"""Putting a release on the machine, and taking everything off again.

Order: look at everything, refuse before the first byte is written; agent; client; tree beside the old one; `install.json` last,
which names the tree in force, so that an interrupted install leaves the old release whole. A second run writes nothing.
"""

from __future__ import annotations

import base64
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import agent, requires, sync
from .store import Place, Refused, base_folder, bin_folder, digest, file_digest, get_json, inside, locked, put, put_json, safe

MARKER = "# Installed by Reef; removed by `uninstall`."


def check(payload: Mapping[str, Any]) -> dict[str, bytes]:
    """The release's files, decoded and verified: names stay inside, digests match."""
    if payload.get("format") != 1:
        raise Refused(f"this release has format {payload.get('format')!r}", "update Reef on this machine")
    files = {}
    for item in payload["tree"]:
        data = base64.b64decode(item["data"])
        if digest(data) != item["sha256"]:
            raise Refused(f"the file {item['path']} arrived damaged", "try again")
        files[safe(item["path"])] = data
    for name in (payload["adapter"], payload["scenario"], payload["release_id"] or "none", payload["plan"]["version"]):
        if "/" in safe(name):
            raise Refused(f"{name!r} is no plain name")
    for path in (payload["plan"]["program"], *payload["seeds"]):
        safe(path)
    safe(payload["launch"]["config"])
    return files


def install(payload: Mapping[str, Any], pyz: bytes, environment: dict[str, str], say: Any) -> Path:
    """Install or update; returns the wrapper's path."""
    files = check(payload)
    place = Place(base_folder(environment), payload["adapter"], payload["scenario"])
    plan = payload["plan"]
    agent.preflight(plan, environment)
    wrapper = _wrapper_path(place, payload, bin_folder(environment))
    _check_requirements(place, payload, environment, wrapper.name)
    token = environment.get("REEF_TOKEN", "")
    if any(char in token for char in "\r\n"):
        raise Refused("REEF_TOKEN holds a line break")
    first = not place.spec.exists()
    try:
        changed = _apply(payload, place, wrapper, pyz, files, environment, say)
    except BaseException:
        if first:
            uninstall(place, lambda _: None)
        raise
    sync.seed(place, payload["launch"]["config"], payload["seeds"])
    kept = sync.sync(place, payload["launch"]["config"], payload["drift"])
    _tell(payload, place, wrapper, changed, kept, token, environment, say)
    return wrapper


def _apply(
    payload: Mapping[str, Any],
    place: Place,
    wrapper: Path,
    pyz: bytes,
    files: Mapping[str, bytes],
    environment: Mapping[str, str],
    say: Any,
) -> bool:
    """Write what is not there yet, `install.json` last; True when anything was written."""
    token = environment.get("REEF_TOKEN", "")
    owned = _Owned(place)
    owned.folder(place.root)
    with locked(place.adapter / "lock"):
        changed = agent.ensure(place, payload["plan"], payload.get("bundled", {}), environment, say)
        changed |= put(place.client, pyz, 0o644)
        name, written = _put_tree(place, payload["tree"], files)
        changed |= written
        if token:
            changed |= put(place.token, (token + "\n").encode(), 0o600)
        spec: dict[str, Any] = {key: value for key, value in payload.items() if key not in ("tree", "bundled")}
        spec.update(wrapper=str(wrapper), tree_name=name)
        owned.folder(wrapper.parent)
        changed |= _put_wrapper(wrapper, place)
        if get_json(place.spec) != spec:
            changed |= put_json(place.spec, spec)
        _drop_other_trees(place, name)
    return changed


def uninstall(place: Place, say: Any) -> None:
    """Remove this scenario's installation, and with the last one the agent and every folder that was made for it."""
    spec = get_json(place.spec, {})
    owned = get_json(place.owned, {"folders": [], "wrappers": []})
    wrapper = Path(spec.get("wrapper", "/nonexistent"))
    if wrapper.is_file() and MARKER in wrapper.read_text(errors="replace"):
        wrapper.unlink()
    shutil.rmtree(place.root, ignore_errors=True)
    rest = place.root.parent
    if rest.is_dir() and any(rest.iterdir()):
        say(f"removed scenario {place.root.name}; others remain")
        return
    shutil.rmtree(place.adapter, ignore_errors=True)
    for folder in sorted(map(Path, owned["folders"]), key=lambda item: len(item.parts), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    say(f"removed {place.adapter.name}")


class _Owned:
    """Notes the folders that did not exist before, so that they can go when they are empty again."""

    def __init__(self, place: Place) -> None:
        self.path = place.owned
        self.place = place

    def folder(self, folder: Path) -> None:
        missing = []
        while not folder.exists():
            missing.append(str(folder))
            folder = folder.parent
        if not missing:
            return
        Path(missing[0]).mkdir(parents=True, exist_ok=True)
        outside = [item for item in missing if self.place.adapter not in Path(item).parents]
        known = get_json(self.path, {"folders": []})
        known["folders"] = sorted({*known["folders"], *outside})
        put_json(self.path, known)


def _check_requirements(place: Place, payload: Mapping[str, Any], environment: Mapping[str, str], wrapper: str) -> None:
    missing = requires.unmet(
        payload.get("requires", ()), environment, [*get_json(place.setup, []), *environment.get("REEF_SETUP", "").split("\n")]
    )
    if missing:
        older = payload.get("needs_nothing")
        hint = f"\n  release {older} needs nothing; install it with release_id={older}" if older else ""
        words = requires.explain(missing, wrapper)
        how = "\n  before the first install, confirm services and permissions with REEF_SETUP='kind name'"
        raise Refused(
            f"this release needs something this machine lacks; nothing was written\n{words}{hint}", how.strip(), requires.EXIT
        )


def _put_tree(place: Place, items: Any, files: Mapping[str, bytes]) -> tuple[str, bool]:
    """Write the released files into a folder named after them; returns the name, and whether it had to be written."""
    wanted = {item["path"]: (digest(files[item["path"]]), bool(item["executable"])) for item in items}
    name = digest(repr(sorted(wanted.items())).encode())[:16]
    folder = place.trees / name
    present = {path: (file_digest(full), bool(full.stat().st_mode & 0o100)) for path, full in sync.pristine(folder).items()}
    if wanted == present and folder.is_dir():
        return name, False
    fresh = place.trees / f"{name}.new"
    for stale in (fresh, folder):
        shutil.rmtree(stale, ignore_errors=True)
    fresh.mkdir(parents=True)
    for path, data in files.items():
        put(inside(fresh, path), data, 0o755 if wanted[path][1] else 0o644)
    fresh.replace(folder)
    return name, True


def _drop_other_trees(place: Place, name: str) -> None:
    for folder in place.trees.iterdir():
        if folder.name != name:
            shutil.rmtree(folder, ignore_errors=True)


def _wrapper_path(place: Place, payload: Mapping[str, Any], folder: Path) -> Path:
    """`reef-<adapter>`, or with the scenario's name behind it when that one belongs to another scenario or person."""
    known = get_json(place.spec, {}).get("wrapper")
    if known:
        return Path(known)
    plain = folder / f"reef-{payload['adapter']}"
    named = folder / f"reef-{payload['adapter']}-{payload['scenario']}"
    for path in (plain, named):
        if not path.exists() and not path.is_symlink():
            return path
        if path.is_file() and str(place.root) in path.read_text(errors="replace"):
            return path
    raise Refused(f"{named} exists and is not Reef's", "move it away, or set REEF_BIN_DIR")


def _put_wrapper(path: Path, place: Place) -> bool:
    text = f"""#!/bin/sh
{MARKER}
client={shlex.quote(str(place.client))}
root={shlex.quote(str(place.root))}
for python in {shlex.quote(agent.python())} python3 python; do
  if command -v "$python" >/dev/null 2>&1; then
    exec "$python" -I "$client" --root "$root" "$@"
  fi
done
echo "reef: no Python found; install python3" >&2
exit 127
"""
    return put(path, text.encode(), 0o755)


def _tell(
    payload: Mapping[str, Any],
    place: Place,
    wrapper: Path,
    changed: bool,
    kept: list[str],
    token: str,
    environment: Mapping[str, str],
    say: Any,
) -> None:
    state = "installed" if changed else "is up to date"
    what = f"{payload['title']} {payload['plan']['version']} with release {payload['release_id'] or 'none'}"
    say(f"{what} of {payload['scenario']} {state}")
    if changed and payload.get("changed"):
        say(f"What changed: {payload['changed']}")
    for path in kept:
        say(f"kept your own {path}; the release's version is {place.tree / path}")
    if not token and not place.token.exists():
        say(f"no token: set REEF_TOKEN, or write it into {place.token} (mode 0600)")
    if str(wrapper.parent) not in environment.get("PATH", "").split(os.pathsep):
        say(f"{wrapper.parent} is not on PATH; start it as {wrapper}")
    say(f"start it with: {wrapper.name}")
