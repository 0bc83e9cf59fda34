"""From the stream of reports to a batch of samples: admission, staleness, and the oldest batch that may train.

A report is admitted or refused once, in stream order, with a stable reason. A sample is rebuilt from its records when its
batch is taken, so the queue holds ids only. Staleness is counted per sample: the number of releases between the one that
produced it and the head; a sample that is too old is dropped alone, by name, and never takes its batch with it.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from reef_cli.core.ids import RecordId, release_step, split_weight_version
from reef_cli.core.types import Inference, Release, Report, Sample
from reef_cli.learning.contract import Recipe, Refusal
from reef_cli.learning.jobs import Entry, Queued

PAGE = 256
"""Reports read from the log at a time."""

TRIAL = "trial"
"""Tag of records that were made to judge a candidate; they are evidence about it and never teach."""


class Stream(Protocol):
    """What batching reads of the experience log."""

    def reports_after(self, scenario: str, sequence: int, limit: int) -> list[tuple[int, Report]]: ...

    def references(self, receipts: Sequence[RecordId]) -> list[Inference]: ...


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
                steps[span.version] = release_step(release_id) or 0
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
        if record.usage.get("trainable") is False:
            return Refusal(str(record.usage.get("untrainable") or "truncated_sampling"))
    steps = versions_to_steps(report.scenario, records, known)
    if any(span.version not in steps for record in records if record.tokens for span in record.tokens.spans):
        return Refusal("foreign_weights")
    return recipe.admit(report, records, steps)


def admit_new(recipe: Recipe, stream: Stream, scenario: str, after: int, known: Mapping[str, Release]) -> list[Entry]:
    """The next page of reports after a stream position, each admitted or refused."""
    page = []
    for sequence, report in stream.reports_after(scenario, after, PAGE):
        fate = admit(recipe, stream, report, known)
        if isinstance(fate, Refusal):
            page.append(Entry(report.id, sequence, None, fate.reason))
        else:
            page.append(Entry(report.id, sequence, fate.step, records=fate.records))
    return page


def stale(waiting: Sequence[Queued], head_step: int, max_staleness: int) -> list[tuple[str, str]]:
    """The waiting samples that are too old for the head, as rows of (report_id, reason) for `jobs.drop`."""
    return [
        (item.report_id, f"stale: {head_step - item.step} releases old, {max_staleness} allowed")
        for item in waiting
        if head_step - item.step > max_staleness
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
