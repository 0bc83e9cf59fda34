"""JSON Schema (2020-12) of `serve.yaml`, for editors. Made from the dataclasses and their docstrings."""

import dataclasses
import enum
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from reef_cli.config.docs import field_docs, summary
from reef_cli.config.keys import SECTIONS, Key, key_table, section_type

_REFERENCE = {
    "type": "string",
    "pattern": r"\$\{",
    "description": "an environment variable: ${NAME} or ${NAME:-default}",
}
_SCALARS: Mapping[Any, str] = {
    str: "string",
    Path: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def settings_schema(recipe: type[Any] | None = None) -> dict[str, Any]:
    """The schema; with a recipe its own keys are known too, without one `reef:` takes keys of any recipe."""
    table = key_table(recipe.settings_type if recipe is not None else None)
    properties = {section: _section(section, table, open_ended=section == "reef" and recipe is None) for section in SECTIONS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Reef serve.yaml",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _section(section: str, table: Mapping[tuple[str, str], Key], *, open_ended: bool) -> dict[str, Any]:
    keys = [key for key in table.values() if key.section == section]
    schema: dict[str, Any] = {
        "type": ["object", "null"],
        "description": summary(section_type(section)),
        "properties": {key.name: _property(key) for key in keys},
        "additionalProperties": open_ended,
    }
    if required := [key.name for key in keys if key.default is dataclasses.MISSING]:
        schema["required"] = required
    return schema


def _property(key: Key) -> dict[str, Any]:
    schema = type_schema(key.annotation)
    if "string" not in str(schema.get("type", "")):
        schema = {"anyOf": [*schema.pop("anyOf", [schema] if schema else []), _REFERENCE]} if schema else {}
    if doc := field_docs(key.owner).get(key.name):
        schema["description"] = doc
    if key.default is not dataclasses.MISSING:
        schema["default"] = _plain(key.default)
    return schema


def type_schema(annotation: Any) -> dict[str, Any]:
    """The schema of one Python type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(part) for part in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Sequence, list, tuple):
        inner = [part for part in arguments if part is not Ellipsis]
        return {"type": "array", "items": type_schema(inner[0]) if inner else {}}
    if origin in (Mapping, dict) or annotation in (Mapping, dict):
        return {"type": "object"}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"enum": [member.value for member in annotation]}
    return {"type": _SCALARS[annotation]} if annotation in _SCALARS else {}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, Mapping) else value
