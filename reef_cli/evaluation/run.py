"""`run_suite`: any releases over a suite, for `reef eval`: means with intervals, paired differences, cost; resumable.

Each item is asked of all releases before the next, the first to answer rotating, with one seed per item. Answers go to a JSON
lines state file as they come; started again with the same suite and sampling, a run asks only what is missing.
"""

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from reef_cli.core.errors import ConfigError, EvaluationError
from reef_cli.core.ports import Answer, Answering
from reef_cli.core.types import Release
from reef_cli.evaluation.asking import Asked, Asker
from reef_cli.evaluation.decide import interval
from reef_cli.evaluation.intervals import of_scores
from reef_cli.evaluation.suite import Item, Suite
from reef_cli.evaluation.text import printable

BASE = "base"


@dataclass(frozen=True, slots=True)
class Row:
    """One answer of one release."""

    release: str
    item: str
    score: float
    reason: str
    output_tokens: int
    finish: str
    text: str
    tokens: str = ""
    """Digest of the output token ids, empty where the engine gives none: equal digests are equal tokens, which text is not."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One release over the suite. `interval` covers `mean` at 1 - alpha; `by_tag` maps a tag to (mean, items)."""

    release: str
    items: int
    missing: int
    mean: float | None
    interval: tuple[float, float]
    output_tokens: int
    by_tag: Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A release against the first one on the items both answered.

    `interval` holds at any stopping time, each bound at alpha, so that `result` is `better` when it lies above 0.
    """

    release: str
    against: str
    pairs: int
    wins: int
    losses: int
    ties: int
    mean: float
    interval: tuple[float, float]
    result: str


@dataclass(frozen=True, slots=True)
class Report:
    """What `reef eval` shows. `missing` lists (release, item, reason)."""

    suite: str
    digest: str
    split: str
    alpha: float
    summaries: tuple[Summary, ...]
    differences: tuple[Difference, ...]
    rows: tuple[Row, ...]
    missing: tuple[tuple[str, str, str], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def label(release: Release | None) -> str:
    """What a release is called in reports; None is the engine's base model."""
    return release.release_id if release is not None else BASE


class _State:
    """The answers so far, on disk when there is a path. One writer: the run."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        lines = _whole_lines(path)
        if lines:
            self._resume(path, lines, header)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w" if not lines else "a", encoding="utf-8")
        if not lines:
            self._write(header)

    def _resume(self, path: Path, lines: Sequence[str], header: Mapping[str, Any]) -> None:
        try:
            known, *rows = [json.loads(line) for line in lines]
            parsed = [Row(**row) for row in rows]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is no state of an evaluation", why=str(error), hint="name another file") from error
        if known != dict(header):
            changed = sorted(key for key in header if not isinstance(known, dict) or known.get(key) != header[key])
            raise ConfigError(f"{path} belongs to another run", why=f"{', '.join(changed)} differ", hint="name another file")
        self.rows = {(row.release, row.item): row for row in parsed}

    def add(self, row: Row) -> None:
        self.rows[row.release, row.item] = row
        self._write(asdict(row))

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _whole_lines(path: Path) -> list[str]:
    """The complete lines of a state file; a torn last one (killed while writing) is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.decode("utf-8").splitlines()


