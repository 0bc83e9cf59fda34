"""Layers of settings joined into one checked whole: flag over environment over file over default, each value with its origin.

All faults of a configuration are found in one pass and raised together as one `ConfigError`: the first is the message, all of
them stand in `details["problems"]`. Reading has no effect but importing the recipe.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reef_cli.config.checks import limit_fault, relation_faults
from reef_cli.config.docs import field_docs
from reef_cli.config.keys import SECTIONS, Key, key_table, section_type, suggestion
from reef_cli.config.paths import Home
from reef_cli.config.recipes import resolve_recipe
from reef_cli.config.schema import Settings
from reef_cli.config.sources import Entry, Leaves, from_env, from_flags
from reef_cli.config.substitute import substitute
from reef_cli.config.values import Misfit, coerce
from reef_cli.core.errors import ConfigError, MissingDependency, RecipeNotFound, ReefError

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration.

    `origins` has every key of `keys`: `serve.yaml:12`, `REEF_ENGINE__KIND`, `--engine.kind` or `default`.

    `recipe` is the recipe's class (None: record only), `recipe_settings` its checked settings object.
    """

    settings: Settings
    origins: Mapping[str, str]
    file: Path | None = None
    recipe: type[Any] | None = None
    recipe_settings: Any = None
    keys: Mapping[tuple[str, str], Key] = field(default_factory=dict)

    @property
    def home(self) -> Home:
        return Home(Path(self.settings.reef.home).expanduser().absolute())

    def make_recipe(self) -> Any:
        """The recipe, instantiated with its settings; None when the deployment only records."""
        return None if self.recipe is None else self.recipe(self.recipe_settings)

    def value(self, key: Key) -> Any:
        """The value of one key of `keys`."""
        owner = self.recipe_settings if key.recipe else getattr(self.settings, key.section)
        return getattr(owner, key.name)


def load(argv_overrides: Sequence[str] = (), env: Mapping[str, str] | None = None, file: Path | None = None) -> Loaded:
    """Read, join and check all layers. `argv_overrides` are words such as `--reef.port 8901`; `env` defaults to nothing.

    Raises `UsageError` for a missing file, `RecipeNotFound`, `ConfigError` for the rest.
    """
    environ = env or {}
    leaves, sections = _joined(argv_overrides, environ, file)
    faults = _Faults()
    recipe = _recipe(leaves, environ, faults)
    table = key_table(recipe.settings_type if recipe is not None else None)
    _unknown_sections(sections, table, faults)
    found = _assign(leaves, table, environ, faults, strict_reef=not faults.recipe_failed)
    origins = {key.dotted: _origin(key, leaves) for key in table.values()}
    settings, recipe_settings = _build(found, table, recipe, origins, faults)
    faults.raise_all()
    assert settings is not None
    return Loaded(settings, origins, file, recipe, recipe_settings, table)


class _Faults:
    """Faults gathered instead of raised one by one, so that a person fixes them in one go."""

    def __init__(self) -> None:
        self._found: list[ReefError] = []
        self.recipe_failed = False

    @contextmanager
    def gather(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, RecipeNotFound, MissingDependency) as error:
            self._found.append(error)

    def add(self, message: str, *, why: str = "", hint: str = "", key: str = "") -> None:
        self._found.append(ConfigError(message, why=why, hint=hint, key=key))

    def raise_all(self) -> None:
        if not self._found:
            return
        first = self._found[0]
        problems = [{"message": e.message, "why": e.why, "hint": e.hint, "key": e.details.get("key", "")} for e in self._found]
        first.details["problems"] = problems
        if len(problems) > 1:
            first.why = f"{first.why + '; ' if first.why else ''}and {len(problems) - 1} more: reef config check lists all"
        raise first


def _joined(flags: Sequence[str], environ: Mapping[str, str], file: Path | None) -> tuple[Leaves, dict[str, str]]:
    """Leaves of all layers, higher ones over lower, and the sections each layer names with one origin."""
    leaves: Leaves = {}
    sections: dict[str, str] = {}
    if file is not None:
        from reef_cli.config.yaml_file import read_yaml

        document = read_yaml(file)
        leaves |= document.leaves
        sections |= document.sections
    for layer in (from_env(environ), from_flags(flags)):
        for path, entry in layer.items():
            _override(leaves, path, entry)
            sections.setdefault(path[0], entry.origin)
    return leaves, sections


def _override(leaves: Leaves, path: tuple[str, ...], entry: Entry) -> None:
    """A leaf replaces what stands at its path, below it, and above it."""
    for other in [other for other in leaves if other[: len(path)] == path or path[: len(other)] == other]:
        del leaves[other]
    leaves[path] = entry


def _recipe(leaves: Leaves, environ: Mapping[str, str], faults: _Faults) -> type[Any] | None:
    entry = leaves.get(("reef", "recipe"))
    if entry is None:
        return None
    recipe: type[Any] | None = None
    faults.recipe_failed = True
    with faults.gather():
        entry = substitute(entry, "reef.recipe", environ)
        if entry.value is not None and not isinstance(entry.value, str):
            raise ConfigError(f"{entry.origin}: reef.recipe must be text", hint="for example recipes.sao.recipe:SAORecipe")
        recipe = resolve_recipe(entry.value) if entry.value else None
        faults.recipe_failed = False
    return recipe


