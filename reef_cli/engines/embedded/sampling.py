"""Sampling parameters as the wire names them, and the choice of a token from logits.

Log-probs are of softmax(logits / temperature) after penalties and bias and before top-p, top-k and min-p cut the choice;
greedy reports them at temperature 1. The random number of a token is a hash of (seed, number of the token), so an answer
depends neither on what runs beside it nor on whether the request was interrupted. Rows are computed one by one where their
parameters differ: no row's bits depend on another's.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from reef_cli.core.errors import InvalidRequest

UNSUPPORTED = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params", "beam_width")
"""Known to the contract but not to this engine: refused by name when set, never ignored."""


@dataclass(frozen=True, slots=True)
class Params:
    """One request's sampling; field names and defaults are the wire's."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    n: int = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def cut(self) -> bool:
        return self.top_p < 1 or self.top_k > 1 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1 or self.logit_bias)


_MOST_BIAS = 1e9
"""More than any logit by far; what comes near the greatest number of the type makes log-probs that are none."""
_NAMES = tuple(field.name for field in fields(Params))


def parse(raw: Mapping[str, Any], vocab_size: int) -> Params:
    """Check a request's `sampling_params`; raises `InvalidRequest` with the wire's text for unknown keys and bad values."""
    for key in raw:
        if key not in _NAMES and key not in UNSUPPORTED:
            known = ", ".join(f"`{name}`" for name in (*_NAMES, *UNSUPPORTED))
            raise InvalidRequest(f"unknown field `{key}`, expected one of {known}")
        if key in UNSUPPORTED and raw[key] not in (None, False, "", [], {}, 1):
            raise InvalidRequest(f"`{key}` is not supported by the embedded engine")
    values = {key: value for key, value in raw.items() if key in _NAMES and value is not None}
    try:
        params = _coerce(values, vocab_size)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidRequest(f"malformed sampling_params: {error}") from error
    _check(params)
    return params


def _coerce(values: dict[str, Any], vocab_size: int) -> Params:
    stop = values.pop("stop", ())
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(str(text) for text in stop if text)
    values["stop_token_ids"] = tuple(int(token) for token in values.pop("stop_token_ids", ()))
    bias = {int(token): float(weight) for token, weight in (values.pop("logit_bias", None) or {}).items()}
    if any(not 0 <= token < vocab_size for token in bias):
        raise ValueError("logit_bias names a token outside the vocabulary")
    if not all(abs(weight) <= _MOST_BIAS for weight in bias.values()):
        raise ValueError(f"logit_bias must be in [-{_MOST_BIAS:g}, {_MOST_BIAS:g}]")
    values["logit_bias"] = tuple(bias.items())
    for name in ("max_new_tokens", "top_k", "min_new_tokens", "n"):
        if name in values:
            values[name] = int(values[name])
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        if name in values:
            values[name] = float(values[name])
    values["sampling_seed"] = int(values.get("sampling_seed", secrets.randbits(62)))
    if values.get("top_k") in (0, 1 << 30):
        values["top_k"] = -1
    return Params(**values)


