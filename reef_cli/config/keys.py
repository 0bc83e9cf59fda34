"""The table of every key a deployment may set: section, name, type, default, documentation, whether it is a secret.

Built from the dataclasses of `schema` and, for the keys that sit beside the service's own in `reef:`, from the recipe's
`settings_type`. Suggestions for misspelt keys come from the same table.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from reef_cli.config.schema import Settings
from reef_cli.core.errors import ConfigError

SECTIONS: tuple[str, ...] = ("reef", "engine", "trainer", "evaluation", "storage", "telemetry")
_SECRET = re.compile(r"(^|[_-])(token|tokens|api_key|api-key|key|secret|password|authorization)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. `annotation` is its resolved type; `free` mappings take any keys below them."""

    section: str
    name: str
    annotation: Any
    default: Any
    owner: type
    recipe: bool = False

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def free(self) -> bool:
        return (get_origin(self.annotation) or self.annotation) in (Mapping, dict)

    @property
    def secret(self) -> bool:
        return is_secret(self.name) and _holds_text(self.annotation)


def is_secret(name: str) -> bool:
    """Whether a key of this name holds a credential; `api_key_file` and `max_new_tokens` do not."""
    return _SECRET.search(name) is not None


def _holds_text(annotation: Any) -> bool:
    return annotation is str or any(_holds_text(part) for part in get_args(annotation))


def section_type(section: str) -> type:
    """The dataclass of a section."""
    found = get_type_hints(Settings)[section]
    assert isinstance(found, type)
    return found


def keys_of(owner: type, section: str, *, recipe: bool = False) -> list[Key]:
    """The keys a settings dataclass declares, in order."""
    hints = get_type_hints(owner)
    return [
        Key(section, field.name, hints[field.name], default_of(field), owner, recipe)
        for field in dataclasses.fields(owner)
        if field.init
    ]


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """The default, or `dataclasses.MISSING` for a key that must be given."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def key_table(recipe_settings: type | None = None) -> dict[tuple[str, str], Key]:
    """Every key of a deployment with this recipe; a recipe may not redefine a key of the service."""
    table = {(key.section, key.name): key for section in SECTIONS for key in keys_of(section_type(section), section)}
    for key in keys_of(recipe_settings, "reef", recipe=True) if recipe_settings is not None else ():
        if ("reef", key.name) in table:
            raise ConfigError(
                f"the recipe's setting {key.name!r} collides with the service's reef.{key.name}", hint="rename it in the recipe"
            )
        table["reef", key.name] = key
    return table


def suggestion(section: str, name: str, table: Mapping[tuple[str, str], Key]) -> str:
    """A hint for an unknown key: a close name in its section, the same name elsewhere, or what the section takes."""
    if section not in SECTIONS:
        return _section_suggestion(section, name, table)
    here = [key.name for key in table.values() if key.section == section]
    if close := closest(name, here):
        return f"did you mean {section}.{close}?"
    elsewhere = {key.name: key.dotted for key in table.values() if key.section != section}
    if close := closest(name, elsewhere):
        return f"did you mean {elsewhere[close]}?"
    return f"keys of {section}: {', '.join(sorted(here))}"


def _section_suggestion(section: str, name: str, table: Mapping[tuple[str, str], Key]) -> str:
    if close := closest(section, SECTIONS):
        return f"did you mean {close}{'.' + name if name else ''}?"
    owners = [key.dotted for key in table.values() if key.name == section]
    if owners:
        return f"did you mean {owners[0]}?"
    return f"sections: {', '.join(SECTIONS)}"


def closest(word: str, among: Iterable[str]) -> str | None:
    """The word of `among` that was probably meant."""
    from difflib import get_close_matches

    found = get_close_matches(word, list(among), 1, cutoff=0.6)
    return found[0] if found else None
