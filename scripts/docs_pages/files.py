"""The layout of a home, from `config.paths`."""

import inspect
from pathlib import Path

from docs_pages.markdown import code
from docs_pages.markdown import table as markdown
from reef_cli.config.paths import Home

EXTRA = {
    "run": "Discovery file and lock of the running server.",
    "logs": "`reef.log` (JSON lines, rotated), `engine.log`, `trainer.log`.",
    "artifacts": "Read-only folders of released artifacts, made from the store when they are needed.",
}


def table() -> str:
    """Path below the home, and what it is."""
    home = Home(Path("/"))
    rows = {}
    for name, value in inspect.getmembers(Home, lambda member: isinstance(member, property)):
        path = str(getattr(home, name).relative_to("/"))
        rows[path] = EXTRA.get(name) or inspect.getdoc(value) or ""
    rows["artifacts"] = EXTRA["artifacts"]
    return markdown(("path", "what"), [(code(path), rows[path]) for path in sorted(rows)])
