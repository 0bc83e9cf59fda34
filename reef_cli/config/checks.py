"""Limits of settings that a type cannot say, one table: key, test, what it must be.

Relations between settings stand below the table. Everything here is pure and says what is wrong in words.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reef_cli.config.schema import Settings
from reef_cli.core.ids import valid_scenario

Check = tuple[str, Callable[[Any], bool], str]


def _positive(value: Any) -> bool:
    return bool(value > 0)


def _share(value: Any) -> bool:
    return bool(0 < value < 1)


def _credential(value: str) -> bool:
    return bool(value) and value.isascii() and value.isprintable() and " " not in value


def _origin(value: str) -> bool:
    return re.fullmatch(r"https?://[^/\s*?#@]+", value) is not None


CHECKS: tuple[Check, ...] = (
    ("reef.port", lambda port: 0 <= port <= 65535, "must be 0 to 65535"),
    ("reef.host", lambda host: bool(host.strip()), "must not be blank"),
    ("reef.home", lambda home: bool(home.strip()), "must not be blank"),
    ("reef.token", _credential, "must be printable ASCII without spaces; an empty token never authenticates"),
    ("reef.tokens", lambda tokens: all(map(_credential, tokens)), "must be printable ASCII without spaces, none empty"),
    ("reef.default_scenario", valid_scenario, "must be 1 to 64 letters, digits, '.', '_' or '-'"),
    ("reef.push_wait_s", _positive, "must be above 0"),
    ("reef.body_limit_bytes", _positive, "must be above 0"),
    ("reef.import_limit_bytes", _positive, "must be above 0"),
    ("reef.rate_per_s", _positive, "must be above 0"),
    ("evaluation.max_calls", _positive, "must be at least 1"),
    ("evaluation.max_tokens", _positive, "must be at least 1"),
    ("evaluation.max_money", _positive, "must be above 0"),
    ("evaluation.price_prompt", lambda price: price >= 0, "must not be negative"),
    ("evaluation.price_output", lambda price: price >= 0, "must not be negative"),
    ("evaluation.judge_price_prompt", lambda price: price >= 0, "must not be negative"),
    ("evaluation.judge_price_output", lambda price: price >= 0, "must not be negative"),
    ("evaluation.judge_url", lambda url: url.startswith(("http://", "https://")), "must start with http:// or https://"),
    ("evaluation.judge_api_key", _credential, "must be printable ASCII without spaces, not empty"),
    ("reef.cors_origins", lambda origins: all(map(_origin, origins)), "must be scheme://host[:port] each, without a path"),
    ("reef.batch_size", _positive, "must be at least 1"),
    ("reef.max_staleness", lambda value: value >= 0, "must not be negative"),
    ("reef.gate_every", _positive, "must be at least 1"),
    ("engine.model", lambda model: bool(model.strip()), "must not be blank"),
    ("engine.url", lambda url: url.startswith(("http://", "https://")), "must start with http:// or https://"),
    ("engine.api_key", _credential, "must be printable ASCII without spaces, not empty"),
    ("engine.threads", _positive, "must be at least 1"),
    ("engine.max_running_requests", _positive, "must be at least 1"),
    ("engine.context_length", _positive, "must be at least 1"),
    ("engine.max_lora_rank", _positive, "must be at least 1"),
    ("engine.start_timeout_s", _positive, "must be above 0"),
    ("trainer.rank", _positive, "must be at least 1"),
    ("trainer.alpha", _positive, "must be above 0"),
    ("trainer.target_modules", bool, "must name at least one layer"),
    ("trainer.world_size", _positive, "must be at least 1"),
    ("trainer.zero_stage", lambda stage: 0 <= stage <= 3, "must be 0 to 3"),
    ("trainer.micro_batch", _positive, "must be at least 1"),
    ("trainer.bucket_mb", _positive, "must be at least 1"),
    ("trainer.pack_tokens", _positive, "must be at least 1"),
    ("trainer.threads", _positive, "must be at least 1"),
    ("trainer.start_timeout_s", _positive, "must be above 0"),
    ("trainer.step_timeout_s", _positive, "must be above 0"),
    ("evaluation.limit", _positive, "must be at least 1"),
    ("evaluation.max_new_tokens", _positive, "must be at least 1"),
    ("evaluation.temperature", lambda value: value >= 0, "must not be negative"),
    ("evaluation.alpha", _share, "must lie between 0 and 1"),
    ("evaluation.max_kl", _positive, "must be above 0"),
    ("evaluation.drift_every_s", _positive, "must be above 0"),
    ("evaluation.canary_alpha", lambda value: 0 < value <= 0.5, "must be above 0 and at most 0.5"),
    ("evaluation.canary_margin", lambda value: 0 <= value <= 1, "must be 0 to 1"),
    ("evaluation.concurrency", _positive, "must be at least 1"),
    ("storage.keep_bytes", lambda value: value >= 0, "must not be negative"),
    ("storage.keep_days", lambda value: value >= 0, "must not be negative"),
    ("storage.keep_checkpoints", lambda value: value >= 0, "must not be negative"),
)

_BY_KEY: Mapping[str, Check] = {check[0]: check for check in CHECKS}


def limit_fault(dotted: str, value: Any) -> str | None:
    """Why a value is out of its limits, or None; null values are within every limit."""
    check = _BY_KEY.get(dotted)
    return None if check is None or value is None or check[1](value) else check[2]


def relation_faults(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """`(key, what is wrong, what to do)` where two settings do not fit together."""
    engine, trainer = settings.engine, settings.trainer
    if engine.kind == "upstream" and engine.url is None:
        yield "engine.url", "an upstream engine needs its address", "set engine.url, for example --engine.url https://host"
    if engine.kind == "embedded" and engine.url is not None:
        yield (
            "engine.url",
            "the embedded engine is started by Reef and takes no address",
            "set engine.kind to upstream or sglang",
        )
    if engine.api_key is not None and engine.api_key_file is not None:
        yield "engine.api_key", "the upstream key is given twice", "keep engine.api_key or engine.api_key_file"
    if settings.evaluation.score_low >= settings.evaluation.score_high:
        yield "evaluation.score_low", "the lowest score is not below evaluation.score_high", "for example 0 and 1, or -1 and 1"
    if trainer.method == "lora" and trainer.push == "full":
        yield "trainer.push", "a LoRA adapter cannot be pushed as full weights", "use adapter or merged"
    if trainer.method == "full" and trainer.push in ("adapter", "merged"):
        yield "trainer.push", f"all weights are trained, there is no adapter to push as {trainer.push}", "use full"
    if trainer.hostfile is not None and trainer.world_size > 1:
        yield "trainer.world_size", "the hostfile says how many processes there are", "leave it out"
    if trainer.transport == "ipc" and (
        trainer.world_size > 1 or trainer.hostfile or engine.replicas > 1 or engine.url or engine.urls
    ):
        yield (
            "trainer.transport",
            "ipc is for one trainer and one engine, started here, that share a GPU",
            "use group, or one trainer process and one engine without an address",
        )
    if trainer.method == "lora" and trainer.rank > engine.max_lora_rank:
        yield "trainer.rank", f"is above engine.max_lora_rank ({engine.max_lora_rank})", "lower the rank or raise the limit"
