"""`serve.yaml` read strictly: duplicate keys refused with both lines, every value with its line, errors with line and column.

PyYAML's resolver follows YAML 1.1, where `1e-4` is a string; here it is a number, as in YAML 1.2 and as people mean it.
Aliases and merge keys work; an alias that contains itself is refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from reef_cli.config.sources import Entry, Leaves
from reef_cli.core.errors import ConfigError, UsageError

_MERGE, _NULL = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:null"
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MOST_NODES = 10_000


class _Loader(yaml.SafeLoader):
    """SafeLoader whose plain scalars follow YAML 1.2 where the two versions disagree on numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A file's leaves, and the sections it names (also empty ones)."""

    leaves: Leaves
    sections: dict[str, str]


def read_yaml(path: Path) -> Document:
    """Read a file; a missing one is a usage error that names it, malformed YAML a `ConfigError` with the place."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"no config file {path}", why=f"looked in {path.absolute().parent}", hint="give -c PATH") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", why=str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}", why=error.strerror or str(error)) from error
    return parse_yaml(text, str(path))


def read_scalar(text: str) -> Any:
    """One value written in a flag or variable, read as the file would be."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError("malformed YAML", why=" ".join(str(error).split())) from error


def parse_yaml(text: str, name: str) -> Document:
    """The document in `text`; `name` is how errors and origins call it."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _NULL):
            return Document({}, {})
        return _document(_Walk(loader, name), root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        why = error.problem or error.context or "malformed"
        raise ConfigError(f"{where} is not valid YAML", why=why, hint="check indentation and quotes there") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML", why=" ".join(str(error).split())) from error


def _document(walk: "_Walk", root: yaml.Node) -> Document:
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{walk.where(root)} holds no sections",
            why="the top of the file must be a mapping",
            hint="start with a line `reef:`",
        )
    leaves: Leaves = {}
    sections: dict[str, str] = {}
    for section, node in walk.guarded(root):
        sections[section] = walk.where(node)
        if isinstance(node, yaml.ScalarNode) and walk.scalar(node) is None:
            continue
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{walk.where(node)}: section {section!r} must hold keys", hint=f"indent them below `{section}:`")
        for path, entry in walk.leaves(node, (section,)):
            leaves[path] = entry
    return Document(leaves, sections)


class _Walk:
    """Nodes turned into values, with duplicate keys and cycles refused."""

    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self._loader = loader
        self._name = name
        self._open: set[int] = set()
        self._visits = 0

    def where(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"

    def scalar(self, node: yaml.ScalarNode) -> Any:
        return self._loader.construct_object(node)

    def pairs(self, node: yaml.MappingNode) -> list[tuple[str, yaml.Node]]:
        """Keys in order, merge keys applied below the mapping's own; `ConfigError` names both lines of a duplicate."""
        own: dict[str, yaml.Node] = {}
        lines: dict[str, int] = {}
        merged: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            if key_node.tag == _MERGE:
                merged = {**self._merge(value), **merged}
                continue
            key = self._key(key_node)
            line = key_node.start_mark.line + 1
            if key in own:
                raise ConfigError(
                    f"{self._name}: key {key!r} is given twice",
                    why=f"on line {lines[key]} and on line {line}",
                    hint="keep one of them",
                )
            own[key], lines[key] = value, line
        return list({**merged, **own}.items())

    def _merge(self, value: yaml.Node) -> dict[str, yaml.Node]:
        if isinstance(value, yaml.MappingNode):
            return dict(self.guarded(value))
        if isinstance(value, yaml.SequenceNode):
            return {key: node for part in reversed(value.value) for key, node in self._merge(part).items()}
        raise ConfigError(f"{self.where(value)}: `<<` takes a mapping")

    def guarded(self, node: yaml.MappingNode) -> list[tuple[str, yaml.Node]]:
        """`pairs` of a mapping that is entered here."""
        self._enter(node)
        try:
            return self.pairs(node)
        finally:
            self._open.discard(id(node))

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            raise ConfigError(f"{self.where(node)}: keys must be plain words")
        return str(node.value)

    def leaves(self, node: yaml.MappingNode, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Entry]]:
        """Every leaf below a mapping with its path; lists are leaves, an empty mapping is a leaf."""
        self._enter(node)
        for key, value in self.pairs(node):
            path = (*above, key)
            if isinstance(value, yaml.MappingNode) and value.value:
                yield from self.leaves(value, path)
            else:
                yield path, Entry(self._value(value), self.where(value))
        self._open.discard(id(node))

    def _value(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        self._enter(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self._value(item) for item in node.value]
            assert isinstance(node, yaml.MappingNode)
            return {key: self._value(value) for key, value in self.pairs(node)}
        finally:
            self._open.discard(id(node))

    def _enter(self, node: yaml.Node) -> None:
        if id(node) in self._open:
            raise ConfigError(f"{self.where(node)}: an alias contains itself")
        if node.tag not in _COLLECTIONS:
            raise ConfigError(f"{self.where(node)}: the tag {node.tag} is not understood", hint="leave the tag out")
        self._visits += 1
        if self._visits > _MOST_NODES:
            raise ConfigError(f"{self.where(node)}: aliases expand to more than {_MOST_NODES} nodes")
        self._open.add(id(node))
