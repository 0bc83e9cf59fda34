"""Several exchanges of one conversation as one trace: what the policy said in each turn trains, what came between does not.

Only exchanges whose prompts extend each other token for token can be joined. Chat templates that rewrite the past (leaving out
earlier reasoning, say) break that, and then the tokens the policy once saw are not those of one sequence.
"""

from collections.abc import Sequence
from dataclasses import replace

from reef_cli.core.types import TokenSpan, TokenTrace


def joined(traces: Sequence[TokenTrace]) -> TokenTrace | None:
    """One trace from those of consecutive turns, oldest first; None when a later prompt does not extend what came before."""
    whole = traces[0]
    for later in traces[1:]:
        history = (*whole.prompt_ids, *whole.output_ids)
        if later.prompt_ids[: len(history)] != history or later.temperature != whole.temperature:
            return None
        whole = _extended(whole, later, later.prompt_ids[len(history) :])
    return whole


def _extended(whole: TokenTrace, later: TokenTrace, between: tuple[int, ...]) -> TokenTrace:
    """`later`'s answer after `between`, the tokens of tools and users; they count as read by the weights that answered next."""
    n, start = len(whole.output_ids), len(whole.output_ids) + len(between)
    read = (TokenSpan(later.spans[0].version, n, start),) if between else ()
    said = tuple(TokenSpan(span.version, span.start + start, span.end + start) for span in later.spans)
    return replace(
        whole,
        output_ids=(*whole.output_ids, *between, *later.output_ids),
        logprobs=(*whole.logprobs, *(0.0,) * len(between), *later.logprobs),
        loss_mask=(*whole.loss_mask, *(0,) * len(between), *later.loss_mask),
        spans=(*whole.spans, *read, *said),
        finish=later.finish,
    )