def _check(params: Params) -> None:
    rules = (
        (params.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
        (0 <= params.min_new_tokens <= params.max_new_tokens, "min_new_tokens must be between 0 and max_new_tokens"),
        (0 <= params.temperature < float("inf"), "temperature must be a finite number of at least 0"),
        (0 < params.top_p <= 1, "top_p must be in (0, 1]"),
        (params.top_k == -1 or params.top_k >= 1, "top_k must be -1 (disable) or at least 1"),
        (0 <= params.min_p <= 1, "min_p must be in [0, 1]"),
        (-2 <= params.frequency_penalty <= 2, "frequency_penalty must be in [-2, 2]"),
        (-2 <= params.presence_penalty <= 2, "presence_penalty must be in [-2, 2]"),
        (0 < params.repetition_penalty <= 2, "repetition_penalty must be in (0, 2]"),
        (params.n == 1, "n must be 1: send one request per answer"),
    )
    for holds, text in rules:
        if not holds:
            raise InvalidRequest(text)


@dataclass(frozen=True, slots=True)
class Row:
    """What the choice of one token needs to know about its request."""

    params: Params
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    forbidden: Sequence[int] = ()
    """Tokens that may not come yet (end tokens before `min_new_tokens`)."""
    top: int = 0
    """How many alternatives to report."""
    wanted: Sequence[int] = ()
    """Token ids whose log-probs to report."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, its log-prob in nats, and the alternatives asked for as (log-prob, token)."""

    token: int
    logprob: float
    top: tuple[tuple[float, int], ...] = ()
    wanted: tuple[tuple[float, int], ...] = ()


def choose(logits: Tensor, rows: Sequence[Row]) -> list[Choice]:
    """One token per row of fp32 `logits [rows, vocab]`, which are changed in place."""
    for position, row in enumerate(rows):
        _adjust(logits[position], row)
    logprobs = logits.log_softmax(-1)
    greedy = logprobs.argmax(-1).tolist()
    return [_choose(logprobs[i], row, int(greedy[i])) for i, row in enumerate(rows)]


def alternatives(logprobs: Tensor, count: int) -> tuple[tuple[float, int], ...]:
    """The `count` most likely tokens of one row, most likely first."""
    if count <= 0:
        return ()
    values, tokens = logprobs.topk(min(count, logprobs.numel()))
    return tuple(zip(values.tolist(), tokens.tolist(), strict=True))


def _choose(logprobs: Tensor, row: Row, greedy: int) -> Choice:
    token = greedy if row.params.greedy else _draw(logprobs, row)
    wanted = tuple((float(logprobs[each]), each) for each in row.wanted)
    return Choice(token, float(logprobs[token]), alternatives(logprobs, row.top), wanted)


def _adjust(logits: Tensor, row: Row) -> None:
    params = row.params
    if params.penalised:
        _penalise(logits, row)
    if row.forbidden:
        logits[list(row.forbidden)] = float("-inf")
    if params.temperature > 0 and params.temperature != 1 and not params.greedy:
        logits /= params.temperature


def _penalise(logits: Tensor, row: Row) -> None:
    params = row.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), dtype=torch.long)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if row.output_ids and (params.frequency_penalty or params.presence_penalty):
        tokens, counts = torch.unique(torch.tensor(row.output_ids), return_counts=True)
        logits[tokens] -= counts * params.frequency_penalty + params.presence_penalty
    for token, weight in params.logit_bias:
        logits[token] += weight


def _draw(logprobs: Tensor, row: Row) -> int:
    point = uniform(row.params.sampling_seed, len(row.output_ids))
    if not row.params.cut:
        cumulated = logprobs.double().exp().cumsum(0)
        return _at(cumulated, point)
    probs, order = logprobs.double().exp().sort(descending=True, stable=True)
    keep = _kept(probs, row.params)
    return int(order[_at(probs[:keep].cumsum(0), point)])


def _kept(probs: Tensor, params: Params) -> int:
    """How many of the descending `probs` survive top-k, top-p and min-p; at least one."""
    keep = probs.numel() if params.top_k < 1 else min(params.top_k, probs.numel())
    if params.top_p < 1:
        before = probs.cumsum(0) - probs
        keep = min(keep, int((before < params.top_p).sum()))
    if params.min_p > 0:
        keep = min(keep, int((probs >= probs[0] * params.min_p).sum()))
    return max(keep, 1)


def _at(cumulated: Tensor, point: float) -> int:
    total = float(cumulated[-1])
    index = int(torch.searchsorted(cumulated, point * total, right=True))
    # Rounding can lift the point onto the total; the last token with weight is then the one meant.
    return index if index < cumulated.numel() else int((cumulated < total).sum())


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on the seed and the token's number alone."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
