"""Evaluation suites: JSON lines, Harbor task folders, tasksets of `verifiers`, or a dotted path; checked before anything runs.

A line of JSON is one item:

    {"id": "capital-1", "messages": [{"role": "user", "content": "Capital of France?"}],
     "grader": {"kind": "contains", "any": ["Paris"]}, "split": "heldout", "tags": ["facts"], "weight": 1.0,
     "max_new_tokens": 32, "must_not_regress": true}

`split` is `heldout` (the default: what the gate decides by) or `development`. `must_not_regress` marks an anchor. `audit` is a
second grader (a judge, say) that decides nothing: verdicts show where it disagrees with the first. A dotted path
`module:function` returns such objects. Errors name the file and the line. The digest covers every item, so that evidence says
exactly which suite judged. Does not know how answers come about.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from reef_cli.core.errors import ConfigError, MissingDependency, ReefError, SuiteNotFound
from reef_cli.evaluation import environments, harbor
from reef_cli.evaluation.graders import AnyGrader, build, load_callable, suggest
from reef_cli.evaluation.judging import Pairwise

Split = Literal["development", "heldout"]
_KEYS = dict.fromkeys(("id", "messages", "grader", "split", "tags", "weight", "max_new_tokens", "must_not_regress", "audit"))
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its grader. `weight` lies in (0, 1000]."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    grader: AnyGrader
    split: Split = "heldout"
    tags: tuple[str, ...] = ()
    weight: float = 1.0
    max_new_tokens: int | None = None
    anchor: bool = False
    audit: AnyGrader | None = None


@dataclass(frozen=True, slots=True)
class Suite:
    """Items in file order. `digest` is of the whole suite, also after `select`."""

    name: str
    digest: str
    items: tuple[Item, ...]
    split: str = field(default="all")

    @classmethod
    def load(cls, source: str | Path) -> "Suite":
        """A suite from a JSONL file, a folder of Harbor tasks, `verifiers:TASKSET` or a dotted path.

        `SuiteNotFound`; `ConfigError` with the line; `MissingDependency`.
        """
        path = Path(source)
        if path.is_dir():
            return cls._from_tasks(path)
        if str(source).startswith(environments.PREFIX):
            return cls._from_taskset(str(source))
        if path.is_file():
            return cls.parse(path.read_text(encoding="utf-8"), path.name)
        module, colon, name = str(source).partition(":")
        if colon and module and name and "/" not in module:
            return cls._from_rows(enumerate(_call(str(source)), 1), str(source), "item")
        raise SuiteNotFound(
            f"no suite at {source}", hint="give a JSONL file, a folder of tasks, verifiers:TASKSET or module:function"
        )

    @classmethod
    def parse(cls, text: str, name: str) -> "Suite":
        """A suite from JSONL text."""
        rows = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    rows.append((number, json.loads(line, parse_constant=_refuse)))
                except ValueError as error:
                    raise ConfigError(f"{name} line {number} is not JSON", why=str(error)) from error
        return cls._from_rows(rows, name, "line")

    @classmethod
    def _from_tasks(cls, folder: Path) -> "Suite":
        """Harbor tasks; a task's own name is its id, its folder's when two have the same."""
        paths = harbor.tasks_below(folder)
        if not paths:
            raise SuiteNotFound(f"no tasks in {folder}", why="no folder in it has a task.toml")
        digest = hashlib.sha256()
        items = []
        for path in paths:
            task, metadata, files = harbor.read(path)
            place = path.relative_to(folder).as_posix()
            tags = [str(tag) for tag in metadata.get("tags") or () if isinstance(tag, str)]
            facts: dict[str, Any] = {name: metadata[name] for name in ("split", "must_not_regress") if name in metadata}
            question = [{"role": "user", "content": task.instruction}]
            row: dict[str, Any] = {"id": place if place != "." else task.name, "messages": question, "tags": tags, **facts}
            items.append(_named(place, lambda row=row, task=task: _item(row, task)))  # type: ignore[misc]
            digest.update(f"{place}\0{files}\n".encode())
        return cls(folder.name, f"sha256:{digest.hexdigest()}", tuple(items))

    @classmethod
    def _from_taskset(cls, source: str) -> "Suite":
        digest = hashlib.sha256()
        items: dict[str, Item] = {}
        for row, grader in environments.load(source.removeprefix(environments.PREFIX)):
            item = _named(row["id"], lambda row=row, grader=grader: _item(row, grader))  # type: ignore[misc]
            if items.setdefault(item.id, item) is item:
                digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        if not items:
            raise ConfigError(f"{source} has no tasks")
        return cls(source, f"sha256:{digest.hexdigest()}", tuple(items.values()))

    @classmethod
    def _from_rows(cls, rows: Iterable[tuple[int, Any]], name: str, unit: str) -> "Suite":
        items: list[Item] = []
        lines: dict[str, int] = {}
        digest = hashlib.sha256()
        for number, row in rows:
            try:
                item = _item(row)
            except MissingDependency:
                raise
            except ReefError as error:
                raise ConfigError(f"{name} {unit} {number}: {error.message}", why=error.why, hint=error.hint) from error
            if item.id in lines:
                raise ConfigError(f"{name} {unit} {number}: id {item.id!r} was used before", why=f"by {unit} {lines[item.id]}")
            lines[item.id] = number
            items.append(item)
            digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        if not items:
            raise ConfigError(f"{name} has no items", hint="write one JSON object per line")
        return cls(name, f"sha256:{digest.hexdigest()}", tuple(items))

    def select(self, split: str = "all", limit: int | None = None) -> "Suite":
        """The items of a split; with a limit the first ones, anchors before others. `ConfigError` when none is left."""
        chosen: Sequence[Item] = [item for item in self.items if split in ("all", item.split)]
        if limit is not None and len(chosen) > limit:
            kept = {item.id for item in sorted(chosen, key=lambda item: not item.anchor)[:limit]}
            chosen = [item for item in chosen if item.id in kept]
        if not chosen:
            raise ConfigError(
                f"suite {self.name} has no {split} items", hint="set evaluation.split, or mark items with `split`"
            )
        return replace(self, items=tuple(chosen), split=split)


def _call(path: str) -> Iterable[Any]:
    try:
        return list(load_callable(path)())
    except ReefError:
        raise
    except Exception as error:  # a person's code may raise anything; it is their suite that is broken
        raise ConfigError(f"suite {path} failed", why=f"{type(error).__name__}: {error}") from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of a suite")


def _named(name: str, make: Callable[[], Item]) -> Item:
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", why=error.why, hint=error.hint) from error


def _item(row: object, grader: AnyGrader | None = None) -> Item:
    if not isinstance(row, Mapping):
        raise ConfigError("an item is an object")
    for key in row:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}", hint=suggest(str(key), _KEYS))
    identifier = row.get("id")
    if not isinstance(identifier, str) or not identifier.strip() or len(identifier) > 200:
        raise ConfigError("`id` must be a text of 1 to 200 characters")
    split = row.get("split", "heldout")
    if split not in ("development", "heldout"):
        raise ConfigError("`split` is development or heldout", why=f"got {split!r}")
    return Item(
        id=identifier,
        messages=_messages(row.get("messages")),
        grader=grader or build(row.get("grader")),
        split=cast(Split, split),
        tags=_tags(row.get("tags", [])),
        weight=_number(row, "weight", 1.0, 1000.0),
        max_new_tokens=None if row.get("max_new_tokens") is None else _tokens(row["max_new_tokens"]),
        anchor=_flag(row.get("must_not_regress", False)),
        audit=_audit(row.get("audit")),
    )


def _audit(value: object) -> AnyGrader | None:
    if value is None:
        return None
    audit = build(value)
    if isinstance(audit, Pairwise):
        raise ConfigError("`audit` cannot be pairwise", why="it grades one answer", hint="use a judge")
    return audit


def _messages(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError("`messages` must be a list of chat messages")
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise ConfigError("each message needs a role", why=f"one of {', '.join(_ROLES)}")
    return tuple(value)


def _tags(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(tag, str) for tag in value):
        raise ConfigError("`tags` must be a list of texts")
    return tuple(value)


def _number(row: Mapping[str, Any], key: str, default: float, most: float) -> float:
    value = row.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and 0 < value <= most):
        raise ConfigError(f"`{key}` must be a number above 0 and at most {most:g}")
    return float(value)


def _tokens(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("`max_new_tokens` must be a whole number above 0")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError("`must_not_regress` is true or false")
    return value
