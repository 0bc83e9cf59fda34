"""From one scored receipt to one sample: the checks every recipe that learns from scores makes, with their stable reasons."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reef_cli.core.types import Inference, Report, Sample
from reef_cli.learning.contract import Refusal


def scored_sample(
    report: Report,
    records: Sequence[Inference],
    step_of: Mapping[str, int],
    *,
    max_temperature: float,
    extras: Mapping[str, Any] | None = None,
) -> Sample | Refusal:
    """One sample from a report with a finite score that cites one receipt with the engine's own sound trace."""
    if report.score is None:
        return Refusal("needs_score")
    if not math.isfinite(report.score):
        return Refusal("score_not_finite")
    if len(records) != 1:
        return Refusal("needs_single_receipt")
    record = records[0]
    tokens = record.tokens
    if not record.complete:
        return Refusal("incomplete")
    if tokens is None:
        return Refusal("no_tokens")
    fault = tokens.fault()
    if fault is not None:
        return Refusal(fault)
    if not any(tokens.loss_mask):
        return Refusal("nothing_trainable")
    if not 0 < tokens.temperature <= max_temperature:
        return Refusal("temperature_out_of_range")
    producing = tuple(dict.fromkeys(span.version for span in tokens.spans))
    if any(version not in step_of for version in producing):
        return Refusal("unknown_weight_version")
    return Sample(
        id=report.id,
        records=(record.id,),
        tokens=tokens,
        reward=float(report.score),
        producing=producing,
        step=min(step_of[version] for version in producing),
        created_at=report.created_at,
        extras=dict(extras or {}),
    )
