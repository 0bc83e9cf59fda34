"""From tree to files: what an agent finds in its config directory, plus environment and arguments of its start.

Pure: the same tree and version give the same bytes. What an agent cannot take is listed in `skipped` with the reason, and
`admit` refuses a tree for an adapter when something would be skipped that was meant for it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.harness import formats, paths
from reef_cli.harness.adapter import Adapter, version_key
from reef_cli.harness.files import TreeFile
from reef_cli.harness.tree import Entry, Tree

_POSITIONAL = re.compile(r"\$(\d)")
_FORBIDDEN_ENV = re.compile(
    r"^(?:PATH|HOME|SHELL|IFS|ENV|BASH_ENV|LD_.*|DYLD_.*|PYTHON.*|NODE_OPTIONS|(?:HTTPS?|ALL|NO)_PROXY|REEF_.*)$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry that has no place in this agent."""

    id: str
    reason: str


@dataclass(slots=True)
class Rendered:
    """Files relative to the config directory, environment and extra arguments; no endpoint and no token."""

    files: dict[str, TreeFile] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, entry: Entry, reason: str) -> None:
        self.skipped.append(Skipped(entry.id, reason))


def render(adapter: Adapter, tree: Tree, version: str | None = None, model: str = "default") -> Rendered:
    """All files of `tree` for one pinned version of an agent. `model` is the name the agent shall ask for; some agents want it
    in their settings. Raises `UnsupportedArtifact` when two entries want one file."""
    chosen = adapter.version(version)
    out = Rendered()
    for target, value in adapter.descriptor.base.items():
        _merge_document(out, target, _named(value, model))
    for entry in tree:
        if not entry.config.get("disabled"):
            _place(adapter, entry, chosen, out)
    for path, parts in out.texts.items():
        _put(out, path, TreeFile("\n".join(part if part.endswith("\n") else part + "\n" for part in parts).encode()))
    finish = adapter.hook("finish")
    if finish is not None:
        finish(out, tree)
    for target, document in out.documents.items():
        place = adapter.descriptor.kinds["config"][target]
        _put(out, place["path"], TreeFile(formats.dump(place["format"], document)))
    for path, source in adapter.descriptor.files.items():
        _put(out, path, TreeFile((adapter.folder / source).read_bytes()))
    paths.check_all(out.files, adapter.name)
    return out


def admit(adapter: Adapter, tree: Tree, version: str | None = None, model: str = "default") -> Rendered:
    """`render`, refusing what this agent would silently lack; code for other agents does not count."""
    out = render(adapter, tree, version, model)
    meant = [item for item in out.skipped if item.reason != "for another agent"]
    if meant:
        raise UnsupportedArtifact(f"{adapter.name} cannot take the entry {meant[0].id!r}", why=meant[0].reason)
    return out


def _named(value: Any, model: str) -> Any:
    if isinstance(value, str):
        return value.replace("{model}", model)
    if isinstance(value, Mapping):
        return {_named(key, model): _named(inner, model) for key, inner in value.items()}
    return [_named(item, model) for item in value] if isinstance(value, list) else value


def _place(adapter: Adapter, entry: Entry, version: str, out: Rendered) -> None:
    place = adapter.descriptor.kinds.get(entry.kind)
    if entry.kind == "extension" and entry.config["adapter"] != adapter.name:
        return out.skip(entry, "for another agent")
    if not place:
        return out.skip(entry, f"{adapter.name} has no place for entries of kind {entry.kind}")
    if version_key(str(place.get("since", "0"))) > version_key(version):
        return out.skip(entry, f"{adapter.name} takes {entry.kind} entries since {place['since']}, this is {version}")
    if entry.id == "reef" or entry.id.startswith("reef-"):
        return out.skip(entry, "ids that start with reef- are Reef's own")
    return _PLACERS[entry.kind](adapter, entry, place, out)


def _put(out: Rendered, path: str, file: TreeFile) -> None:
    if path in out.files:
        raise UnsupportedArtifact(f"two entries want the file {path!r}", hint="rename one of them")
    out.files[path] = file


def _merge_document(out: Rendered, target: str, value: Mapping[str, Any]) -> None:
    out.documents[target] = formats.merged(out.documents.get(target, {}), value)


