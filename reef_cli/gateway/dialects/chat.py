"""OpenAI chat completions, as Reef serves them: requests in, answers and chunks out.

The canonical form is this dialect's own, so reading is mostly checking. A stream is: one chunk with the role, chunks with
deltas, one chunk per choice with its `finish_reason`, the usage chunk where asked for, the receipt's chunk with empty
`choices`, `[DONE]`. Log-probs ride on the chunks of the text they belong to; those of text that waited, on the last chunk.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from reef_cli.core.errors import InvalidRequest, ReefError, UnsupportedField
from reef_cli.gateway.dialects.canonical import (
    Answered,
    Body,
    ChatRequest,
    Envelope,
    Fields,
    Message,
    Options,
    Piece,
    TokenScore,
    Usage,
    compact,
    names,
)
from reef_cli.gateway.errors import stream_error
from reef_cli.gateway.sse import data_frame

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
DONE = b"data: [DONE]\n\n"

KNOWN = names(
    "model messages tools stream stream_options max_tokens max_completion_tokens temperature top_p top_k min_p stop "
    "seed frequency_penalty presence_penalty repetition_penalty logit_bias n logprobs top_logprobs tool_choice "
    "parallel_tool_calls reasoning_effort response_format ignore_eos"
)
HARMLESS = names(
    "store metadata user service_tier prompt_cache_key prompt_cache_retention safety_identifier verbosity prediction "
    "client_metadata thinking reasoning cache_control"
)


def messages_of(body: Body) -> list[Message]:
    """The conversation alone."""
    messages = [_message(message, index) for index, message in enumerate(Fields(body).objects("messages"))]
    if not messages:
        raise InvalidRequest("`messages` must be a non-empty array.", param="messages")
    return messages


def parse(body: Body) -> ChatRequest:
    """Read a body; `InvalidRequest` names the field that is not as documented."""
    fields = Fields(body)
    messages = messages_of(body)
    _refuse_parts_of_turns(messages)
    tools = fields.objects("tools")
    stream_options = fields.mapping("stream_options") or {}
    return ChatRequest(
        dialect="chat",
        model=fields.model(),
        messages=messages,
        tools=[tool for tool in tools if _is_function(tool)],
        options=options(fields),
        stream=fields.flag("stream") or False,
        include_usage=bool(stream_options.get("include_usage")),
        extra=fields.extra(KNOWN | HARMLESS),
        left_out=[*fields.hints(HARMLESS), *(f"tools.{tool.get('type')}" for tool in tools if not _is_function(tool))],
    )


def _refuse_parts_of_turns(messages: Sequence[Message]) -> None:
    """Members of earlier turns that no other dialect has a word for: calls before there were tools, and spoken answers."""
    for index, message in enumerate(messages):
        for name in ("function_call", "audio"):
            if message.get(name):
                raise UnsupportedField(f"`messages[{index}].{name}` cannot be translated.", param=f"messages[{index}].{name}")


def _tool_choice(choice: Any) -> str | dict[str, Any] | None:
    if choice is None or choice in ("auto", "none", "required"):
        return choice  # type: ignore[no-any-return]
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type", "function") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return {"type": "function", "function": {"name": function["name"]}}
    raise UnsupportedField("This `tool_choice` cannot be served here.", param="tool_choice")


def options(fields: Fields) -> Options:
    """The sampling options of the OpenAI chat and completion dialects."""
    most = fields.integer("max_completion_tokens", 1)
    return Options(
        max_tokens=most if most is not None else fields.integer("max_tokens", 1),
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.integer("top_k"),
        min_p=fields.number("min_p"),
        stop=fields.stop("stop"),
        seed=fields.integer("seed"),
        frequency_penalty=fields.number("frequency_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        repetition_penalty=fields.number("repetition_penalty"),
        logit_bias=fields.mapping("logit_bias") or {},
        n=fields.integer("n", 1) or 1,
        logprobs=bool(fields.body.get("logprobs")),
        top_logprobs=fields.integer("top_logprobs", 0) or 0,
        tool_choice=_tool_choice(fields.body.get("tool_choice")),
        parallel_tool_calls=fields.flag("parallel_tool_calls"),
        reasoning_effort=fields.text("reasoning_effort"),
        response_format=fields.mapping("response_format"),
        ignore_eos=fields.flag("ignore_eos") or False,
    )


def _is_function(tool: dict[str, Any]) -> bool:
    """Function tools are kept; others are a provider's own and mean nothing elsewhere."""
    if tool.get("type", "function") != "function":
        return False
    if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
        raise InvalidRequest("Every entry of `tools` must have a `function` with a `name`.", param="tools")
    return True


def _message(message: dict[str, Any], index: int) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise _wrong(index, "role", f"one of {', '.join(ROLES)}")
    if not (content is None or isinstance(content, str) or _parts(content)):
        raise _wrong(index, "content", "a string, an array of parts or null")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise _wrong(index, "tool_calls", "an array of function calls")
    if isinstance(content, list):
        content = compact([{"type": "text", "text": part} if isinstance(part, str) else part for part in content])
    if content is None and isinstance(message.get("refusal"), str):
        content = message["refusal"]
    read: Message = {**message, "content": content}
    if "reasoning" in read and isinstance(read["reasoning"], str):
        read["reasoning_content"] = read.get("reasoning_content") or read.pop("reasoning")
    return read


