"""A configuration shown to a person: YAML that can be fed back, a comment with the origin of each value, secrets masked."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from reef_cli.config.keys import SECTIONS, is_secret
from reef_cli.config.load import DEFAULT, Loaded

MASK = "********"


def render_config(loaded: Loaded, mask: bool = True, *, changed_only: bool = False) -> str:
    """The configuration as YAML with `# origin` comments; `changed_only` leaves defaults out."""
    lines: list[str] = []
    for section in SECTIONS:
        rows = [row for row in rows_of(loaded, mask) if row[0] == section and not (changed_only and row[3] == DEFAULT)]
        if rows:
            lines.append(f"{section}:")
            lines += [f"  {name}: {_yaml(value)}  # {origin}" for _, name, value, origin in rows]
    return "\n".join(lines) + "\n" if lines else "{}  # everything is at its default\n"


def rows_of(loaded: Loaded, mask: bool = True) -> Iterator[tuple[str, str, Any, str]]:
    """`(section, name, JSON-safe value, origin)` of every key, in the order of the schema."""
    for key in loaded.keys.values():
        value = _safe(loaded.value(key))
        if mask:
            value = _masked(value, secret=key.secret)
        yield key.section, key.name, value, loaded.origins[key.dotted]


def _masked(value: Any, *, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {name: _masked(item, secret=is_secret(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, secret=secret) for item in value]
    if not isinstance(value, str):
        return value
    if secret:
        return MASK
    return _without_login(value)


def _without_login(value: str) -> str:
    """Addresses may carry `user:password@`; it never belongs on a screen."""
    if "://" not in value or "@" not in value:
        return value
    netloc = urlsplit(value).netloc
    return value.replace(netloc, f"{MASK}@{netloc.rpartition('@')[2]}", 1) if "@" in netloc else value


def _safe(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _yaml(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True).strip()
    return text.removesuffix("\n...").strip()
