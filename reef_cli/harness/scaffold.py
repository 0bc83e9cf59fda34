"""`reef harness new-adapter`: a folder that is an adapter already and says in comments what to change."""

from pathlib import Path

from reef_cli.core.errors import ConfigError
from reef_cli.harness.adapter import Adapter, load
from reef_cli.harness.resources import template


def new_adapter(name: str, parent: Path) -> Adapter:
    """Make `parent/<name>` and load it. Raises `ConfigError` for a bad name or a folder that exists."""
    folder = parent / name
    if folder.exists():
        raise ConfigError(f"{folder} exists", hint="choose another name or remove it")
    words = {"NAME": name, "TITLE": name.replace("-", " ").capitalize(), "VARIABLE": name.replace("-", "_").upper()}
    texts = {}
    for file in ("adapter.yaml", "adapter.py"):
        text = template("adapter", file)
        for word, value in words.items():
            text = text.replace(f"@{word}@", value)
        texts[file] = text
    folder.mkdir(parents=True)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    try:
        return load(folder)
    except ConfigError:
        for file in texts:
            (folder / file).unlink()
        folder.rmdir()
        raise
