"""The rules every entry obeys, per kind, applied before anything is stored, rendered or mounted.

Skills follow the Agent Skills specification (name, description, sizes). Structured text must parse. Names cannot leave their
folder and credentials are refused. A message names the entry, the rule and what to do; the result is the canonical entry.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.harness import credentials, files, paths
from reef_cli.harness.tree import KINDS, MAX_ENTRIES, Entry, Tree

_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_TARGET = re.compile(r"[a-z][a-z0-9-]{0,31}")
_SUFFIX = re.compile(r"[a-z0-9]{1,8}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
COMMON = {"uses", "requires", "disabled"}
REQUIREMENT_KINDS = ("env", "service", "permission", "program")


class Broken(Exception):
    """A rule is broken; turned into `UnsupportedArtifact` with the entry's name."""


def checked_tree(entries: Sequence[Entry]) -> Tree:
    """The canonical tree, or `UnsupportedArtifact`."""
    if len(entries) > MAX_ENTRIES:
        raise UnsupportedArtifact(f"a tree holds at most {MAX_ENTRIES} entries", why=f"this one has {len(entries)}")
    tree = Tree(tuple(checked_entry(entry) for entry in entries))
    known = [entry.id for entry in tree]
    twice = sorted({name for name in known if known.count(name) > 1})
    if twice:
        raise UnsupportedArtifact(f"two entries have the id {twice[0]!r}", hint="ids are unique in a tree, whatever the kind")
    _check_uses(tree)
    size = sum(len(entry.text) + sum(len(file.data) for file in entry.extra.values()) for entry in tree)
    if size > files.MAX_TOTAL:
        raise UnsupportedArtifact(f"the tree holds {size} bytes", why=f"the limit is {files.MAX_TOTAL}")
    return tree


def checked_entry(entry: Entry) -> Entry:
    """One canonical entry, or `UnsupportedArtifact`."""
    where = f"entry {entry.id!r} ({entry.kind})"
    try:
        if not _ID.fullmatch(entry.id) or len(entry.id) > 64:
            raise Broken("an id is 1 to 64 of a-z, 0-9 and single hyphens between them")
        config = dict(entry.config)
        _common(config)
        config = _RULES[entry.kind](config)
        json.dumps(config, allow_nan=False)
    except (Broken, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, UnsupportedArtifact):
            raise
        raise UnsupportedArtifact(f"{where} is refused", why=str(error)) from error
    credentials.refuse(config, where)
    return Entry(entry.id, entry.kind, config)


def _common(config: dict[str, Any]) -> None:
    uses = config.get("uses", [])
    if not isinstance(uses, list) or not all(isinstance(item, str) for item in uses):
        raise Broken("uses is a list of entry ids")
    if not isinstance(config.get("disabled", False), bool):
        raise Broken("disabled is true or false")
    items = config.get("requires", [])
    if not isinstance(items, list) or len(items) > 8:
        raise Broken("requires is a list of at most 8 items")
    for item in items:
        if not isinstance(item, dict) or set(item) - {"kind", "name", "reason"} or item.get("kind") not in REQUIREMENT_KINDS:
            raise Broken(f"a requirement is {{kind, name, reason?}} with kind one of {', '.join(REQUIREMENT_KINDS)}")
        name = item.get("name")
        if not isinstance(name, str) or not name or len(name) > 200 or any(ord(char) < 32 for char in name):
            raise Broken("a requirement needs a name of at most 200 printable characters")
        if item["kind"] == "env" and not _VARIABLE.fullmatch(name):
            raise Broken(f"{name!r} is not the name of an environment variable")
    for key in ("uses", "requires", "disabled"):
        if key in config and not config[key]:
            del config[key]


def _only(config: Mapping[str, Any], *allowed: str) -> None:
    unknown = set(config) - set(allowed) - COMMON
    if unknown:
        raise Broken(f"unknown keys {sorted(unknown)}; known are {', '.join(sorted({*allowed, *COMMON}))}")


def _string(config: Mapping[str, Any], key: str, limit: int, required: bool = True) -> None:
    value = config.get(key)
    if value is None and not required and key not in config:
        return
    if not isinstance(value, str) or (required and not value.strip()):
        raise Broken(f"{key} must be {'non-empty ' if required else ''}text")
    if len(value) > limit:
        raise Broken(f"{key} is longer than {limit} characters")
    if "\x00" in value:
        raise Broken(f"{key} holds a NUL character")
    value.encode()


def _files(config: dict[str, Any]) -> None:
    raw = config.get("files", {})
    if not isinstance(raw, Mapping):
        raise Broken("files maps paths to contents")
    paths.check_all(raw)
    parsed = {path: files.parse(path, body) for path, body in raw.items()}
    for path, file in parsed.items():
        if len(file.data) > files.MAX_FILE:
            raise Broken(f"{path} is larger than {files.MAX_FILE} bytes")
        if path.endswith((".json", ".toml", ".yaml", ".yml")):
            parse_text(path.rsplit(".", 1)[1], file.data.decode(errors="replace"), path)
    config.pop("files", None)
    if parsed:
        config["files"] = {path: files.wire(parsed[path]) for path in sorted(parsed)}


