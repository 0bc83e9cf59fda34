"""`${VARIABLE}` and `${VARIABLE:-default}` in the values of a file.

An unset variable without a default is an error that names it. A default also stands in for an empty variable, as in a shell.
`$${` writes a literal `${`. Names and defaults are not expanded again.
"""

import re
from collections.abc import Mapping
from typing import Any

from reef_cli.config.sources import Entry
from reef_cli.core.errors import ConfigError

_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}")
_INSIDE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


def substitute(entry: Entry, key: str, environ: Mapping[str, str]) -> Entry:
    """The entry with its references replaced; a replaced scalar is text, to be parsed by the field's type."""
    if entry.origin.startswith(("REEF_", "--")):
        return entry
    value, touched = _walk(entry.value, key, entry.origin, environ)
    return Entry(value, entry.origin, text=entry.text or (touched and isinstance(value, str)))


def _walk(value: Any, key: str, origin: str, environ: Mapping[str, str]) -> tuple[Any, bool]:
    if isinstance(value, str) and "${" in value:
        return _expand(value, key, origin, environ), "$${" not in value
    if isinstance(value, list):
        return [_walk(item, key, origin, environ)[0] for item in value], False
    if isinstance(value, dict):
        return {name: _walk(item, key, origin, environ)[0] for name, item in value.items()}, False
    return value, False


def _expand(value: str, key: str, origin: str, environ: Mapping[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        inside = _INSIDE.fullmatch(match[1])
        if inside is None:
            raise ConfigError(
                f"{origin}: {key} has a malformed reference {match[0]!r}", hint="write ${NAME} or ${NAME:-default}"
            )
        name, default = inside[1], inside[2]
        if found := environ.get(name):
            return found
        if default is not None:
            return default
        state = "empty" if name in environ else "not set"
        raise ConfigError(
            f"{origin}: {key} needs the environment variable {name}",
            why=f"{name} is {state}",
            hint=f"export {name}=…, or give a default: ${{{name}:-value}}",
            variable=name,
        )

    return _REFERENCE.sub(one, value)
