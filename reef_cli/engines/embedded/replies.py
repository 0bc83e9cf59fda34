"""Requests and answers of `/generate` in the contract's JSON: checking what comes in, shaping what goes out."""

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any
from uuid import uuid4

from reef_cli.core.errors import ContextOverflow, InvalidRequest
from reef_cli.engines.embedded.engine import Engine
from reef_cli.engines.embedded.request import Progress, Request, Wish
from reef_cli.engines.embedded.sampling import parse


def wish(body: Mapping[str, Any], engine: Engine) -> Wish:
    """A checked request. Raises `InvalidRequest` or `ContextOverflow` in the contract's words."""
    ids = _input_ids(body, engine)
    limit = engine.model.context_length
    params = parse(body.get("sampling_params") or {}, engine.model.vocab_size)
    if len(ids) >= limit:
        raise ContextOverflow(f"The input ({len(ids)} tokens) is longer than the model's context length ({limit} tokens).")
    if len(ids) + params.max_new_tokens > limit:
        raise ContextOverflow(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total of "
            f"{len(ids) + params.max_new_tokens} tokens: {len(ids)} tokens from the input messages and "
            f"{params.max_new_tokens} tokens for the completion."
        )
    wanted = tuple(int(token) for token in body.get("token_ids_logprob") or ())
    if any(not 0 <= token < engine.model.vocab_size for token in wanted):
        raise InvalidRequest("token_ids_logprob names a token outside the vocabulary")
    return Wish(
        rid=str(body.get("rid") or uuid4().hex),
        input_ids=ids,
        params=params,
        adapter=engine.adapter(body.get("lora_path")),
        return_logprob=bool(body.get("return_logprob", False)),
        logprob_start_len=_int(body.get("logprob_start_len"), -1),
        top_logprobs_num=_int(body.get("top_logprobs_num"), 0),
        token_ids_logprob=wanted,
    )


def _int(value: Any, default: int) -> int:
    return default if value is None else int(value)


def _input_ids(body: Mapping[str, Any], engine: Engine) -> list[int]:
    ids = body.get("input_ids")
    if ids is None:
        text = body.get("text")
        if not isinstance(text, str):
            raise InvalidRequest("Either text or input_ids should be provided.")
        ids = engine.chat.encode(text)
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise InvalidRequest("input_ids must be a non-empty list of integers")
    if min(ids) < 0 or max(ids) >= engine.model.vocab_size:
        raise InvalidRequest(f"input_ids must lie in [0, {engine.model.vocab_size})")
    return ids


def answer(request: Request, progress: Progress, engine: Engine, *, prompt_ids: bool, since: tuple[int, int] = (0, 0)) -> Any:
    """One response or stream chunk; `since` = (tokens, characters) already sent when chunks are incremental."""
    tokens, characters = since
    reply: dict[str, Any] = {
        "text": progress.text[characters:],
        "output_ids": request.output_ids[tokens : progress.tokens],
        "meta_info": meta_info(request, progress, engine, tokens),
    }
    if prompt_ids:
        reply["prompt_token_ids"] = request.wish.input_ids
    return reply


def meta_info(request: Request, progress: Progress, engine: Engine, first: int = 0) -> dict[str, Any]:
    """The contract's `meta_info`, with log-probs of the tokens from `first` on where they were asked for."""
    versions = request.versions[: progress.tokens]
    info: dict[str, Any] = {
        "id": request.wish.rid,
        "finish_reason": progress.finish,
        "prompt_tokens": len(request.wish.input_ids),
        "completion_tokens": progress.tokens,
        "cached_tokens": progress.cached_tokens,
        "reasoning_tokens": 0,
        "num_retractions": progress.retractions,
        "weight_version": versions[-1] if versions else engine.core.version,
        "weight_versions": spans(versions),
        "e2e_latency": monotonic() - request.started,
    }
    if request.wish.return_logprob:
        info |= _logprobs(request, first, progress.tokens)
    return info


def spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """Neighbouring tokens of one weight version as `{"version", "start", "end"}`."""
    found: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if found and found[-1]["version"] == version:
            found[-1]["end"] = position + 1
        else:
            found.append({"version": version, "start": position, "end": position + 1})
    return found


def _logprobs(request: Request, first: int, last: int) -> dict[str, Any]:
    wish = request.wish
    choices = request.choices[first:last]
    info: dict[str, Any] = {
        "output_token_logprobs": [[choice.logprob, choice.token, None] for choice in choices],
        "output_token_logprobs_length": last,
    }
    if wish.top_logprobs_num > 0:
        info["output_top_logprobs"] = [[[value, token, None] for value, token in choice.top] for choice in choices]
    if wish.token_ids_logprob:
        info["output_token_ids_logprobs"] = [[[value, token, None] for value, token in choice.wanted] for choice in choices]
    if 0 <= wish.logprob_start_len < len(wish.input_ids):
        head = [[None, wish.input_ids[wish.logprob_start_len], None]]
        info["input_token_logprobs"] = head + [[value, token, None] for value, token in request.input_logprobs]
    return info