def _config(adapter: Adapter, entry: Entry, place: Mapping[str, Any], out: Rendered) -> None:
    target, value = entry.config["target"], entry.config["value"]
    reserved = set(adapter.descriptor.reserved.get(target, ()))
    taken = sorted(reserved & set(value))
    if taken:
        raise UnsupportedArtifact(f"entry {entry.id!r} sets {taken[0]!r} of {adapter.name}", why="it belongs to Reef's binding")
    if target == "env":
        bad = [name for name in value if _FORBIDDEN_ENV.match(name) or name in adapter.descriptor.launch.get("env", {})]
        if bad:
            raise UnsupportedArtifact(
                f"entry {entry.id!r} sets the variable {bad[0]}", why="it belongs to the system or to Reef's binding"
            )
        out.env.update(value)
    elif target not in place:
        out.skip(entry, f"{adapter.name} has no config target {target}; it has {', '.join(place)}")
    else:
        _merge_document(out, target, value)


def _rules(_adapter: Adapter, entry: Entry, place: Mapping[str, Any], out: Rendered) -> None:
    out.texts.setdefault(place["path"], []).append(entry.text)


def _system(adapter: Adapter, entry: Entry, place: Mapping[str, Any], out: Rendered) -> None:
    mode = entry.config["mode"]
    if f"{mode}_argument" in place:
        out.args.extend([place[f"{mode}_argument"], entry.text])
    elif mode in place:
        out.texts.setdefault(place[mode], []).append(entry.text)
    else:
        out.skip(entry, f"{adapter.name} cannot {mode} its system prompt")


def _skill(_adapter: Adapter, entry: Entry, place: Mapping[str, Any], out: Rendered) -> None:
    folder = place["path"].format(id=entry.id)
    config = entry.config
    fields: dict[str, Any] = {"name": entry.id, "description": config["description"]}
    fields |= {key: config[key] for key in ("license", "compatibility", "metadata") if config.get(key)}
    if config.get("allowed_tools"):
        fields["allowed-tools"] = " ".join(config["allowed_tools"])
    if config.get("hidden"):
        fields["disable-model-invocation"] = True
    _put(out, f"{folder}/SKILL.md", TreeFile(formats.front_matter(fields, entry.text)))
    for path, file in entry.extra.items():
        _put(out, f"{folder}/{path}", file)


def _command(_adapter: Adapter, entry: Entry, place: Mapping[str, Any], out: Rendered) -> None:
    text = entry.text
    if place.get("arguments") == "zero-based":
        text = _POSITIONAL.sub(lambda match: f"${int(match[1]) - 1}" if match[1] != "0" else match[0], text)
    described = entry.config.get("description") or f"The command {entry.id}"
    fields: dict[str, Any] = {"description": described}
    if place.get("as") == "skill":
        fields = {"name": entry.id, "description": described}
    elif entry.config.get("argument_hint"):
        fields["argument-hint"] = entry.config["argument_hint"]
    _put(out, place["path"].format(id=entry.id), TreeFile(formats.front_matter(fields, text)))


def _agent(_adapter: Adapter, entry: Entry, place: Mapping[str, Any], out: Rendered) -> None:
    fields: dict[str, Any] = {"name": entry.id, "description": entry.config["description"], **place.get("fields", {})}
    if entry.config.get("tools") and place.get("tools", True):
        fields["tools"] = ", ".join(entry.config["tools"])
    _put(out, place["path"].format(id=entry.id), TreeFile(formats.front_matter(fields, entry.text)))


def _mcp(adapter: Adapter, entry: Entry, place: Mapping[str, Any], out: Rendered) -> None:
    keys = ("command", "args", "env", "url", "headers")
    server = {key: entry.config[key] for key in keys if entry.config.get(key)}
    shape = adapter.hook("mcp_server")
    _merge_document(out, place["target"], {place["key"]: {entry.id: shape(server) if shape else server}})


def _extension(adapter: Adapter, entry: Entry, place: Mapping[str, Any], out: Rendered) -> None:
    suffix = entry.config["suffix"]
    if suffix not in place["suffixes"]:
        return out.skip(entry, f"{adapter.name} loads {', '.join(place['suffixes'])} files")
    if not entry.extra:
        return _put(out, place["path"].format(id=entry.id, suffix=suffix), TreeFile(entry.text.encode()))
    if "folder" not in place:
        return out.skip(entry, f"{adapter.name} loads single files only")
    folder = place["folder"].format(id=entry.id)
    _put(out, f"{folder}/index.{suffix}", TreeFile(entry.text.encode()))
    for path, file in entry.extra.items():
        _put(out, f"{folder}/{path}", file)
    return None


_PLACERS = {
    "config": _config,
    "rules": _rules,
    "system": _system,
    "skill": _skill,
    "command": _command,
    "agent": _agent,
    "mcp": _mcp,
    "extension": _extension,
}