def _unknown_sections(sections: Mapping[str, str], table: Mapping[tuple[str, str], Key], faults: _Faults) -> None:
    for section, origin in sections.items():
        if section not in SECTIONS:
            faults.add(f"{origin}: unknown section {section!r}", hint=suggestion(section, "", table), key=section)


def _assign(
    leaves: Leaves, table: Mapping[tuple[str, str], Key], environ: Mapping[str, str], faults: _Faults, *, strict_reef: bool
) -> dict[tuple[str, str], Any]:
    """Values by key, each fitted to its type and limits. Without its recipe, `reef:` cannot be told which keys are wrong."""
    found: dict[tuple[str, str], Any] = {}
    for path, raw in leaves.items():
        section, name = path[0], path[1] if len(path) > 1 else ""
        key = table.get((section, name))
        with faults.gather():
            if key is None:
                if section in SECTIONS and (strict_reef or section != "reef"):
                    _raise_unknown(section, name, raw, table)
                continue
            entry = substitute(raw, ".".join(path), environ)
            value = _fitted(key, path, entry)
            found[section, name] = _merged(found.get((section, name)), path[2:], value) if key.free else value
    return found


def _raise_unknown(section: str, name: str, entry: Entry, table: Mapping[tuple[str, str], Key]) -> None:
    raise ConfigError(
        f"{entry.origin}: unknown key {section}.{name}",
        why="a key that is ignored would be a setting that silently does nothing",
        hint=suggestion(section, name, table),
        key=f"{section}.{name}",
    )


def _fitted(key: Key, path: tuple[str, ...], entry: Entry) -> Any:
    if len(path) > 2 and not key.free:
        raise _unfit(key, f"{entry.origin}: {key.dotted} takes no keys below it, got {path[2]!r}")
    try:
        value = coerce(entry.value, key.annotation if len(path) == 2 else Any, text=entry.text)
    except Misfit as misfit:
        complaint = "does not fit its type; the value is not shown" if key.secret else str(misfit)
        raise _unfit(key, f"{entry.origin}: {key.dotted} {complaint}") from None
    if len(path) == 2 and (fault := limit_fault(key.dotted, value)):
        got = "" if key.secret else f", not {value!r}"
        raise _unfit(key, f"{entry.origin}: {key.dotted} {fault}{got}")
    return value


def _unfit(key: Key, message: str) -> ConfigError:
    """A value that does not fit, with what the setting is for and what it is when left out."""
    meaning = field_docs(key.owner).get(key.name, "").split("\n")[0]
    plain = key.secret or key.default is None or key.default is dataclasses.MISSING
    default = "" if plain else f"; its default is {key.default}"
    return ConfigError(
        message, why=f"{key.dotted}: {meaning}" if meaning else "", hint=f"correct it or leave it out{default}", key=key.dotted
    )


def _merged(mapping: Any, below: tuple[str, ...], value: Any) -> dict[str, Any]:
    """`mapping` with `value` at the path `below` it; the whole mapping when there is none."""
    base = dict(mapping) if isinstance(mapping, Mapping) else {}
    if not below:
        return {**base, **value}
    head, *rest = below
    base[head] = _merged(base.get(head), tuple(rest), value) if rest else value
    return base


def _origin(key: Key, leaves: Leaves) -> str:
    origins = [entry.origin for path, entry in leaves.items() if path[:2] == (key.section, key.name)]
    return ", ".join(dict.fromkeys(origins)) or DEFAULT


def _build(
    found: Mapping[tuple[str, str], Any],
    table: Mapping[tuple[str, str], Key],
    recipe: type[Any] | None,
    origins: Mapping[str, str],
    faults: _Faults,
) -> tuple[Settings | None, Any]:
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    own: dict[str, Any] = {}
    for place, value in found.items():
        (own if table[place].recipe else parts[place[0]])[place[1]] = value
    recipe_settings = _recipe_settings(recipe, own, faults) if recipe is not None else None
    chosen = dataclasses.asdict(recipe_settings) if recipe_settings is not None else {}
    settings = Settings(
        **{section: section_type(section)(**values) for section, values in parts.items()}, recipe_settings=chosen
    )
    for key, wrong, fix in relation_faults(settings):
        faults.add(f"{origins[key]}: {key}: {wrong}" if origins[key] != DEFAULT else f"{key}: {wrong}", hint=fix, key=key)
    return settings, recipe_settings


def _recipe_settings(recipe: type[Any], values: dict[str, Any], faults: _Faults) -> Any:
    required = [
        field.name
        for field in dataclasses.fields(recipe.settings_type)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in required if name not in values]:
        faults.add(f"the recipe needs reef.{missing[0]}", hint=f"see: reef recipe show {recipe.__module__}:{recipe.__name__}")
        return None
    try:
        return recipe.settings_type(**values)
    except (ValueError, TypeError) as error:
        faults.add("the recipe refuses its settings", why=str(error), hint=getattr(error, "hint", ""), key="reef")
        return None
