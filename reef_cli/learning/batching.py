"""From the stream of reports to a batch of samples: admission, staleness, groups, and the oldest batch that may train.

A report is admitted or refused once, in stream order, with a stable reason. A sample is rebuilt from its records when its batch
is taken, so the queue holds ids only. Staleness is counted per sample: the number of releases of the recipe's surface with
other content between the one that made it and the head; a sample that is too old is dropped by name and never takes its batch
with it, only its group, which could not be completed any more.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from reef_cli.core.ids import RecordId, split_weight_version
from reef_cli.core.types import Inference, Operation, Release, Report, Sample, Surface
from reef_cli.experience.eligibility import TRIAL
from reef_cli.learning import coupling
from reef_cli.learning.contract import Grouping, Recipe, Refusal
from reef_cli.learning.jobs import Entry, Queued

PAGE = 256
"""Reports read from the log at a time."""


class Stream(Protocol):
    """What batching reads of the experience log."""

    def reports_after(self, scenario: str, sequence: int, limit: int) -> list[tuple[int, Report]]: ...

    def references(self, receipts: Sequence[RecordId]) -> list[Inference]: ...


def by_id(chain: Iterable[Release]) -> dict[str, Release]:
    """The releases records may name. A held one that answered as a canary keeps its own id here after its promotion."""
    releases = list(chain)
    promoted = [release for release in releases if release.operation is Operation.PROMOTE and release.source_release_id]
    return {**{str(r.source_release_id): r for r in promoted}, **{r.release_id: r for r in releases}}


def versions_to_steps(scenario: str, records: Sequence[Inference], known: Mapping[str, Release]) -> dict[str, int]:
    """Chain step of every weight version found in the records; versions of other chains are left out.

    A label without a release (`base`) stands for whatever release answered the record.
    """
    steps: dict[str, int] = {}
    for record in records:
        for span in record.tokens.spans if record.tokens else ():
            named = split_weight_version(span.version)
            release_id = named[1] if named and named[0] == scenario else None if named else record.release_id
            if release_id is not None and release_id in known:
                steps[span.version] = known[release_id].step
    return steps


def admit(recipe: Recipe, stream: Stream, report: Report, known: Mapping[str, Release]) -> Sample | Refusal:
    """What a report is worth to the recipe. Generic refusals come first, then the recipe's own."""
    if report.metadata.get("eligible") is False:
        return Refusal("opted_out")
    records = stream.references(report.references)
    if len(records) != len(report.references):
        return Refusal("record_evicted")
    for record in records:
        if TRIAL in record.tags:
            return Refusal("trial")
        if not record.complete:
            return Refusal("incomplete")
        if recipe.surface is Surface.WEIGHTS and record.usage.get("trainable") is False:
            return Refusal(str(record.usage.get("untrainable") or "truncated_sampling"))
    steps = versions_to_steps(report.scenario, records, known)
    if any(span.version not in steps for record in records if record.tokens for span in record.tokens.spans):
        return Refusal("foreign_weights")
    if recipe.surface is Surface.WEIGHTS and (reason := coupling.fault(records, known)) is not None:
        return Refusal(reason)
    fate = recipe.admit(report, records, steps)
    if recipe.surface is Surface.HARNESS and isinstance(fate, Sample) and records:
        step = coupling.step(records, known)
        return Refusal("unknown_harness") if step is None else replace(fate, step=step)
    return fate


def admit_new(recipe: Recipe, stream: Stream, scenario: str, after: int, known: Mapping[str, Release]) -> list[Entry]:
    """The next page of reports after a stream position, each admitted or refused."""
    page, harness = [], coupling.in_force(known.values())
    for sequence, report in stream.reports_after(scenario, after, PAGE):
        fate = admit(recipe, stream, report, known)
        if isinstance(fate, Refusal):
            page.append(Entry(report.id, sequence, None, fate.reason))
        else:
            page.append(replace(_entry(recipe, report, sequence, fate), harness=harness))
    return page


def _entry(recipe: Recipe, report: Report, sequence: int, sample: Sample) -> Entry:
    if not isinstance(recipe, Grouping):
        return Entry(report.id, sequence, sample.step, records=sample.records)
    group = recipe.group(sample)
    return Entry(
        report.id, sequence, sample.step, records=sample.records, group=group.key, size=group.size, member=group.member
    )


def lag(chain: Sequence[Release], step: int, head_step: int) -> int:
    """Releases after `step` up to `head_step` that changed what is served; `chain` is the surface's lane, newest first.

    A promotion of the same content or a rollback to it is a release, but its weights are those that made the sample.
    """
    published = sorted((release for release in chain if not release.pending), key=lambda release: release.step)
    return sum(
        later.content_id != earlier.content_id for earlier, later in pairwise(published) if step < later.step <= head_step
    )


def stale(
    waiting: Sequence[Queued], head_step: int, max_staleness: int, chain: Sequence[Release] | None = None
) -> list[tuple[str, str]]:
    """The waiting samples that are too old for the head, as rows of (report_id, reason) for `jobs.drop`.

    Without a `chain` every release counts. The rest of a stale sample's group goes with it, under a reason of its own.
    """
    rows: list[tuple[str, str]] = []
    broken: set[str] = set()
    for item in waiting:
        age = head_step - item.step
        if age > max_staleness and chain is not None:
            age = lag(chain, item.step, head_step)
        if age > max_staleness:
            rows.append((item.report_id, f"stale: {age} releases old, {max_staleness} allowed"))
            broken.add(item.group)
    gone = {report_id for report_id, _ in rows}
    rest = (item for item in waiting if item.group and item.group in broken and item.report_id not in gone)
    return rows + [(item.report_id, "group_broken: another member is stale") for item in rest]


def groups(waiting: Sequence[Queued]) -> list[list[Queued]]:
    """The waiting samples by group, in the order of the groups' first members; a sample without a group is its own."""
    found: dict[str, list[Queued]] = defaultdict(list)
    for item in waiting:
        found[f"group {item.group}" if item.group else f"alone {item.report_id}"].append(item)
    return list(found.values())


def choose(waiting: Sequence[Queued], batch_size: int, *, short: bool = False) -> list[Queued]:
    """The oldest whole groups that fill a batch, empty when they do not; `short` takes what there is of whole groups.

    A sample that wants a batch of its own (size 0) goes first.
    """
    chosen: list[Queued] = []
    found = groups(waiting)
    if (alone := next((group for group in found if group[0].size == 0), None)) is not None:
        return alone
    for group in found:
        if len(group) >= group[0].size and len(chosen) < batch_size:
            chosen += group
    return chosen if short or len(chosen) >= batch_size else []


def timed_out(waiting: Sequence[Queued], now: float, patience_s: float) -> list[tuple[str, str]]:
    """Rows for `jobs.drop` of groups whose last member came more than `patience_s` ago and that are still incomplete."""
    return [
        (item.report_id, f"group_timeout: {len(group)} of {group[0].size} after {patience_s:g} s")
        for group in groups(waiting)
        if len(group) < group[0].size and now - max(item.at for item in group) > patience_s
        for item in group
    ]


def rebuild(
    recipe: Recipe, stream: Stream, reports: Sequence[Report], known: Mapping[str, Release]
) -> tuple[list[Sample], list[tuple[str, str]]]:
    """Samples of reports that were admitted before, and rows of those that no longer make one (evicted since)."""
    samples: list[Sample] = []
    lost: list[tuple[str, str]] = []
    for report in reports:
        fate = admit(recipe, stream, report, known)
        if isinstance(fate, Refusal):
            lost.append((report.id, fate.reason))
        else:
            samples.append(fate)
    return samples, lost
