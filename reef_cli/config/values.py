"""One value made to fit the type of its field, strictly: nothing is guessed, and the complaint says what is expected.

Values of YAML keep their type (a boolean is no number, a number no string); text of flags, the environment and
substitutions is parsed by the field's type. Knows `str int float bool None Literal Enum Path Sequence tuple list Mapping`
and unions of them.
"""

import enum
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from reef_cli.core.errors import ConfigError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NULL = ("null", "none", "~")


class Misfit(ValueError):
    """A value does not fit; the message completes `key: `."""


def coerce(value: Any, annotation: Any, *, text: bool = False) -> Any:
    """`value` as `annotation` wants it, else `Misfit`."""
    origin = get_origin(annotation)
    if annotation is Any:
        return _yaml_scalar(value) if text else value
    if origin in (Union, types.UnionType):
        return _union(value, get_args(annotation), text)
    if origin is Literal:
        return _choice(value, get_args(annotation))
    if origin in (Sequence, list, tuple):
        return _sequence(value, annotation, text)
    if origin in (Mapping, dict) or annotation in (Mapping, dict):
        return _mapping(value, text)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation(_choice(value, tuple(member.value for member in annotation)))
    return _scalar(value, annotation, text)


def describe(annotation: Any) -> str:
    """The type in words, for errors and documentation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (Sequence, list, tuple):
        inner = [part for part in arguments if part is not Ellipsis]
        return f"a list ({describe(inner[0])} each)" if inner else "a list"
    if origin in (Mapping, dict):
        return "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation)
    return _NAMES.get(annotation, "any value")


_NAMES: Mapping[Any, str] = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    type(None): "null",
}


def _union(value: Any, members: tuple[Any, ...], text: bool) -> Any:
    if type(None) in members and (value is None or (text and str(value).lower() in _NULL)):
        return None
    complaint = Misfit("")
    for member in members:
        if member is type(None):
            continue
        try:
            return coerce(value, member, text=text)
        except Misfit as error:
            complaint = error
    raise complaint


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
        if isinstance(value, str) and value == str(choice):
            return choice
    raise Misfit(f"must be one of {', '.join(map(str, choices))}, not {_shown(value)}{_near(value, choices)}")


def _near(value: Any, choices: tuple[Any, ...]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(str(value), [str(choice) for choice in choices], 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _sequence(value: Any, annotation: Any, text: bool) -> Any:
    inner = [part for part in get_args(annotation) if part is not Ellipsis]
    if text and isinstance(value, str):
        value = (
            _yaml_scalar(value)
            if value.lstrip().startswith("[")
            else [part.strip() for part in value.split(",") if part.strip()]
        )
    if not isinstance(value, list | tuple):
        raise Misfit(f"expects {describe(annotation)}, got {_shown(value)}")
    items = [coerce(item, inner[0] if inner else Any, text=text and isinstance(item, str)) for item in value]
    return items if get_origin(annotation) is list else tuple(items)


def _mapping(value: Any, text: bool) -> dict[str, Any]:
    parsed = _yaml_scalar(value) if text and isinstance(value, str) else value
    if not isinstance(parsed, Mapping):
        raise Misfit(f"expects a mapping, got {_shown(value)}")
    return dict(parsed)


def _scalar(value: Any, annotation: Any, text: bool) -> Any:
    fitted = _parse(str(value), annotation) if text else _typed(value, annotation)
    if isinstance(fitted, float) and not math.isfinite(fitted):
        raise Misfit(f"must be finite, not {_shown(value)}")
    return fitted


def _typed(value: Any, annotation: Any) -> Any:
    if annotation is float and type(value) is int:
        return float(value)
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if type(value) is annotation:
        return value
    quote = "; put it in quotes" if annotation is str and value is not None and not isinstance(value, list | dict) else ""
    raise Misfit(f"expects {describe(annotation)}, got {_shown(value)}{quote}")


def _parse(value: str, annotation: Any) -> Any:
    word = value.strip()
    try:
        if annotation is bool:
            return _boolean(word)
        if annotation in (int, float):
            return annotation(word)
    except ValueError:
        raise Misfit(f"expects {describe(annotation)}, got {_shown(value)}") from None
    return Path(value) if annotation is Path else value


def _boolean(word: str) -> bool:
    if word.lower() in _TRUE:
        return True
    if word.lower() in _FALSE:
        return False
    raise ValueError(word)


def _yaml_scalar(value: Any) -> Any:
    """Text of a flag read as YAML would read it, for fields without a type of their own."""
    from reef_cli.config.yaml_file import read_scalar

    try:
        return read_scalar(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise Misfit(f"is not readable as YAML: {_shown(value)}") from error


def _shown(value: Any) -> str:
    kinds = {bool: "true or false", type(None): "null", list: "a list", tuple: "a list", dict: "a mapping"}
    if type(value) is bool:
        return str(value).lower()
    return kinds.get(type(value)) or repr(value)[:80]
