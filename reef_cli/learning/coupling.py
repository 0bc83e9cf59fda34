"""Which harness stood around the model when a record was made, so that weights never learn from it as if another had.

An installed agent names its release in the tag `harness`; without it a record was made under the harness that was in force at
its own release. Two releases with the same content are the same harness.
"""

from collections.abc import Iterable, Mapping, Sequence

from reef_cli.core.ids import release_step
from reef_cli.core.types import Inference, Operation, Release, Surface
from reef_cli.learning.jobs import Queued

TAG = "harness"
REASON = "other_harness"


def harness_at(chain: Iterable[Release], step: int) -> str | None:
    """Content of the harness in force after `step` releases; None before the first one and after a rollback behind it."""
    found = None
    for release in sorted(chain, key=lambda release: release.step):
        if release.pending or release.step > step:
            continue
        if release.surface is Surface.HARNESS:
            found = release.content_id
        elif release.kind == "base" and release.operation is Operation.ROLLBACK:
            found = None
    return found


def fault(records: Sequence[Inference], known: Mapping[str, Release]) -> str | None:
    """Why records may not train weights now, or None: one of them was made under another harness than the one in force."""
    chain = known.values()
    if not any(release.surface is Surface.HARNESS for release in chain) and not any(TAG in record.tags for record in records):
        return None
    now = harness_at(chain, max((release.step for release in chain), default=0))
    return REASON if any(_made_under(record, known) != now for record in records) else None


def _made_under(record: Inference, known: Mapping[str, Release]) -> str | None:
    named = record.tags.get(TAG)
    if named is None:
        return harness_at(known.values(), release_step(record.release_id or "") or 0)
    return known[named].content_id if named in known else f"unknown {named}"


def moved(waiting: Sequence[Queued], chain: Sequence[Release], head_step: int) -> list[tuple[str, str]]:
    """Rows for `jobs.drop` of waiting samples whose harness was replaced while they waited."""
    if not any(release.surface is Surface.HARNESS for release in chain):
        return []
    now = harness_at(chain, head_step)
    return [(item.report_id, REASON) for item in waiting if harness_at(chain, item.step) != now]
