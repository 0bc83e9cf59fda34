"""What every adapter must do, as one function: the project's tests run it on each folder, authors of others on theirs."""

import json
import tempfile
import tomllib
from pathlib import Path

import yaml

from reef_cli.harness import files, paths
from reef_cli.harness.adapter import Adapter
from reef_cli.harness.client import launch
from reef_cli.harness.install import launch_spec
from reef_cli.harness.render import Rendered, render
from reef_cli.harness.tree import Tree

TRICKY = 'uses: colons, "quotes" and\nlines'
_SECRET = "contract-secret-token"
_PROMPT = 'do {model} $(this) "now"'


def sample(adapter: Adapter) -> Tree:
    """A tree with an entry of every kind."""
    return Tree.of(
        [
            {"id": "house", "kind": "rules", "config": {"text": "First rule."}},
            {"id": "second", "kind": "rules", "config": {"text": "Second rule.\n"}},
            {"id": "tone", "kind": "system", "config": {"text": "Be calm."}},
            {
                "id": "pdf-maker",
                "kind": "skill",
                "config": {
                    "description": TRICKY,
                    "text": "# Do it",
                    "files": {"scripts/go.sh": {"text": "echo", "executable": True}},
                },
            },
            {"id": "greet", "kind": "command", "config": {"description": TRICKY, "text": "Greet $1 and $ARGUMENTS"}},
            {"id": "critic", "kind": "agent", "config": {"description": TRICKY, "text": "Review."}},
            {"id": "search", "kind": "mcp", "config": {"command": "search-server", "args": ["--stdio"], "env": {"K": "${K}"}}},
            {
                "id": "extra",
                "kind": "extension",
                "config": {"adapter": adapter.name, "suffix": "js", "text": "export default function () {}\n"},
            },
            {"id": "settings", "kind": "config", "config": {"value": {"contractKey": {"deep": True}}}},
            {"id": "vars", "kind": "config", "config": {"target": "env", "value": {"CONTRACT_VAR": "1"}}},
        ]
    )


def faults(adapter: Adapter) -> list[str]:
    """What is wrong with an adapter; empty when it keeps the contract."""
    found: list[str] = []
    for version in adapter.descriptor.versions:
        tree = sample(adapter)
        out = render(adapter, tree, version, "some/model")
        again = render(adapter, tree, version, "some/model")
        if out.files != again.files or out.args != again.args:
            found.append(f"{version}: rendering twice gives different bytes")
        found += [f"{version}: {fault}" for fault in (*_files(out), *_placed(adapter, out, tree), *_launch(adapter, out))]
    found += _trajectory(adapter)
    return found


def _files(out: Rendered) -> list[str]:
    found = [f"{path}: {fault}" for path in out.files if (fault := paths.fault(path))]
    for path, file in out.files.items():
        try:
            _parse(path, file.data)
        except ValueError as error:
            found.append(f"{path} does not parse: {error}")
    return found


def _parse(path: str, data: bytes) -> None:
    if path.endswith(".json"):
        json.loads(data)
    elif path.endswith(".toml"):
        tomllib.loads(data.decode())
    elif path.endswith((".yaml", ".yml")):
        yaml.safe_load(data)
    elif data.startswith(b"---\n"):
        fields = yaml.safe_load(data.decode().split("---\n")[1])
        if "description" in fields and fields["description"] != TRICKY:
            raise ValueError("the description does not survive")


def _placed(adapter: Adapter, out: Rendered, tree: Tree) -> list[str]:
    skipped = {item.id for item in out.skipped}
    everything = b"\n".join([*(file.data for file in out.files.values()), *(item.encode() for item in out.args)])
    found = []
    for entry in tree:
        supported = adapter.descriptor.kinds.get(entry.kind)
        if supported is None and entry.id not in skipped:
            found.append(f"{entry.id}: no place for {entry.kind}, yet not reported as skipped")
        probe = {"rules": entry.text.strip(), "system": "Be calm.", "mcp": "search-server"}.get(entry.kind)
        if probe and entry.id not in skipped and probe.encode() not in everything:
            found.append(f"{entry.id}: placed nowhere")
    return found


def _launch(adapter: Adapter, out: Rendered) -> list[str]:
    spec = launch_spec(adapter, out)
    known = launch.values("/c", "/p/agent", "http://127.0.0.1:1", _SECRET, "some/model", "demo", "news")
    argv = launch.arguments(spec, "headless", known, _PROMPT)
    env = launch.environment(spec, known, {"NO_PROXY": "example.org"})
    found = []
    if _PROMPT not in argv:
        found.append("the prompt does not arrive unchanged")
    if any(_SECRET in item for item in argv):
        found.append("the token shows in the arguments")
    if _SECRET not in env.values():
        found.append("the agent gets no token")
    bound = [*argv, *env.values()]
    if not any("http://127.0.0.1:1" in item for item in bound):
        found.append("the agent is not told where the gateway is")
    if env.get(adapter.descriptor.config["env"]) != "/c" or env.get("CONTRACT_VAR") != "1":
        found.append("config directory or the tree's variables are missing")
    if env["NO_PROXY"] != "example.org,127.0.0.1,localhost":
        found.append("loopback is not kept away from HTTP proxies")
    if any(_SECRET.encode() in file.data or b"127.0.0.1" in file.data for file in out.files.values()):
        found.append("endpoint or token in a rendered file")
    return found


def _trajectory(adapter: Adapter) -> list[str]:
    """Readers get by with nothing, with torn files, and with kinds of lines they never saw."""
    with tempfile.TemporaryDirectory() as folder:
        if adapter.read_trajectory(Path(folder)).steps:
            return ["steps out of nothing"]
        for pattern in adapter.descriptor.trajectory.get("paths", ()):
            name = pattern.replace("**/", "deep/").replace("*", "x")
            files.write({name: files.TreeFile(b'{"type": "novel", "message": {}}\n{"torn')}, Path(folder, "t"))
            try:
                adapter.read_trajectory(Path(folder, "t"))
            except Exception as error:  # foreign code: whatever it raises breaks the contract
                return [f"reading an unknown or torn file raises {type(error).__name__}: {error}"]
            break
    return []
