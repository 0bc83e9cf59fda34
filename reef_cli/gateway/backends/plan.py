"""From a canonical request to what a local engine is asked, and from what it emitted to the canonical answer.

Pure, but for the model's template. What a local engine cannot do is refused by name; limits beyond the model's context are
trimmed to it, since agents ask for 32000 tokens of any model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reef_cli.core.errors import ContextOverflow, InvalidRequest, UnsupportedField
from reef_cli.core.ports import ChatTemplate, Completion, ParsedMessage, Sampling
from reef_cli.core.types import TokenTrace
from reef_cli.gateway.backends.history import History, Prompt
from reef_cli.gateway.backends.live import THINK, LiveText, thinks
from reef_cli.gateway.dialects.canonical import Answered, ChatRequest, Finish, Options, TokenScore, Usage, tool_call
from reef_cli.gateway.dialects.completions import DEFAULT_MAX_TOKENS
from reef_cli.gateway.errors import overflow

_ENGINE = "the local engine"
_TAIL_TOKENS = 8
_MOST_CHOICES = 16
_GREEDY_BELOW = 1e-6
"""Temperatures nearer to 0 mean greedy, as SGLang has it; dividing by them overflows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine is asked: `n` answers to the same prompt."""

    request: ChatRequest
    prompt_ids: Sequence[int]
    sampling: Sampling
    tools: Sequence[Mapping[str, Any]]
    thinking: bool = False
    prompt: Prompt | None = None
    """Of a conversation: what an answer to it is remembered with."""

    def samplings(self) -> list[Sampling]:
        """One per answer; with a seed each answer has its own."""
        count = self.request.options.n
        seed = self.sampling.seed
        return [replace(self.sampling, seed=None if seed is None else seed + number) for number in range(count)]


def plan(request: ChatRequest, chat: ChatTemplate, history: History, context_length: int) -> Plan:
    """Check, render and limit. Raises `UnsupportedField`, `InvalidRequest`, `ContextOverflow`."""
    _refuse(request)
    tools = () if request.options.tool_choice == "none" else request.tools
    prompt = None if request.prompt is not None else history.prompt(request.messages, tools)
    ids = prompt.ids if prompt is not None else _raw(request.prompt or "", chat)
    room = context_length - len(ids)
    if room < 1:
        raise overflow(len(ids), context_length, request.dialect)
    default = DEFAULT_MAX_TOKENS if request.dialect == "completions" else room
    most = min(request.options.max_tokens or default, room)
    thinking = request.prompt is None and thinks(chat.decode(ids[-_TAIL_TOKENS:], skip_special_tokens=False))
    sampling = sampling_of(request.options, most)
    if prompt is not None and chat.marked_by_special(bool(tools)):
        sampling = replace(sampling, skip_special_tokens=False)
    return Plan(request, ids, sampling, tools, thinking, prompt)


def _raw(prompt: str | Sequence[int], chat: ChatTemplate) -> Sequence[int]:
    ids = chat.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    return ids


def _refuse(request: ChatRequest) -> None:
    options = request.options
    request.refuse_extra(_ENGINE)
    if (options.response_format or {}).get("type", "text") != "text":
        name = request.called("response_format")
        raise UnsupportedField(f"`{name}` cannot be served by {_ENGINE}.", hint="Ask in words.", param=name)
    if options.top_logprobs > 0:
        raise UnsupportedField(
            f"`top_logprobs` cannot be served by {_ENGINE}.", hint="`logprobs: true` alone is.", param="top_logprobs"
        )
    if options.tool_choice not in (None, "auto", "none"):
        raise UnsupportedField(f"A forced `tool_choice` cannot be served by {_ENGINE}.", hint="Use auto.", param="tool_choice")
    if options.n > _MOST_CHOICES:
        raise InvalidRequest(f"`n` must be at most {_MOST_CHOICES}.", param="n")
    if request.stream and request.echo:
        raise UnsupportedField("`echo` cannot be streamed.", param="echo")


def sampling_of(options: Options, max_new_tokens: int) -> Sampling:
    """Sampling parameters; what the client left out has the plain policy's own value, so that the answer can train."""
    try:
        bias = {int(token): float(value) for token, value in options.logit_bias.items()}
    except (TypeError, ValueError) as error:
        raise InvalidRequest("`logit_bias` must map token ids to numbers.", param="logit_bias") from error
    if not all(-100 <= value <= 100 for value in bias.values()):
        raise InvalidRequest("Values of `logit_bias` must be between -100 and 100.", param="logit_bias")
    for name, low, high in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"`{name}` must be between {low:g} and {high:g}.", param=name)
    chosen = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "frequency_penalty": options.frequency_penalty,
        "presence_penalty": options.presence_penalty,
        "repetition_penalty": options.repetition_penalty,
    }
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if given.get("temperature", 1.0) < _GREEDY_BELOW:
        given["temperature"] = 0.0
    return Sampling(
        max_new_tokens=max_new_tokens,
        stop=options.stop,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        logit_bias=bias,
        **given,
    )


