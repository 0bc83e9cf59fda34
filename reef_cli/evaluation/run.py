"""`run_suite`: any releases over a suite, for `reef eval`: means with intervals, paired differences, cost; resumable.

Each item is asked of all releases before the next, the first to answer rotating, with one seed per item. Answers go to a JSON
lines state file as they come; started again with the same suite and sampling, a run asks only what is missing. A pairwise item
scores every release against the first one, which gets 0.5.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ConfigError, EvaluationError, ReefError
from reef_cli.core.ports import Answering
from reef_cli.core.types import Release
from reef_cli.evaluation.asking import Asked, Asker
from reef_cli.evaluation.decide import interval
from reef_cli.evaluation.grade import Grade
from reef_cli.evaluation.intervals import of_scores
from reef_cli.evaluation.judging import Pairwise
from reef_cli.evaluation.rows import Row, State, row_of
from reef_cli.evaluation.suite import Item, Suite

BASE = "base"
Progress = Callable[[int, int], None]


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
    prompt_tokens: int = 0
    money: float = 0.0


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
    """What `reef eval` shows. `missing` lists (release, item, reason); `spent` is what this run used, resumed answers aside."""

    suite: str
    digest: str
    split: str
    alpha: float
    summaries: tuple[Summary, ...]
    differences: tuple[Difference, ...]
    rows: tuple[Row, ...]
    missing: tuple[tuple[str, str, str], ...]
    spent: Mapping[str, Any] = field(default_factory=dict, compare=False)
    budget_spent: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def label(release: Release | None) -> str:
    """What a release is called in reports; None is the engine's base model."""
    return release.release_id if release is not None else BASE


def header_of(suite: Suite, asker: Asker, first: str) -> dict[str, Any]:
    """What answers must have in common to stand in one state file."""
    compared = any(isinstance(item.grader, Pairwise) for item in suite.items)
    return {
        "state": 1,
        "suite": suite.digest,
        "split": suite.split,
        "max_new_tokens": asker.max_new_tokens,
        "temperature": asker.temperature,
        **({"against": first} if compared else {}),
    }


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
    on_progress: Progress | None = None,
) -> Report:
    """Answers of every release to every item. `EvaluationError` when nothing at all could be answered; `ConfigError` for a
    state file of another run. The first release is what the others are compared with."""
    names = [label(release) for release in releases]
    if not names or len(set(names)) != len(names):
        raise ConfigError("an evaluation needs at least one release, each once", why=f"got {names}")
    asker = asker or Asker(answering, max_new_tokens, temperature, suite.digest)
    store = await asyncio.to_thread(State, state, header_of(suite, asker, names[0]))
    run = _Run(asker, releases, store, asyncio.Semaphore(max(1, concurrency)))
    try:
        await run.all(suite.items, on_progress)
    finally:
        store.close()
    missing = tuple(sorted(run.missing))
    if missing and not store.rows and not run.spent:
        raise EvaluationError("no item got an answer", why=missing[0][2], hint="check the engine and start again")
    facts = (asker.budget.used.to_json(), run.spent)
    return await asyncio.to_thread(_report, suite, names, store.rows, missing, alpha, *facts)


class _Run:
    """One run under way: asks what the state lacks and writes it down."""

    def __init__(self, asker: Asker, releases: Sequence[Release | None], store: State, gate: asyncio.Semaphore) -> None:
        self._asker = asker
        self._releases = {label(release): release for release in releases}
        self._names = list(self._releases)
        self._store = store
        self._gate = gate
        self.missing: list[tuple[str, str, str]] = []
        self.spent = False
        self._done = 0

    async def all(self, items: Sequence[Item], on_progress: Progress | None) -> None:
        total = len(items) * len(self._names)

        async def one(index: int, item: Item) -> None:
            async with self._gate:
                async for _ in self._item(index, item):
                    self._done += 1
                    if on_progress is not None:
                        on_progress(self._done, total)

        found: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for index, item in enumerate(items):
                    group.create_task(one(index, item))
        except* ReefError as failed:
            # What ended the run is one thing, however many items met it.
            found = failed.exceptions[0]
        if found is not None:
            raise found

    async def _item(self, index: int, item: Item) -> AsyncIterator[str]:
        """Every release on one item, yielding after each."""
        turn = index % len(self._names)
        outcomes: dict[str, Asked] = {}
        for name in (*self._names[turn:], *self._names[:turn]):
            known = self._store.rows.get((name, item.id))
            outcomes[name] = known.asked() if known else await self._asker.ask(item, self._releases[name])
            if known is None and not isinstance(item.grader, Pairwise):
                self._keep(name, item, outcomes[name])
            yield name
        if isinstance(item.grader, Pairwise):
            await self._compare(item, outcomes)

    async def _compare(self, item: Item, outcomes: Mapping[str, Asked]) -> None:
        first = outcomes[self._names[0]]
        for name in self._names:
            if (name, item.id) in self._store.rows:
                continue
            if name == self._names[0]:
                par = Grade(0.5, "what the others are compared with")
                self._keep(name, item, Asked(first.answer, par if first.answer else None, first.missing, unpaid=first.unpaid))
            else:
                _, second = await self._asker.compare(item, first, outcomes[name])
                self._keep(name, item, second)

    def _keep(self, name: str, item: Item, asked: Asked) -> None:
        row = row_of(name, item.id, asked, self._money(asked))
        if row is not None:
            self._store.add(row)
            return
        self.spent = self.spent or asked.unpaid
        self.missing.append((name, item.id, asked.missing or "what it is compared with is missing"))

    def _money(self, asked: Asked) -> float:
        answer = asked.answer
        if answer is None:
            return 0.0
        price = self._asker.bench.price
        return answer.cost if answer.cost is not None else price.of(answer.prompt_tokens, answer.output_tokens)


def _report(
    suite: Suite,
    names: Sequence[str],
    rows: Mapping[tuple[str, str], Row],
    missing: tuple[tuple[str, str, str], ...],
    alpha: float,
    spent: Mapping[str, Any],
    budget_spent: bool,
) -> Report:
    summaries = tuple(_summary(suite, name, rows, alpha) for name in names)
    differences = tuple(_difference(suite, name, names[0], rows, alpha) for name in names[1:])
    kept = tuple(rows[name, item.id] for name in names for item in suite.items if (name, item.id) in rows)
    facts = (suite.name, suite.digest, suite.split, alpha)
    return Report(*facts, summaries, differences, kept, missing, spent, budget_spent)


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
        sum(row.prompt_tokens for _, row in answered),
        math.fsum(row.money for _, row in answered),
    )


def _difference(suite: Suite, name: str, against: str, rows: Mapping[tuple[str, str], Row], alpha: float) -> Difference:
    both = [item.id for item in suite.items if (name, item.id) in rows and (against, item.id) in rows]
    values = [rows[name, item].score - rows[against, item].score for item in both]
    wins, losses = sum(value > 0 for value in values), sum(value < 0 for value in values)
    mean = math.fsum(values) / len(values) if values else 0.0
    low, high = interval(values, 2 * alpha)
    result = "better" if low > 0 else "worse" if high < 0 else "open"
    return Difference(name, against, len(values), wins, losses, len(values) - wins - losses, mean, (low, high), result)
