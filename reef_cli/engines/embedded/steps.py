"""One step: which tokens run, and what their logits mean for the requests.

Decoding requests come first in the flat row, sorted by slot; pieces of prompts follow, oldest request first, up to the chunk.
A request whose last token ran gets its next token; prompt log-probs are read off the rows where they were asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reef_cli.engines.embedded.adapters import Adapter, Rows
from reef_cli.engines.embedded.attention import Piece, plan
from reef_cli.engines.embedded.model import Model
from reef_cli.engines.embedded.request import Request
from reef_cli.engines.embedded.sampling import Row, choose
from reef_cli.engines.embedded.seats import Seats


@dataclass(slots=True)
class _Part:
    """One request's stretch `[start, end)` of its tokens, at `row` of the flat row."""

    request: Request
    start: int
    end: int
    row: int

    @property
    def ends(self) -> bool:
        return self.end == self.request.length

    def prompt_positions(self) -> range:
        """Positions whose next prompt token's log-prob is asked for and not known yet."""
        wish = self.request.wish
        if not wish.return_logprob or wish.logprob_start_len < 0:
            return range(0)
        first = wish.logprob_start_len + len(self.request.input_logprobs)
        return range(max(first, self.start), min(self.end, len(wish.input_ids) - 1))


def compute(model: Model, seats: Seats, running: Sequence[Request], chunk: int, version: str) -> list[Request]:
    """Run one step over `running` (admission order); returns the requests that got a token."""
    parts = _compose(running, chunk)
    tokens = [token for part in parts for token in _tokens(part)]
    decodes = [(part.request.slot or 0, part.start) for part in parts if part.request.decoding]
    pieces = [Piece(part.request.slot or 0, part.start, part.end, part.row) for part in parts[len(decodes) :]]
    keep: list[int] = []
    for part in parts:
        keep.extend(part.row + position - part.start for position in part.prompt_positions())
        if part.ends:
            keep.append(part.row + part.end - part.start - 1)
    logits = model.forward(tokens, plan(decodes, pieces), _adapter_rows(parts), keep)
    return _settle(model, seats, parts, logits, version)


def _compose(running: Sequence[Request], chunk: int) -> list[_Part]:
    parts = [_Part(each, each.filled, each.filled + 1, 0) for each in running if each.decoding]
    parts.sort(key=lambda part: part.request.slot or 0)
    for request in running:
        if not request.decoding and chunk > 0:
            end = min(request.length, request.filled + chunk)
            chunk -= end - request.filled
            parts.append(_Part(request, request.filled, end, 0))
    row = 0
    for part in parts:
        part.row = row
        row += part.end - part.start
    return parts


def _tokens(part: _Part) -> list[int]:
    request = part.request
    if request.decoding:
        return request.output_ids[-1:]
    return request.tokens[part.start : part.end]


def _adapter_rows(parts: Sequence[_Part]) -> list[Rows]:
    """Rows by adapter; one adapter for the whole step needs no index."""
    found: dict[int, tuple[Adapter, list[int]]] = {}
    for part in parts:
        adapter = part.request.wish.adapter
        if adapter is not None:
            found.setdefault(adapter.number, (adapter, []))[1].extend(range(part.row, part.row + part.end - part.start))
    total = parts[-1].row + parts[-1].end - parts[-1].start
    return [Rows(adapter, torch.tensor(rows) if len(rows) < total else None) for adapter, rows in found.values()]


def _settle(model: Model, seats: Seats, parts: Sequence[_Part], logits: Tensor, version: str) -> list[Request]:
    at = 0
    last: list[int] = []
    done: list[Request] = []
    for part in parts:
        request = part.request
        positions = part.prompt_positions()
        if positions:
            _prompt_logprobs(request, positions, logits[at : at + len(positions)])
            at += len(positions)
        seats[request.slot or 0].tokens.extend(_tokens(part))
        if part.ends:
            last.append(at)
            done.append(request)
            at += 1
    for part in parts:
        part.request.filled = part.end
    chosen = choose(logits[torch.tensor(last, dtype=torch.long)], [_row(request, model.eos_ids) for request in done])
    for request, choice in zip(done, chosen, strict=True):
        request.take(choice, version, model.eos_ids, model.context_length)
    return done


def _prompt_logprobs(request: Request, positions: range, logits: Tensor) -> None:
    following = request.wish.input_ids[positions.start + 1 : positions.stop + 1]
    values = logits.log_softmax(-1).gather(1, torch.tensor(following).unsqueeze(1)).squeeze(1)
    request.input_logprobs.extend(zip(values.tolist(), following, strict=True))


def _row(request: Request, eos_ids: frozenset[int]) -> Row:
    wish = request.wish
    early = len(request.output_ids) < wish.params.min_new_tokens
    forbidden = sorted({*eos_ids, *wish.params.stop_token_ids}) if early else ()
    return Row(
        wish.params,
        wish.input_ids,
        request.output_ids,
        forbidden,
        wish.top_logprobs_num if wish.return_logprob else 0,
        wish.token_ids_logprob if wish.return_logprob else (),
    )