def live(plan: Plan, chat: ChatTemplate, choice: int) -> LiveText:
    """The reader of one streamed answer."""
    return LiveText(lambda text: parse(plan, chat, text), tools=bool(plan.tools), thinking=plan.thinking, choice=choice)


def parse(plan: Plan, chat: ChatTemplate, text: str) -> ParsedMessage:
    """A model's raw text read by its own conventions; reasoning the prompt opened counts as opened."""
    return chat.parse(f"{THINK}\n{text}" if plan.thinking else text, plan.tools)


def answered(plan: Plan, chat: ChatTemplate, completion: Completion, receipt: str) -> Answered:
    """A completion read by the model's own conventions. Call ids are unique across turns, since agents echo them."""
    request = plan.request
    usage = Usage(completion.prompt_tokens, len(completion.output_ids), completion.cached_tokens)
    matched = completion.matched if isinstance(completion.matched, str) else None
    pairs = zip(completion.output_ids, completion.logprobs, strict=True)
    scores = scored(chat, pairs) if request.options.logprobs else None
    if request.prompt is not None:
        text = (request.prompt if request.echo and isinstance(request.prompt, str) else "") + completion.text
        return Answered(text, completion.finish, matched=matched, usage=usage, scores=scores)
    parsed = parse(plan, chat, completion.text)
    calls = [
        tool_call(f"call_{receipt}_{index}", call["function"]["name"], call["function"].get("arguments") or "{}")
        for index, call in enumerate(parsed.tool_calls)
    ]
    if request.options.parallel_tool_calls is False:
        calls = calls[:1]
    if parsed.reasoning:
        usage = replace(usage, reasoning=min(usage.output, len(chat.encode(parsed.reasoning))))
    finish: Finish = "tool_calls" if calls and completion.finish == "stop" else completion.finish
    return Answered(parsed.content, finish, calls, parsed.reasoning, matched=matched, usage=usage, scores=scores)


def scored(chat: ChatTemplate, tokens: Iterable[tuple[int, float]]) -> list[TokenScore]:
    """Tokens and log-probs as the dialects show them."""
    return [TokenScore(chat.decode([token], skip_special_tokens=False), logprob) for token, logprob in tokens]


def trace(plan: Plan, completion: Completion) -> TokenTrace:
    """The engine's tokens exactly as they came."""
    return TokenTrace(
        prompt_ids=tuple(plan.prompt_ids),
        output_ids=completion.output_ids,
        logprobs=completion.logprobs,
        loss_mask=(1,) * len(completion.output_ids),
        spans=completion.spans,
        temperature=plan.sampling.temperature,
        finish=completion.finish,
    )


def training_facts(sampling: Sampling) -> dict[str, Any]:
    """What the record says when its log-probs are not the plain policy's."""
    if sampling.trainable:
        return {}
    why = "greedy" if sampling.temperature <= 0 else "truncated_sampling"
    return {"trainable": False, "untrainable": why}


def reworded(error: ContextOverflow, plan: Plan, context_length: int) -> ContextOverflow:
    """An engine's own overflow in the words the client's dialect recognises."""
    del error
    return overflow(len(plan.prompt_ids), context_length, plan.request.dialect)
