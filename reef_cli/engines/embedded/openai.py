"""`/v1/chat/completions` of the contract, over the same requests as `/generate`: text answers, token ids on demand.

Tool calls are not parsed here; whoever wants them reads `message.content` (the gateway renders and parses by itself).
"""

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from reef_cli.core.errors import InvalidRequest
from reef_cli.engines.embedded import replies
from reef_cli.engines.embedded.engine import Engine
from reef_cli.engines.embedded.request import Progress, Request, Wish

_DECISIVE = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "logit_bias", "ignore_eos")
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_TEXTUAL = ("skip_special_tokens", "no_stop_trim")
_SAMPLING = (*_DECISIVE, *_PENALTIES, *_TEXTUAL)
_STREAMLESS = ("return_token_ids", "return_prompt_token_ids", "return_meta_info")


def wish(body: Mapping[str, Any], engine: Engine) -> Wish:
    """The engine request of a chat body; `input_ids` bypass the template. Raises what `replies.wish` raises."""
    if not isinstance(body.get("messages"), list):
        raise InvalidRequest("messages must be a list")
    if body.get("stream"):
        for key in _STREAMLESS:
            if body.get(key):
                raise InvalidRequest(f"{key} is not supported with stream=true")
    ids = body.get("input_ids") or engine.chat.render(body["messages"], body.get("tools") or ())
    sampling = {key: body[key] for key in _SAMPLING if body.get(key) is not None}
    sampling["max_new_tokens"] = body.get("max_completion_tokens") or body.get("max_tokens") or _room(engine, len(ids))
    if body.get("min_tokens") is not None:
        sampling["min_new_tokens"] = body["min_tokens"]
    if body.get("seed") is not None:
        sampling["sampling_seed"] = body["seed"]
    return replies.wish(
        {
            "input_ids": ids,
            "sampling_params": sampling,
            "rid": body.get("rid"),
            "lora_path": body.get("lora_path") or _adapter(body.get("model"), engine),
            "return_logprob": bool(body.get("logprobs") or body.get("return_meta_info")),
            "top_logprobs_num": body.get("top_logprobs"),
        },
        engine,
    )


def _room(engine: Engine, prompt: int) -> int:
    return max(engine.model.context_length - prompt, 1)


def _adapter(model: Any, engine: Engine) -> str | None:
    """`base:adapter`, or the bare name of a loaded adapter."""
    if not isinstance(model, str):
        return None
    if model in engine.model.adapters.loaded:
        return model
    return model.partition(":")[2] or None


async def complete(body: Mapping[str, Any], engine: Engine, name: str) -> dict[str, Any]:
    """A whole chat completion."""
    request, progress = await engine.finish(wish(body, engine))
    info = replies.meta_info(request, progress, engine)
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": progress.text, "tool_calls": None, "reasoning_content": None},
        "logprobs": _logprobs(request, engine) if body.get("logprobs") else None,
        "finish_reason": (progress.finish or {}).get("type"),
        "matched_stop": (progress.finish or {}).get("matched"),
    }
    if body.get("return_token_ids"):
        choice["response_token_ids"] = request.output_ids
    if body.get("return_token_ids") or body.get("return_prompt_token_ids"):
        choice["prompt_token_ids"] = request.wish.input_ids
    if body.get("return_meta_info"):
        choice["meta_info"] = info
    return _envelope(request, name, "chat.completion") | {
        "choices": [choice],
        "usage": _usage(info),
        "metadata": {"weight_version": info["weight_version"], "weight_versions": info["weight_versions"]},
    }


async def stream(body: Mapping[str, Any], request_wish: Wish, engine: Engine, name: str) -> AsyncIterator[dict[str, Any]]:
    """Chat completion chunks; the one with the finish reason is last but for the usage that was asked for."""
    sent = 0
    first = True
    last: tuple[Request, Progress] | None = None
    async for request, progress in engine.generate(request_wish, stream=True):
        last = request, progress
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        piece, sent = progress.text[sent:], max(sent, len(progress.text))
        if piece or first or progress.finish:
            choice = {"index": 0, "delta": delta | {"content": piece}, "finish_reason": (progress.finish or {}).get("type")}
            yield _envelope(request, name, "chat.completion.chunk") | {"choices": [choice]}
        first = False
    if last and (body.get("stream_options") or {}).get("include_usage"):
        usage = _usage(replies.meta_info(*last, engine))
        yield _envelope(last[0], name, "chat.completion.chunk") | {"choices": [], "usage": usage}


def _envelope(request: Request, name: str, kind: str) -> dict[str, Any]:
    return {"id": request.wish.rid, "object": kind, "created": int(time.time()), "model": name}


def _usage(info: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = info["prompt_tokens"], info["completion_tokens"]
    details = {"cached_tokens": info["cached_tokens"]}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def _logprobs(request: Request, engine: Engine) -> dict[str, Any]:
    def entry(logprob: float, token: int) -> dict[str, Any]:
        text = engine.chat.decode([token], False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            entry(choice.logprob, choice.token) | {"top_logprobs": [entry(value, token) for value, token in choice.top]}
            for choice in request.choices
        ]
    }
