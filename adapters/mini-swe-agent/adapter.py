"""mini-SWE-agent has one file: rules and skills become part of its system template, quoted against its template language."""

import json
from collections.abc import Sequence
from pathlib import Path

from reef_cli.harness.formats import merged
from reef_cli.harness.render import Rendered
from reef_cli.harness.trajectory import Trajectory, of_chat
from reef_cli.harness.tree import Tree

DEFAULT = "You are a helpful assistant that can interact with a computer.\n"


def finish(out: Rendered, tree: Tree) -> None:
    def take(name: str) -> str:
        return out.files.pop(name).data.decode() if name in out.files else ""

    parts = [take("reef-system.md") or DEFAULT, take("reef-append.md"), take("reef-rules.md")]
    live = [entry for entry in tree.of_kind("skill") if not entry.config.get("disabled")]
    parts += [f"## Skill {entry.id}: {entry.config['description']}\n\n{entry.text}\n" for entry in live]
    text = "\n".join(part for part in parts if part)
    quoted = "{% raw %}" + text.replace("{% endraw %}", "") + "{% endraw %}"
    out.documents["primary"] = merged(out.documents.get("primary", {}), {"agent": {"system_template": quoted}})


def read_trajectory(files: Sequence[Path], _output: str) -> Trajectory:
    for path in reversed(files):
        try:
            return of_chat(json.loads(path.read_bytes())["messages"])
        except (ValueError, KeyError, TypeError):
            continue
    return Trajectory()
