"""Which harness stood around the model when a record was made, so that weights never learn from it as if another had.

The two heads of a scenario move independently, so the weights that answered say nothing about the harness. An installed agent
names its release in the tag `harness`; without it a record was made under the harness that was in force at its time. Two
releases with the same content are the same harness.
"""

from collections.abc import Iterable, Mapping, Sequence

from reef_cli.core.types import Inference, Release, Surface
from reef_cli.learning.jobs import Queued

TAG = "harness"
REASON = "other_harness"
NONE = ""
"""Stands for no harness: before the first one, and after going back to the creation release."""


def _harnesses(chain: Iterable[Release]) -> list[Release]:
    """The releases that changed the harness, oldest first."""
    return sorted((r for r in chain if r.surface is Surface.HARNESS and not r.pending), key=lambda release: release.step)


def _content(release: Release | None) -> str:
    return NONE if release is None or release.kind != "harness" else release.content_id


def in_force(chain: Iterable[Release]) -> str:
    """Content of the harness in force now."""
    return _content(next(reversed(_harnesses(chain)), None))


def made_under(record: Inference, known: Mapping[str, Release]) -> Release | None:
    """The harness release a record was made under; None for no harness. `KeyError` when it names one that is not known."""
    if (named := record.tags.get(TAG)) is not None:
        if (found := known[named]).surface is not Surface.HARNESS:
            raise KeyError(named)
        return found
    return next((r for r in reversed(_harnesses(known.values())) if r.recorded_at <= record.created_at), None)


def fault(records: Sequence[Inference], known: Mapping[str, Release]) -> str | None:
    """Why records may not train weights now, or None: one of them was made under another harness than the one in force."""
    now = in_force(known.values())
    try:
        return REASON if any(_content(made_under(record, known)) != now for record in records) else None
    except KeyError:
        return REASON


def step(records: Sequence[Inference], known: Mapping[str, Release]) -> int | None:
    """Step of the oldest harness records were made under, from which their age is counted; None when one is not known."""
    try:
        found = [made_under(record, known) for record in records]
    except KeyError:
        return None
    return min((release.step if release else 0 for release in found), default=0)


def moved(waiting: Sequence[Queued], chain: Sequence[Release]) -> list[tuple[str, str]]:
    """Rows for `jobs.drop` of waiting samples whose harness was replaced while they waited."""
    now = in_force(chain)
    return [(item.report_id, REASON) for item in waiting if item.harness != now]
