"""Where shipped data lies: `adapters/` and `templates/`.

In a wheel they are inside the package (`reef_cli/_data/...`); in a checkout they stand beside it. Nothing else may guess.
"""

from pathlib import Path

from reef_cli.core.errors import MissingDependency

PACKAGE = Path(__file__).resolve().parent.parent


def shipped(folder: str) -> Path:
    """The folder `adapters` or `templates` of this installation; `MissingDependency` when the installation is damaged."""
    for candidate in (PACKAGE / "_data" / folder, PACKAGE.parent / folder):
        if candidate.is_dir():
            return candidate
    raise MissingDependency(f"the folder {folder!r} of this installation is missing", hint="reinstall reef-cli")


def template(*parts: str) -> str:
    """The text of one file below `templates/`."""
    return shipped("templates").joinpath(*parts).read_text(encoding="utf-8")
