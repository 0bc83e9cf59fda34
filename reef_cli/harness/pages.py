"""One release of a harness as a self-contained page: what changed, why it was published, what it needs, how to get it.

Everything that came from trees or evidence is escaped; the page has no script and asks for nothing from elsewhere.
"""

import difflib
import html
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from reef_cli.core.types import Release
from reef_cli.harness.merge import Change
from reef_cli.harness.resources import template
from reef_cli.harness.tree import Entry, Tree

_VERBS = {"create": "added", "update": "changed", "remove": "removed"}


def summary(changes: Sequence[Change]) -> str:
    """The "What changed" line: `added rules house; changed skill make-pdf (text)`. At most 200 characters."""
    parts = []
    for change in changes:
        entry = change.after or change.before
        assert entry is not None
        keys = f" ({', '.join(change.keys)})" if change.op == "update" else ""
        parts.append(f"{_VERBS[change.op]} {entry.kind} {change.id}{keys}")
    line = "; ".join(parts) or "no change of content"
    return line if len(line) <= 200 else f"{line[:190].rstrip('; ')} … ({len(parts)} changes)"


def page(release: Release, tree: Tree, changes: Sequence[Change], adapters: Sequence[str]) -> str:
    """The HTML of one release, compared with the harness before it."""
    state = "held, waits for a person" if release.pending else release.operation.value
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(release.recorded_at))
    facts = (when, f"step {release.step}", f"by {release.author}", release.content_id)
    meta = f'<span class="state">{_e(state)}</span> {" · ".join(map(_e, facts))}'
    body = [
        _section("Changes", "".join(_change(change) for change in changes)),
        _section("Evidence", _table([(key, _short(value)) for key, value in release.evidence.items()])),
        _section("Needs", _table([(f"{item['kind']} {item['name']}", item.get("reason", "")) for item in tree.requires])),
        _section("Entries", _table([(entry.id, entry.kind) for entry in tree])),
        _section(
            "Get it",
            "".join(
                f"<pre>reef harness install --adapter {_e(name)} --release {_e(release.release_id)}</pre>" for name in adapters
            ),
        ),
    ]
    text = template("pages", "release.html")
    values = {
        "TITLE": _e(f"{release.scenario}: harness {release.release_id}"),
        "META": meta,
        "SUMMARY": _e(summary(changes)),
        "BODY": "\n".join(filter(None, body)),
    }
    # One pass, so that nothing that was put in can be taken for a placeholder.
    pieces = text.split("@")
    return "".join(values.get(piece, piece) if index % 2 else piece for index, piece in enumerate(pieces))


def _e(text: object) -> str:
    return html.escape(str(text))


def _section(title: str, inner: str) -> str:
    return f"<h2>{title}</h2>\n{inner}" if inner else ""


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{_e(name)}</th><td>{_e(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>" if rows else ""


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 400 else text[:400] + " …"


def _change(change: Change) -> str:
    before, after = _lines(change.before), _lines(change.after)
    lines = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    shown = "".join(_line(line) for line in lines[:400])
    return f"<h3>{_VERBS[change.op]} <code>{_e(change.id)}</code></h3><pre>{shown}</pre>"


def _line(line: str) -> str:
    kind = {"+": "add", "-": "del"}.get(line[:1])
    return f'<span class="{kind}">{_e(line)}</span>' if kind else _e(line) + "\n"


def _lines(entry: Entry | None) -> list[str]:
    if entry is None:
        return []
    rest: Mapping[str, Any] = {key: value for key, value in entry.config.items() if key != "text"}
    head = json.dumps(rest, indent=1, ensure_ascii=False, sort_keys=True).splitlines() if rest else []
    return [f"kind: {entry.kind}", *head, *entry.text.splitlines()]
