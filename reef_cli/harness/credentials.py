"""Keeps secrets out of trees: a tree is stored for ever, installed on many machines and shown to proposers.

A literal that looks like a key is refused wherever it stands; a value under a name like `apiKey` must be a reference
(`$NAME`, `${NAME}`, `{env:NAME}`) that is resolved on the user's machine. The text itself is never repeated in the error.
"""

import re
from collections.abc import Iterator
from typing import Any

from reef_cli.core.errors import UnsupportedArtifact

_SHAPES = re.compile(
    r"\b(?:sk|pk|rk)[-_](?:live_|test_|ant-|proj-)?[A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_[A-Za-z0-9]{20,}|\bxox[abeoprs]-[\w-]{10,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bey[\w-]{10,}\.ey[\w-]{10,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|(?i:\bbearer\s+)[A-Za-z0-9._~+/=-]{16,}"
)
_SECRET_NAME = re.compile(
    r"(?i)^(?:.*[_-])?(?:api[_-]?key|auth[_-]?token|access[_-]?token|token|secret|password|passwd|authorization)$"
)
_REFERENCE = re.compile(r"^(?:Bearer\s+)?(?:\$\{?[A-Za-z_]\w*\}?|\{env:[A-Za-z_]\w*\})$", re.IGNORECASE)


def findings(value: Any, where: str = "") -> Iterator[str]:
    """Dotted places of `value` (JSON-like) that hold something credential-shaped."""
    if isinstance(value, dict):
        for key, inner in value.items():
            place = f"{where}.{key}" if where else str(key)
            if isinstance(inner, str) and inner and _SECRET_NAME.match(str(key)) and not _REFERENCE.match(inner):
                yield place
            else:
                yield from findings(inner, place)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from findings(inner, f"{where}[{index}]")
    elif isinstance(value, str) and _SHAPES.search(value):
        yield where


def refuse(value: Any, where: str) -> None:
    """Raise `UnsupportedArtifact` naming the first place that holds a credential; the credential is not repeated."""
    place = next(findings(value), None)
    if place is not None:
        raise UnsupportedArtifact(
            f"{where} holds something that looks like a credential at {place or 'its text'}",
            why="a harness tree is stored for ever and installed on other machines",
            hint="refer to an environment variable, such as ${MY_TOKEN}, and list it under requires",
        )
