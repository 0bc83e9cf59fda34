"""The body of SGLang's `/generate`, and its answer put together from one reply or many chunks."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict
from uuid import uuid4

from reef_cli.core.errors import EngineError
from reef_cli.core.ports import Completion, Sampling
from reef_cli.core.types import TokenSpan


class _Optional(TypedDict, total=False):
    adapter: str | None
    """A loaded LoRA adapter's name."""

    rid: str | None
    """The request's id, for `abort`."""


class Wish(_Optional):
    """What `generate` and `stream` are told beside tokens and sampling."""

    max_new_tokens: int


def wish_body(input_ids: Sequence[int], sampling: Sampling, wish: Wish, *, stream: bool) -> dict[str, Any]:
    rid = wish.get("rid") or uuid4().hex
    return request_body(input_ids, sampling, wish["max_new_tokens"], wish.get("adapter"), rid, stream=stream)


def request_body(
    input_ids: Sequence[int], sampling: Sampling, max_new_tokens: int, adapter: str | None, rid: str, *, stream: bool
) -> dict[str, Any]:
    """The body of `/generate`, every field that has a default spelled out."""
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "min_new_tokens": min(sampling.min_new_tokens, max_new_tokens),
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "spaces_between_special_tokens": True,
        "no_stop_trim": False,
        "n": 1,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): weight for token, weight in sampling.logit_bias.items()}
    body = {"rid": rid, "input_ids": list(input_ids), "sampling_params": params, "stream": stream, "return_logprob": True}
    return body | {"logprob_start_len": -1, "top_logprobs_num": 0, "lora_path": adapter}


def completion(reply: Mapping[str, Any]) -> Completion:
    """A whole answer of `/generate`; raises `EngineError` where its parts contradict each other."""
    gathered = Gathered()
    gathered.add(reply)
    return gathered.completion()


class Gathered:
    """An answer put together from its chunks, cumulative (the default) or incremental ones."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        self._text = ""
        self._sent = 0
        self._told = 0
        self._meta: Mapping[str, Any] = {}

    @property
    def finished(self) -> bool:
        return bool(self._meta.get("finish_reason"))

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Take a chunk; returns the text it adds."""
        meta = chunk["meta_info"]
        ids, text, logprobs = chunk.get("output_ids", []), chunk.get("text", ""), meta.get("output_token_logprobs", [])
        if len(ids) == meta["completion_tokens"]:
            self._ids, self._text, self._logprobs = list(ids), text, list(logprobs)
        else:
            self._ids += ids
            self._text += text
            self._logprobs += logprobs
        self._meta = meta
        return "" if self.finished else self.unsent()

    def unsent(self) -> str:
        """Text not returned before."""
        piece, self._sent = self._text[self._sent :], max(self._sent, len(self._text))
        return piece

    def untold(self) -> Sequence[tuple[int, float]]:
        """Tokens not returned before, each with its log-prob."""
        start, self._told = self._told, min(len(self._ids), len(self._logprobs))
        told = zip(self._ids[start:], self._logprobs[start:], strict=False)
        return [(token, float("nan") if entry[0] is None else float(entry[0])) for token, entry in told]

    def completion(self) -> Completion:
        reason = self._meta.get("finish_reason") or {}
        if reason.get("status_code"):
            raise EngineError("The engine broke off a request", why=str(reason.get("message")))
        if not len(self._ids) == self._meta["completion_tokens"] == len(self._logprobs):
            raise EngineError("The engine's tokens, counts and log-probs disagree", hint="see the engine's log")
        if any(entry[1] != token for entry, token in zip(self._logprobs, self._ids, strict=True)):
            raise EngineError("The engine's log-probs belong to other tokens", hint="see the engine's log")
        if any(entry[0] is None for entry in self._logprobs):  # what JSON makes of NaN
            raise EngineError("The engine's log-probs are no numbers", hint="see the engine's log")
        return Completion(
            text=self._text,
            output_ids=tuple(self._ids),
            logprobs=tuple(float(entry[0]) for entry in self._logprobs),
            finish=reason["type"],
            spans=_spans(self._meta, len(self._ids)),
            prompt_tokens=self._meta["prompt_tokens"],
            cached_tokens=self._meta.get("cached_tokens", 0),
            matched=reason.get("matched"),
        )


def _spans(meta: Mapping[str, Any], count: int) -> tuple[TokenSpan, ...]:
    raw = meta.get("weight_versions") or ([{"version": meta["weight_version"], "start": 0, "end": count}] if count else [])
    return tuple(TokenSpan(span["version"], span["start"], span["end"]) for span in raw)