def _wrong(index: int, member: str, kind: str) -> InvalidRequest:
    where = f"messages[{index}]"
    return InvalidRequest(f"`{where}.{member}` must be {kind}.", param=where)


def _parts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, str | dict) for part in content)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(function.get("arguments", ""), str)
    )


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts in OpenAI's chat shape."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def scores_body(scores: Sequence[TokenScore] | None) -> dict[str, Any] | None:
    """Log-probs in the chat shape; alternatives are not known, so the lists of them are empty."""
    if scores is None:
        return None
    content = [{"token": s.token, "logprob": s.logprob, "bytes": list(s.token.encode()), "top_logprobs": []} for s in scores]
    return {"content": content, "refusal": None}


def untold(answer: Answered, told: int) -> Sequence[TokenScore] | None:
    """The log-probs a stream has not brought yet; None when there are none."""
    return answer.scores[told:] or None if answer.scores is not None else None


def total(answers: Sequence[Answered]) -> Usage:
    """Usage of all choices of one request: the prompt counts once."""
    first = answers[0].usage
    return Usage(
        prompt=first.prompt,
        output=sum(answer.usage.output for answer in answers),
        cached=first.cached,
        reasoning=sum(answer.usage.reasoning for answer in answers),
        cache_written=first.cache_written,
    )


def _finish(answer: Answered) -> str:
    return "stop" if answer.finish == "abort" else answer.finish


def encode(envelope: Envelope, answers: Sequence[Answered]) -> dict[str, Any]:
    """A whole `chat.completion` object, one choice per answer."""
    choices = []
    for index, answer in enumerate(answers):
        message = answer.message()
        message["refusal"] = None
        choices.append(
            {"index": index, "message": message, "logprobs": scores_body(answer.scores), "finish_reason": _finish(answer)}
        )
    return {
        "id": envelope.id,
        "object": "chat.completion",
        "created": envelope.created,
        "model": envelope.model,
        "choices": choices,
        "usage": usage_body(total(answers)),
    }


class ChatEncoder:
    """Writes a streamed chat answer; every chunk has `id`, `object`, `created`, `model` and `choices`."""

    def __init__(self, envelope: Envelope, request: ChatRequest) -> None:
        self._envelope = envelope
        self._include_usage = request.include_usage
        self._choices = request.options.n
        self._told: Counter[int] = Counter()
        self._head = {
            "id": envelope.id,
            "object": "chat.completion.chunk",
            "created": envelope.created,
            "model": envelope.model,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return data_frame({**self._head, "choices": choices, **more})

    def _delta(self, choice: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        return self._chunk([{"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish, **more}])

    def begin(self) -> bytes:
        return b"".join(self._delta(choice, {"role": "assistant", "content": ""}) for choice in range(self._choices))

    def push(self, piece: Piece) -> bytes:
        match piece.kind:
            case "text":
                delta: dict[str, Any] = {"content": piece.text}
            case "reasoning":
                delta = {"reasoning_content": piece.text}
            case "signature":
                delta = {"reasoning_signature": piece.text}
            case "redacted":
                delta = {"redacted_thinking": [piece.text]}
            case "call":
                function = {"name": piece.name, "arguments": ""}
                delta = {"tool_calls": [{"index": piece.number, "id": piece.id, "type": "function", "function": function}]}
            case "arguments":
                delta = {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.text}}]}
        if not piece.scores:
            return self._delta(piece.choice, delta)
        self._told[piece.choice] += len(piece.scores)
        return self._delta(piece.choice, delta, logprobs=scores_body(piece.scores))

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def finish(self, answers: Sequence[Answered]) -> bytes:
        out = [
            self._delta(choice, {}, _finish(answer), logprobs=scores_body(untold(answer, self._told[choice])))
            for choice, answer in enumerate(answers)
        ]
        usage = usage_body(total(answers)) if self._include_usage else None
        if usage is not None:
            out.append(self._chunk([], usage=usage))
        if self._envelope.receipt is not None:
            out.append(receipt_frame(self._head, self._envelope.receipt, usage, more=self._envelope.more))
        return b"".join((*out, DONE))

    def fail(self, error: ReefError) -> bytes:
        return stream_error("chat", error, self._envelope.request_id)


def receipt_frame(head: Body, receipt: str, usage: Any = None, end: bytes = b"\n", more: Body | None = None) -> bytes:
    """The chunk that hands over the receipt: empty `choices`, named like the stream's other chunks.

    It repeats the usage the client saw, because common clients keep the usage of whichever chunk came last.
    """
    named = {name: head[name] for name in ("id", "object", "created", "model") if name in head}
    told = {"usage": usage} if usage else {}
    return data_frame({**named, "choices": [], **told, "reef": {"agent_record_id": receipt, **(more or {})}}, end)
