"""How steps reach users: the deployment's policy, and what a chain says about its last full evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

from reef_cli.core.types import Cadence, Operation, Release


@dataclass(frozen=True, slots=True)
class Policy:
    """How winners are released, and how much of the trainer's past is kept.

    `keep_checkpoints` counts trainer states besides those of the head, the last gated release and held candidates.
    """

    cadence: Cadence
    review: bool
    gate_every: int
    keep_checkpoints: int = 3


def last_gated(chain: Sequence[Release]) -> Release:
    """The newest release with the full evaluation behind it, else the creation release. `chain` is newest first."""
    published = [release for release in chain if not release.pending]
    return next((release for release in published if release.gated), published[-1])


def steps_since_gate(chain: Sequence[Release]) -> int:
    """Training releases at the head of the chain that no full evaluation has judged yet."""
    count = 0
    for release in (release for release in chain if not release.pending):
        if release.gated or release.operation is not Operation.TRAINING:
            break
        count += 1
    return count
