"""What a person reads before deciding on a release: verdict, numbers, guards, sample answers side by side, and a diff.

Everything shown came from models or from files they wrote; it passes through `output`, which makes it harmless.
"""

import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reef_cli.commands import output
from reef_cli.control.plain import one_line, plain

_SAMPLES = 3
_NARROW = 72
_COLOURS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}


def draw_evidence(evidence: Any, *, samples: int = _SAMPLES) -> None:
    """The numbers behind a decision; what no gate made is listed as it is."""
    if not isinstance(evidence, Mapping) or not evidence:
        return
    judged = _judged(evidence)
    output.pairs([*_facts(judged), *_job(evidence)])
    metrics = evidence.get("metrics")
    if isinstance(metrics, Mapping) and metrics:
        print()
        output.pairs((str(name), figure(value)) for name, value in sorted(metrics.items()))
    rows = [row for row in judged.get("samples") or () if isinstance(row, Mapping)]
    for row in rows[:samples]:
        print()
        draw_sample(row)


def _judged(evidence: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the gate said. A job's release holds it inside, beside what the job adds."""
    verdict = evidence.get("verdict")
    inner = verdict.get("evidence") if isinstance(verdict, Mapping) else None
    return {"reason": evidence.get("reason"), **inner} if isinstance(inner, Mapping) else evidence


def _job(evidence: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """What a job adds to its verdict."""
    if not isinstance(evidence.get("verdict"), Mapping):
        return
    for name in ("recipe", "harness"):
        if isinstance(evidence.get(name), str):
            yield name, evidence[name]
    if consumed := evidence.get("consumed"):
        yield "learned from", f"{len(consumed)} {'report' if len(consumed) == 1 else 'reports'}"


def figure(value: object) -> object:
    """A value in few characters: numbers to four digits, counts by what was counted, lists by their items."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {figure(count)}" for key, count in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(str(figure(one)) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else value


def _facts(evidence: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    if "candidate_mean" not in evidence:
        yield from (
            (name, figure(value)) for name, value in evidence.items() if name != "samples" and value not in ("", [], {})
        )
        return
    interval, suite = evidence.get("interval") or {}, evidence.get("suite") or {}
    number = output.number
    yield "verdict", evidence.get("reason")
    yield "suite", f"{suite.get('name')}, {suite.get('split')}, {evidence.get('pairs')} of {suite.get('items')} items"
    yield "score", f"{number(evidence.get('candidate_mean'))} against {number(evidence.get('current_mean'))}"
    bounds = f"[{number(interval.get('low'))}, {number(interval.get('high'))}]"
    yield "difference", f"{number(evidence.get('difference'))} {bounds}"
    yield "outcomes", f"{evidence.get('wins')} wins, {evidence.get('losses')} losses, {evidence.get('ties')} ties"
    if evidence.get("missing"):
        yield "missing", evidence["missing"]
    for flag in (evidence.get("guards") or {}).get("flags") or ():
        yield "warning", flag
    cost = evidence.get("cost") or {}
    if cost:
        tokens = int(cost.get("prompt_tokens") or 0) + int(cost.get("output_tokens") or 0)
        yield "cost", f"{cost.get('calls')} calls, {tokens} tokens, {number(float(cost.get('money') or 0))} money"


def draw_sample(row: Mapping[str, Any]) -> None:
    """One question with both answers, beside each other where there is room."""
    print(f"{one_line(row.get('id'))}: {one_line(row.get('question'), 200)}")
    sides = [(name, row.get(name) or {}) for name in ("current", "candidate")]
    heads = [f"{name}, score {output.number(side.get('score'))}" for name, side in sides]
    texts = [plain(side.get("text") or "") for _, side in sides]
    width = shutil.get_terminal_size((100, 24)).columns
    if not output.on_terminal() or width < _NARROW:
        for head, text in zip(heads, texts, strict=True):
            print(f"  {head}:")
            print(textwrap.indent(text, "    "))
        return
    for line in beside(heads, texts, (width - 5) // 2):
        print(line)


def beside(heads: Sequence[str], texts: Sequence[str], width: int) -> list[str]:
    """Two texts as columns of `width` characters."""
    columns = []
    for head, text in zip(heads, texts, strict=True):
        lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width) or [""]]
        columns.append([head, "-" * min(width, len(head)), *lines])
    height = max(map(len, columns))
    left, right = ([*column, *[""] * (height - len(column))] for column in columns)
    return [f"{a:<{width}} | {b}".rstrip() for a, b in zip(left, right, strict=True)]


def draw_diff(answer: Mapping[str, Any]) -> None:
    """What differs between two releases, as a unified diff where the files are text."""
    changes = answer.get("changes") if isinstance(answer.get("changes"), Mapping) else answer
    files = [row for row in (changes or {}).get("files") or () if isinstance(row, Mapping)]
    if not files:
        print("the contents are the same")
        return
    print(f"{len(files)} {'file differs' if len(files) == 1 else 'files differ'}")
    for row in files:
        print(_headline(row))
        for line in plain(row.get("text") or "").splitlines():
            print(_coloured(line))


def _headline(row: Mapping[str, Any]) -> str:
    before, after = row.get("before"), row.get("after")
    sizes = " -> ".join(output.size(side["size"]) for side in (before, after) if isinstance(side, Mapping))
    digests = " -> ".join(str(side["sha256"])[:12] for side in (before, after) if isinstance(side, Mapping))
    return f"{row.get('change')} {one_line(row.get('path'))} ({sizes}, sha256 {digests})"


def _coloured(line: str) -> str:
    start = _COLOURS.get(line[:1], "")
    if not start or not output.on_terminal() or os.environ.get("NO_COLOR") or line.startswith(("+++", "---")):
        return line
    return f"{start}{line}\x1b[0m"
