"""Whether a record can train at all, before any recipe is asked. Pure functions with stable reasons.

Reasons: `eligible`, `incomplete`, `error`, `trial`, `redacted`, `no_tokens`, `greedy` or `truncated_sampling` (not the plain
policy's), a fault of the token trace (`empty_output`, `length_mismatch`, `bad_logprob`, `span_gap`, `aborted`), `not_sampled`
(nothing in the loss mask), `evicted`, `already_trained` and `already_sampled` (it belongs to a sample that was consumed, or
waits), `unknown`.
"""

from reef_cli.core.types import Inference, Report
from reef_cli.experience.redaction import TAG

TRIAL = "trial"
"""Tag of records that were made to judge a candidate; they are evidence about it and never teach."""


def eligible(record: Inference, *, needs_tokens: bool = True) -> tuple[bool, str]:
    """Whether the exchange can teach, and the reason. Recipes that change no weights need no tokens."""
    if reason := _refusal(record, needs_tokens):
        return False, reason
    return True, "eligible"


def _refusal(record: Inference, needs_tokens: bool) -> str | None:
    if not record.complete:
        return "incomplete"
    if record.error is not None:
        return "error"
    if TRIAL in record.tags:
        return "trial"
    if not needs_tokens:
        return None
    if record.usage.get("trainable") is False:
        return str(record.usage.get("untrainable") or "truncated_sampling")
    if record.tokens is None:
        return "redacted" if TAG in record.tags else "no_tokens"
    if fault := record.tokens.fault():
        return fault
    return None if any(record.tokens.loss_mask) else "not_sampled"


def opted_out(report: Report) -> bool:
    """Whether its sender said that this feedback must not train."""
    return report.metadata.get("eligible") is False


def trainable_tokens(record: Inference) -> int:
    """Output tokens of an eligible exchange that may train; 0 otherwise."""
    if record.tokens is None or not eligible(record)[0]:
        return 0
    return sum(1 for value in record.tokens.loss_mask if value)
