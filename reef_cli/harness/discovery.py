"""Finding adapters: the shipped folders, folders on `REEF_ADAPTERS` (like PATH), and entry points of installed packages.

A later source never hides an earlier one: two adapters of one name are an error that names both places.
"""

import os
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from reef_cli.core.errors import AdapterNotFound, ConfigError
from reef_cli.harness.adapter import DESCRIPTOR, Adapter, load
from reef_cli.harness.resources import shipped

VARIABLE = "REEF_ADAPTERS"
GROUP = "reef.adapters"
"""An entry point of this group names a callable that returns the adapter's folder (a path)."""


def folders(environment: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Every folder that holds an adapter, in the order of the sources."""
    environment = os.environ if environment is None else environment
    roots = [shipped("adapters"), *(Path(item) for item in environment.get(VARIABLE, "").split(os.pathsep) if item)]
    for root in roots:
        if (root / DESCRIPTOR).is_file():
            yield root
        elif root.is_dir():
            yield from sorted(folder for folder in root.iterdir() if (folder / DESCRIPTOR).is_file())
        else:
            raise ConfigError(f"{VARIABLE} names {root}, which is no folder")
    for point in entry_points(group=GROUP):
        yield Path(point.load()())


def adapters(environment: Mapping[str, str] | None = None) -> dict[str, Adapter]:
    """All adapters by name."""
    found: dict[str, Adapter] = {}
    for folder in folders(environment):
        adapter = load(folder)
        if adapter.name in found:
            raise ConfigError(
                f"two adapters are named {adapter.name!r}", why=f"in {found[adapter.name].folder} and in {folder}"
            )
        found[adapter.name] = adapter
    return found


def adapter(name: str, environment: Mapping[str, str] | None = None) -> Adapter:
    """One adapter; `pi@0.84.2` is accepted where a version may follow (see `split`)."""
    found = adapters(environment)
    wanted = split(name)[0]
    if wanted not in found:
        raise AdapterNotFound(f"no adapter is named {wanted!r}", hint=f"known: {', '.join(sorted(found))}")
    return found[wanted]


def split(name: str) -> tuple[str, str | None]:
    """`name@version` into its parts."""
    base, _, version = name.partition("@")
    return base, version or None
