"""`docs/configuration.md`: every key of serve.yaml and of the shipped recipes, from the settings' own docstrings."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from docs_pages.markdown import code, table
from reef_cli.config.docs import field_docs, summary
from reef_cli.config.keys import SECTIONS, Key, key_table, keys_of, section_type
from reef_cli.config.recipes import scan_recipes
from reef_cli.config.values import describe

HEAD = """# Configuration

This page is generated from `reef_cli/config/schema.py` and the recipes' settings by `scripts/docs.py`.

A deployment is one `serve.yaml`. Every key is optional. The layers, highest first:

| layer | form | example |
|---|---|---|
| flag | `--SECTION.KEY VALUE` | `--engine.kind upstream` |
| environment | `REEF_SECTION__KEY` | `REEF_ENGINE__KIND=upstream` |
| file | `reef serve -c serve.yaml` | see below |
| default | | |

Commands that talk to a server take its token from `REEF_TOKEN`; for the server itself write `token: ${REEF_TOKEN}` in the file.
`${NAME}` takes a value from the environment, `${NAME:-default}` with a fallback. Unknown keys are errors
and come with a suggestion.

```yaml
reef:
  recipe: recipes.sao.recipe:SAORecipe
  batch_size: 16
engine:
  kind: embedded
  model: smollm2-135m-instruct
evaluation:
  suite: suite.jsonl
```

```bash
reef config check serve.yaml             # lists every problem, with its line
reef config show -c serve.yaml --origin  # each value and where it came from; secrets masked
reef config schema                       # JSON Schema for editors
reef serve --print-config                # what this command line would use
```
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, *(_section(name) for name in SECTIONS)]
    parts += [_recipe(path, recipe) for path, recipe in scan_recipes() if isinstance(recipe, type)]
    return "\n".join(parts)


def _section(name: str) -> str:
    keys = [key for key in key_table().values() if key.section == name]
    return f"## `{name}:`\n\n{summary(section_type(name))}\n\n{_table(keys)}\n"


def _recipe(path: str, recipe: type[Any]) -> str:
    keys = keys_of(recipe.settings_type, "reef", recipe=True)
    title = f"## Settings of recipe `{recipe.name}` (`{path}`)"  # type: ignore[attr-defined]
    return f"{title}\n\n{recipe.title}. They stand in the section `reef:`.\n\n{_table(keys)}\n"  # type: ignore[attr-defined]


def _table(keys: Iterable[Key]) -> str:
    rows = [
        (code(key.dotted), code(_plain(key.default)), describe(key.annotation), field_docs(key.owner).get(key.name, ""))
        for key in keys
    ]
    return table(("key", "default", "type", "meaning"), rows)


def _plain(value: Any) -> str:
    if value is dataclasses.MISSING:
        return ""
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=dict)
