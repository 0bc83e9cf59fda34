"""The three places settings come from, read into one shape: a leaf path, its raw value and its origin.

A leaf path is `("engine", "kind")`, or longer inside a free mapping (`("engine", "sglang", "tp_size")`). Values of the
environment, of flags and of `${VARIABLE}` are text and parsed later by the field's type; values of a file have YAML's types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reef_cli.core.errors import ConfigError

ALIASES: Mapping[str, tuple[str, ...]] = {"REEF_HOME": ("reef", "home"), "REEF_TOKEN": ("reef", "token")}


@dataclass(frozen=True, slots=True)
class Entry:
    """One value as found. `text` says whether it must be parsed by the field's type."""

    value: Any
    origin: str
    text: bool = False


Leaves = dict[tuple[str, ...], Entry]


def from_env(environ: Mapping[str, str]) -> Leaves:
    """`REEF_ENGINE__KIND` and the short names `REEF_HOME`, `REEF_TOKEN`; an empty variable counts as unset.

    An empty `REEF_TOKEN` is refused: whoever set it meant a token, and an empty one must never authenticate.
    """
    if "REEF_TOKEN" in environ and not environ["REEF_TOKEN"].strip():
        raise ConfigError(
            "REEF_TOKEN is set but empty", why="an empty token never authenticates", hint="set it, or: unset REEF_TOKEN"
        )
    leaves: Leaves = {path: Entry(environ[name], name, text=True) for name, path in ALIASES.items() if environ.get(name)}
    for name, value in sorted(environ.items()):
        if name.startswith("REEF_") and "__" in name and value:
            leaves[tuple(name.removeprefix("REEF_").lower().split("__"))] = Entry(value, name, text=True)
    return leaves


def from_flags(argv: Sequence[str]) -> Leaves:
    """`--engine.kind upstream`, `--engine.kind=upstream`; a flag without a value is `true`."""
    leaves: Leaves = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or "." not in word:
            raise ConfigError(f"unexpected argument {word!r}", hint="settings look like --engine.kind upstream")
        name, equals, value = word.partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        section, key, *deeper = name.removeprefix("--").split(".")
        leaves[(section, key.replace("-", "_"), *deeper)] = Entry(value, name, text=True)
    return leaves