async def run_suite(
    answering: Answering,
    suite: Suite,
    releases: Sequence[Release | None],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    alpha: float = 0.05,
    concurrency: int = 8,
    state: Path | None = None,
    asker: Asker | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Answers of every release to every item. `EvaluationError` when nothing at all could be answered; `ConfigError` for a
    state file of another run. The first release is what the others are compared with."""
    names = [label(release) for release in releases]
    if not names or len(set(names)) != len(names):
        raise ConfigError("an evaluation needs at least one release, each once", why=f"got {names}")
    asker = asker or Asker(answering, max_new_tokens, temperature, suite.digest)
    header = {
        "state": 1,
        "suite": suite.digest,
        "split": suite.split,
        "max_new_tokens": asker.max_new_tokens,
        "temperature": asker.temperature,
    }
    store = await asyncio.to_thread(_State, state, header)
    try:
        missing = await _ask_all(asker, suite.items, releases, store, concurrency, on_progress)
    finally:
        store.close()
    if missing and not store.rows:
        raise EvaluationError("no item got an answer", why=missing[0][2], hint="check the engine and start again")
    return await asyncio.to_thread(_report, suite, names, store.rows, tuple(missing), alpha)


async def _ask_all(
    asker: Asker,
    items: Sequence[Item],
    releases: Sequence[Release | None],
    store: _State,
    concurrency: int,
    on_progress: Callable[[int, int], None] | None,
) -> list[tuple[str, str, str]]:
    gate = asyncio.Semaphore(max(1, concurrency))
    missing: list[tuple[str, str, str]] = []
    total = len(items) * len(releases)
    done = 0

    async def one(index: int, item: Item) -> None:
        nonlocal done
        async with gate:
            turn = index % len(releases)
            for release in (*releases[turn:], *releases[:turn]):
                name = label(release)
                if (name, item.id) not in store.rows:
                    asked = await asker.ask(item, release)
                    row = _row(name, item, asked)
                    if row is not None:
                        store.add(row)
                    else:
                        missing.append((name, item.id, asked.missing or ""))
                done += 1
                if on_progress is not None:
                    on_progress(done, total)

    async with asyncio.TaskGroup() as group:
        for index, item in enumerate(items):
            group.create_task(one(index, item))
    return sorted(missing)


def _row(name: str, item: Item, asked: Asked) -> Row | None:
    if asked.answer is None or asked.grade is None:
        return None
    text = printable(asked.answer.text, 2000)
    return Row(
        name,
        item.id,
        asked.grade.score,
        asked.grade.reason,
        asked.answer.output_tokens,
        asked.answer.finish,
        text,
        _tokens(asked.answer),
    )


def _tokens(answer: Answer) -> str:
    if answer.completion is None:
        return ""
    ids = ",".join(map(str, answer.completion.output_ids))
    return f"sha256:{hashlib.sha256(ids.encode()).hexdigest()[:32]}"


def _report(
    suite: Suite,
    names: Sequence[str],
    rows: Mapping[tuple[str, str], Row],
    missing: tuple[tuple[str, str, str], ...],
    alpha: float,
) -> Report:
    summaries = tuple(_summary(suite, name, rows, alpha) for name in names)
    differences = tuple(_difference(suite, name, names[0], rows, alpha) for name in names[1:])
    kept = tuple(rows[name, item.id] for name in names for item in suite.items if (name, item.id) in rows)
    return Report(suite.name, suite.digest, suite.split, alpha, summaries, differences, kept, missing)


def _summary(suite: Suite, name: str, rows: Mapping[tuple[str, str], Row], alpha: float) -> Summary:
    answered = [(item, rows[name, item.id]) for item in suite.items if (name, item.id) in rows]
    scores = [row.score for _, row in answered]
    tags = sorted({tag for item, _ in answered for tag in item.tags})
    by_tag = {tag: [row.score for item, row in answered if tag in item.tags] for tag in tags}
    return Summary(
        name,
        len(answered),
        len(suite.items) - len(answered),
        math.fsum(scores) / len(scores) if scores else None,
        of_scores(scores, alpha),
        sum(row.output_tokens for _, row in answered),
        {tag: (math.fsum(values) / len(values), len(values)) for tag, values in by_tag.items()},
    )


def _difference(suite: Suite, name: str, against: str, rows: Mapping[tuple[str, str], Row], alpha: float) -> Difference:
    both = [item.id for item in suite.items if (name, item.id) in rows and (against, item.id) in rows]
    values = [rows[name, item].score - rows[against, item].score for item in both]
    wins, losses = sum(value > 0 for value in values), sum(value < 0 for value in values)
    mean = math.fsum(values) / len(values) if values else 0.0
    low, high = interval(values, 2 * alpha)
    result = "better" if low > 0 else "worse" if high < 0 else "open"
    return Difference(name, against, len(values), wins, losses, len(values) - wins - losses, mean, (low, high), result)
