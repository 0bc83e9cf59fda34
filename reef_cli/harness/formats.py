"""Writing what agents read: JSON, TOML and YAML documents, Markdown front matter, and deep merges of settings."""

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from reef_cli.core.errors import UnsupportedArtifact

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, objects recursively; None deletes a key, everything else replaces."""
    out = dict(base)
    for key, value in over.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merged(out[key], value)
        else:
            out[key] = merged({}, value) if isinstance(value, Mapping) else value
    return out


def dump(form: str, value: Mapping[str, Any]) -> bytes:
    """A document in `json`, `toml` or `yaml`, with stable bytes."""
    if form == "json":
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    elif form == "toml":
        text = "\n".join(_toml_table(value, ())).strip("\n") + "\n"
    elif form == "yaml":
        text = yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=10_000)
    else:
        raise UnsupportedArtifact(f"unknown format {form!r}", hint="json, toml or yaml")
    return text.encode()


def quoted(text: str) -> str:
    """A double-quoted scalar that YAML and TOML both read back exactly."""
    out = []
    for char in text:
        code = ord(char)
        if char in '"\\':
            out.append("\\" + char)
        elif char.isprintable():
            out.append(char)
        else:
            out.append(f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return f'"{"".join(out)}"'


def front_matter(fields: Mapping[str, Any], body: str) -> bytes:
    """Markdown with YAML front matter in which every text is quoted: an unquoted colon makes agents drop the file silently."""
    lines = ["---"]
    for key, value in fields.items():
        if isinstance(value, bool):
            lines.append(f"{key}: {'true' if value else 'false'}")
        elif isinstance(value, str):
            lines.append(f"{key}: {quoted(value)}")
        elif isinstance(value, Mapping):
            lines.append(f"{key}:")
            lines.extend(f"  {quoted(str(name))}: {quoted(str(inner))}" for name, inner in value.items())
        else:
            lines.append(f"{key}:")
            lines.extend(f"  - {quoted(str(item))}" for item in value)
    return ("\n".join([*lines, "---", ""]) + "\n" + body + ("" if body.endswith("\n") else "\n")).encode()


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else quoted(name)


def _toml_table(table: Mapping[str, Any], road: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_toml_value(value)}" for key, value in plain.items()]
    if road and (lines or not table):
        lines.insert(0, f"\n[{'.'.join(map(_key, road))}]")
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines.extend(_toml_table(value, (*road, key)))
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_toml_value(inner)}" for key, inner in value.items()) + " }"
    raise UnsupportedArtifact(f"TOML cannot hold {type(value).__name__}")
