"""`reef recipe new`: a folder that is a recipe already, passes every check, and says in comments what to change."""

import keyword
from collections.abc import Callable
from pathlib import Path

from reef_cli.core.errors import ConfigError

FILES = ("recipe.py", "program.py", "README.md", "serve.yaml")


def new_recipe(name: str, parent: Path, template: Callable[..., str]) -> Path:
    """Make `parent/<name>` from the template's texts. Raises `ConfigError` for a bad name or a folder that exists."""
    folder = parent / name
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"{name!r} cannot name a recipe", hint="use lower-case letters, digits and _")
    if folder.exists():
        raise ConfigError(f"{folder} exists", hint="choose another name or remove it")
    words = {"unnamed": name, "Unnamed": "".join(part.capitalize() for part in name.split("_"))}
    for file in FILES:
        text = template("recipe", file)
        for word, value in words.items():
            text = text.replace(word, value)
        place = folder / "examples" / name / file if file.endswith(".yaml") else folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    return folder
