"""Installing on this machine or another: the payload of a release, the shell script that carries it, and running it here.

`reef harness install` and `curl … | bash` run the very same script, so they cannot differ. The script is one braced group: cut
at any byte it does nothing. It holds no token; the payload names files relative to their folder and digests of each.
"""

import base64
import hashlib
import io
import json
import os
import subprocess
import textwrap
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from reef_cli.core.errors import InstallFailed
from reef_cli.harness.adapter import Adapter
from reef_cli.harness.client.store import Place, base_folder, get_json
from reef_cli.harness.merge import Mutation, diff, mutations
from reef_cli.harness.render import Rendered, admit
from reef_cli.harness.resources import PACKAGE, template
from reef_cli.harness.tree import Tree
from reef_cli.harness.tree import read as read_tree
from reef_cli.harness.tree import write as write_tree

_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ReleaseFacts:
    """What an installation says about the release it came from. `release_id` None: no release yet, an empty tree."""

    scenario: str
    release_id: str | None = None
    content_id: str | None = None
    step: int | None = None
    changed: str = ""
    needs_nothing: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What the installed agent talks to: the gateway's address as its user reaches it, and the model's name."""

    gateway: str
    model: str = "default"
    version: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def launch_spec(adapter: Adapter, rendered: Rendered) -> dict[str, Any]:
    """The launch templates with what the tree adds; shared by installations and episodes."""
    launch = adapter.descriptor.launch
    return {
        "interactive": launch["interactive"],
        "headless": launch["headless"],
        "env": dict(launch.get("env", {})),
        "args": rendered.args,
        "tree_env": rendered.env,
        "config": adapter.descriptor.config["dir"],
        "config_env": adapter.descriptor.config["env"],
    }


def payload(adapter: Adapter, tree: Tree, facts: ReleaseFacts, target: Target) -> dict[str, Any]:
    """Everything an installation needs, JSON-safe. Raises `UnsupportedArtifact` when the agent cannot take the tree."""
    rendered = admit(adapter, tree, target.version, target.model)
    plan = adapter.plan(target.version)
    files = [
        {
            "path": path,
            "data": base64.b64encode(file.data).decode(),
            "executable": file.executable,
            "sha256": hashlib.sha256(file.data).hexdigest(),
        }
        for path, file in sorted(rendered.files.items())
    ]
    return {
        "format": 1,
        "adapter": adapter.name,
        "title": adapter.descriptor.title,
        "gateway": target.gateway,
        "model": target.model,
        "plan": asdict(plan),
        "launch": launch_spec(adapter, rendered),
        "drift": dict(adapter.descriptor.drift),
        "notice": adapter.descriptor.notice,
        "seeds": {path: base64.b64encode(data).decode() for path, data in adapter.seeds().items()},
        "requires": tree.requires,
        "tree": files,
        "bundled": {plan.package: base64.b64encode(bundle(plan.package)).decode()} if plan.manager == "bundled" else {},
        **asdict(facts),
    }


def script(content: Mapping[str, Any]) -> str:
    """The POSIX shell script that installs a payload."""
    packed = {"client": base64.b64encode(bundle("client")).decode(), "payload": content}
    data = base64.b64encode(zlib.compress(json.dumps(packed, sort_keys=True).encode(), 9)).decode()
    text = template("install", "install.sh")
    title = "".join(char for char in str(content["title"]) if char.isprintable())
    for name, value in (
        ("TITLE", title),
        ("BOOTSTRAP", template("install", "bootstrap.py").rstrip("\n")),
        ("BUNDLE", "\n".join(textwrap.wrap(data, 120))),
    ):
        text = text.replace(f"@{name}@", value)
    return text


def local_install(content: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> str:
    """Install here, by running the script; returns what it said. Raises `InstallFailed` with its last words."""
    done = subprocess.run(
        ["/bin/sh"],
        input=script(content).encode(),
        env=dict(os.environ if environment is None else environment),
        capture_output=True,
        check=False,
    )
    said = done.stderr.decode(errors="replace")
    if done.returncode != 0:
        raise InstallFailed(said.strip().removeprefix("reef: ") or "the install script failed", status=done.returncode)
    return said


@dataclass(frozen=True, slots=True)
class Installation:
    """One installed scenario of one agent on this machine."""

    adapter: str
    scenario: str
    release_id: str | None
    version: str
    gateway: str
    wrapper: str
    root: Path


def installed(environment: Mapping[str, str] | None = None) -> list[Installation]:
    """What is installed on this machine, by adapter and scenario."""
    base = base_folder(dict(os.environ if environment is None else environment))
    found = []
    for path in sorted(base.glob("*/scenarios/*/install.json")):
        spec = get_json(path)
        if isinstance(spec, dict) and spec.get("format") == 1:
            found.append(
                Installation(
                    spec["adapter"],
                    spec["scenario"],
                    spec["release_id"],
                    spec["plan"]["version"],
                    spec["gateway"],
                    spec["wrapper"],
                    path.parent,
                )
            )
    return found


def run_client(
    item: Installation, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One of the wrapper's own commands (update, uninstall, doctor, diff, report, …) for an installation."""
    return subprocess.run(
        [item.wrapper, *arguments],
        env=dict(os.environ if environment is None else environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def pull(entries: Sequence[Mapping[str, Any]], directory: Path) -> Tree:
    """Write the tree of a manifest (`GET /reef/harness`) as a canonical folder, to read or to edit; returns it.

    Raises `UnsupportedArtifact` when the folder is not empty, or the entries are unsound.
    """
    tree = Tree.of(entries)
    write_tree(tree, directory)
    return tree


def compare(entries: Sequence[Mapping[str, Any]], directory: Path) -> list[Mutation]:
    """The mutations that lead from a manifest's tree to an edited folder: what a proposal of that folder would say."""
    return mutations(diff(Tree.of(entries), read_tree(directory)))


def place_of(item: Installation) -> Place:
    """The folders of an installation."""
    return Place(item.root.parent.parent.parent, item.adapter, item.scenario)


@cache
def bundle(name: str) -> bytes:
    """The Python archive of `client` or `native`: the same bytes for the same sources."""
    package = f"reef_{name}"
    entry = f"import sys\nfrom {package}.__main__ import main\n\nsys.exit(main(sys.argv[1:]))\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), entry)
        for path in sorted((PACKAGE / "harness" / name).glob("*.py")):
            archive.writestr(zipfile.ZipInfo(f"{package}/{path.name}", _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return out.getvalue()
