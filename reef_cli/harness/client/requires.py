"""What a release needs of the machine (`requires`), checked before anything is written and before every start.

Variables and programs can be looked up. Services and permissions cannot be known from here: a person checks them off with
`setup`, and the check-off belongs to exactly that item.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

EXIT = 3


def unmet(
    requires: Sequence[Mapping[str, str]], environment: Mapping[str, str], checked: Sequence[str]
) -> list[Mapping[str, str]]:
    """The items that do not hold."""
    return [item for item in requires if not _holds(item, environment, checked)]


def label(item: Mapping[str, str]) -> str:
    return f"{item['kind']} {item['name']}"


def confirmable(item: str) -> bool:
    """Whether a label is of a kind that a person checks off."""
    kind, _, name = item.partition(" ")
    return kind in ("service", "permission") and bool(name.strip())


def explain(items: Sequence[Mapping[str, str]], wrapper: str) -> str:
    """What is missing and what to do, a line each."""
    todo = {
        "env": "set the environment variable",
        "program": "install the program and have it on PATH",
        "service": "start the service",
        "permission": "grant the permission",
    }
    lines = []
    for item in items:
        reason = f" ({item['reason']})" if item.get("reason") else ""
        extra = "" if item["kind"] in ("env", "program") else f"; then confirm with: {wrapper} setup {label(item)!r}"
        lines.append(f"  needs {label(item)}{reason}: {todo.get(item['kind'], 'provide it')}{extra}")
    return "\n".join(lines)


def _holds(item: Mapping[str, str], environment: Mapping[str, str], checked: Sequence[str]) -> bool:
    if item["kind"] == "env":
        return bool(environment.get(item["name"]))
    if item["kind"] == "program":
        return shutil.which(item["name"], path=environment.get("PATH") or "/usr/local/bin:/usr/bin:/bin") is not None
    return label(item) in checked