def parse_text(form: str, text: str, where: str) -> Any:
    """Structured text in JSON, TOML or YAML; `Broken` with the parser's words when it does not parse."""
    try:
        if form == "json":
            return json.loads(text)
        if form == "toml":
            return tomllib.loads(text)
        return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise Broken(f"{where} is not {form.upper()}: {str(error).splitlines()[0]}") from error


def _config(config: dict[str, Any]) -> dict[str, Any]:
    _only(config, "target", "value", "text", "format")
    config.setdefault("target", "primary")
    if not isinstance(config["target"], str) or not _TARGET.fullmatch(config["target"]):
        raise Broken("target is a short lower-case word such as primary or env")
    if "text" in config:
        form = config.pop("format", "json")
        if form not in ("json", "toml", "yaml") or "value" in config:
            raise Broken("give either value, or text with format json, toml or yaml")
        config["value"] = parse_text(form, config.pop("text"), "text")
    if not isinstance(config.get("value"), dict):
        raise Broken("value must be an object")
    if config["target"] == "env":
        for name, value in config["value"].items():
            if not _VARIABLE.fullmatch(name) or not isinstance(value, str):
                raise Broken("env maps variable names to text")
    return config


def _rules(config: dict[str, Any]) -> dict[str, Any]:
    _only(config, "text")
    _string(config, "text", 64_000)
    return config


def _system(config: dict[str, Any]) -> dict[str, Any]:
    _only(config, "text", "mode")
    _string(config, "text", 64_000)
    config.setdefault("mode", "append")
    if config["mode"] not in ("append", "replace"):
        raise Broken("mode is append or replace")
    return config


def _skill(config: dict[str, Any]) -> dict[str, Any]:
    _only(config, "description", "text", "license", "compatibility", "metadata", "allowed_tools", "hidden", "files")
    _string(config, "description", 1024)
    _string(config, "text", 64_000)
    _string(config, "license", 200, required=False)
    _string(config, "compatibility", 500, required=False)
    metadata = config.get("metadata", {})
    if not isinstance(metadata, Mapping) or not all(isinstance(part, str) for pair in metadata.items() for part in pair):
        raise Broken("metadata maps text to text")
    tools = config.get("allowed_tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, str) for tool in tools):
        raise Broken("allowed_tools is a list of tool names")
    if not isinstance(config.get("hidden", False), bool):
        raise Broken("hidden is true or false")
    _files(config)
    if any(path.lower() == "skill.md" for path in config.get("files", {})):
        raise Broken("SKILL.md is made from description and text")
    if config["text"].lstrip().startswith("---"):
        raise Broken("text starts with front matter; put name and description into the entry")
    return config


def _command(config: dict[str, Any]) -> dict[str, Any]:
    _only(config, "description", "text", "argument_hint")
    _string(config, "text", 64_000)
    _string(config, "description", 1024, required=False)
    _string(config, "argument_hint", 200, required=False)
    return config


def _agent(config: dict[str, Any]) -> dict[str, Any]:
    _only(config, "description", "text", "tools")
    _string(config, "description", 1024)
    _string(config, "text", 64_000)
    if not all(isinstance(tool, str) for tool in config.get("tools", [])):
        raise Broken("tools is a list of tool names")
    return config


def _mcp(config: dict[str, Any]) -> dict[str, Any]:
    _only(config, "command", "args", "env", "url", "headers")
    if ("command" in config) == ("url" in config):
        raise Broken("give either command or url")
    for key in ("command", "url"):
        _string(config, key, 2000, required=False)
    command = config.get("command", "")
    if command.startswith(("/", "~")) or ".." in command.split("/"):
        raise Broken("command is a program name found on PATH, never an absolute path")
    for item in config.get("args", []):
        if not isinstance(item, str) or item.startswith("/") or ".." in item.split("/"):
            raise Broken("args are texts and hold no absolute or parent paths")
    for key in ("env", "headers"):
        if not all(isinstance(part, str) for pair in dict(config.get(key, {})).items() for part in pair):
            raise Broken(f"{key} maps text to text")
    return config


def _extension(config: dict[str, Any]) -> dict[str, Any]:
    _only(config, "adapter", "suffix", "text", "files")
    if not isinstance(config.get("adapter"), str) or not _ID.fullmatch(config["adapter"]):
        raise Broken("adapter names the agent this code is for")
    if not isinstance(config.get("suffix"), str) or not _SUFFIX.fullmatch(config["suffix"]):
        raise Broken("suffix is the code's file ending, such as ts or js")
    _string(config, "text", 256_000)
    _files(config)
    return config


def _check_uses(tree: Tree) -> None:
    uses = {entry.id: list(entry.config.get("uses", ())) for entry in tree}
    for name, wanted in uses.items():
        for other in wanted:
            if other not in uses:
                raise UnsupportedArtifact(f"entry {name!r} uses {other!r}", why="no entry has that id")
    done: set[str] = set()

    def visit(name: str, road: tuple[str, ...]) -> None:
        if name in road:
            raise UnsupportedArtifact(f"entries use each other in a circle: {' -> '.join((*road, name))}")
        if name not in done:
            for other in uses[name]:
                visit(other, (*road, name))
            done.add(name)

    for name in uses:
        visit(name, ())


_RULES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "config": _config,
    "rules": _rules,
    "system": _system,
    "skill": _skill,
    "command": _command,
    "agent": _agent,
    "mcp": _mcp,
    "extension": _extension,
}
assert set(_RULES) == set(KINDS)
