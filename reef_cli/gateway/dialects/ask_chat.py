"""Asking an upstream that speaks OpenAI chat: canonical request out, its answer or its chunks in.

Reading is lenient, as providers differ: `reasoning` beside `reasoning_content`, tool calls without index or with null ids in
later fragments, missing usage.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from reef_cli.core.errors import UpstreamError
from reef_cli.gateway.dialects.assembly import Assembly
from reef_cli.gateway.dialects.canonical import (
    Answered,
    ChatRequest,
    Finish,
    Message,
    Piece,
    TokenScore,
    Usage,
    failed,
    no_counterpart,
    tool_call,
)
from reef_cli.gateway.sse import Event

PATH = "/v1/chat/completions"
_FINISH: Mapping[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def body(request: ChatRequest, model: str) -> dict[str, Any]:
    """The chat body of a request that came in another dialect."""
    options = request.options
    if options.top_logprobs:
        raise no_counterpart("top_logprobs")
    asked: dict[str, Any] = {
        "max_completion_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "stop": list(options.stop) or None,
        "seed": options.seed,
        "tools": [dict(tool) for tool in request.tools] or None,
        "tool_choice": options.tool_choice if request.tools else None,
        "parallel_tool_calls": options.parallel_tool_calls if request.tools else None,
        "reasoning_effort": options.reasoning_effort,
        "response_format": options.response_format,
        "stream": True if request.stream else None,
        "stream_options": {"include_usage": True} if request.stream else None,
    }
    messages = [_message(message) for message in request.messages]
    return {"model": model, "messages": messages, **{name: value for name, value in asked.items() if value is not None}}


def _message(message: Message) -> dict[str, Any]:
    out = {name: message[name] for name in _KEPT if name in message}
    if out["role"] == "developer":
        out["role"] = "system"
    return out | ({"content": failed(message["content"])} if message.get("is_error") else {})


def usage_of(raw: Any) -> Usage:
    """Usage of a chat body; absent counts are 0."""
    if not isinstance(raw, dict):
        return Usage()
    prompt = raw.get("prompt_tokens_details") or {}
    output = raw.get("completion_tokens_details") or {}
    return Usage(
        prompt=raw.get("prompt_tokens") or 0,
        output=raw.get("completion_tokens") or 0,
        cached=prompt.get("cached_tokens") or 0,
        reasoning=output.get("reasoning_tokens") or 0,
    )


def read(answer: Mapping[str, Any]) -> list[Answered]:
    """The choices of a whole answer; `UpstreamError` when it has none."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise UpstreamError("the upstream answered without choices: server error there")
    usage = usage_of(answer.get("usage"))
    return [_choice(choice, usage) for choice in choices]


def _choice(choice: Mapping[str, Any], usage: Usage) -> Answered:
    if "text" in choice:
        return Answered(choice["text"], _FINISH.get(choice.get("finish_reason") or "stop", "stop"), usage=usage)
    message = choice.get("message") or {}
    calls = [
        tool_call(call.get("id") or "", call["function"].get("name") or "", call["function"].get("arguments") or "")
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), dict)
    ]
    finish = _FINISH.get(choice.get("finish_reason") or "stop", "stop")
    thought, text = _told(message.get("content"))
    return Answered(
        content=text or message.get("refusal") or text,
        finish="tool_calls" if finish == "stop" and calls else finish,
        tool_calls=calls,
        reasoning=message.get("reasoning_content") or message.get("reasoning") or thought or None,
        signature=message.get("reasoning_signature"),
        redacted=tuple(message.get("redacted_thinking") or ()),
        usage=usage,
        scores=_scores(choice.get("logprobs")),
    )


def _told(content: Any) -> tuple[str, str | None]:
    """`(reasoning, text)` of content that some providers send in parts, their reasoning among them."""
    if not isinstance(content, list):
        return "", content
    reasoning: list[str] = []
    texts: list[str] = []
    for part in content:
        if part.get("type") == "thinking":
            inner = part.get("thinking")
            reasoning += [inner] if isinstance(inner, str) else [one.get("text") or "" for one in inner or ()]
        else:
            texts.append(part.get("text") or part.get("refusal") or "")
    return "".join(reasoning), "".join(texts)


def _scores(raw: Any) -> list[TokenScore] | None:
    content = raw.get("content") if isinstance(raw, dict) else None
    return [TokenScore(entry["token"], entry["logprob"]) for entry in content] if isinstance(content, list) else None


class Reader:
    """Reads chat chunks (and those of raw completions). `head` is the first chunk, which names the others;
    `told_usage` the usage as the provider wrote it."""

    def __init__(self) -> None:
        self.done = False
        self.error: UpstreamError | None = None
        self.head: Mapping[str, Any] = {}
        self.usage: Usage | None = None
        self.told_usage: Any = None
        self._choices: dict[int, Assembly] = {}

    @property
    def finished(self) -> bool:
        return bool(self._choices) and all(choice.finish for choice in self._choices.values())

    def answers(self) -> list[Answered]:
        choices = [self._choices[index] for index in sorted(self._choices)] or [Assembly()]
        return [choice.answered(self.usage or Usage()) for choice in choices]

    @staticmethod
    def only_text(event: Mapping[str, Any], /) -> str | None:
        (choice,) = event["choices"]
        delta = choice.get("delta") or choice
        name = "content" if "content" in delta else "text"
        others = {key for key, value in delta.items() if value} - {name, "role", "index", "logprobs"}
        if others or choice.get("finish_reason") or event.get("error") or event.get("usage"):
            return None
        text: str | None = delta[name]
        return text

    def feed(self, event: Event) -> Sequence[Piece]:
        if event.data == b"[DONE]":
            self.done = True
            return ()
        try:
            chunk = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            return ()
        return self._take(chunk) if isinstance(chunk, dict) else ()

    def feed_plain(self, data: bytes) -> bool:
        """Read a whole stream at once, in a third of the time that it takes event by event.

        False, and nothing was read, unless every frame is one `data: ` line with an object, but for a last `[DONE]`.
        """
        if not (data.startswith(b"data: ") and data.endswith(b"\n\n")) or b"\r" in data:
            return False
        bodies = data[6:-2].split(b"\n\ndata: ")
        if data.count(b"\n") != 2 * len(bodies):
            return False
        done = bodies[-1] == b"[DONE]"
        if done:
            bodies.pop()
        try:
            chunks = orjson.loads(b"[%b]" % b",".join(bodies))
        except orjson.JSONDecodeError:
            return False
        if len(chunks) != len(bodies) or not all(isinstance(chunk, dict) for chunk in chunks):
            return False
        for chunk in chunks:
            self._take(chunk)
        self.done = done
        return True

    def _take(self, chunk: Mapping[str, Any]) -> Sequence[Piece]:
        if chunk.get("error"):
            self.error = UpstreamError(_error_text(chunk["error"]))
            return ()
        if not self.head and "choices" in chunk:
            self.head = chunk
        if chunk.get("usage"):
            self.told_usage = chunk["usage"]
            self.usage = usage_of(chunk["usage"])
        choices = chunk.get("choices") or []
        if len(choices) == 1:
            return self._choice(choices[0])
        return [piece for choice in choices for piece in self._choice(choice)]

    def _choice(self, choice: Mapping[str, Any]) -> Sequence[Piece]:
        number = choice.get("index") or 0
        assembly = self._choices.get(number)
        if assembly is None:
            assembly = self._choices[number] = Assembly()
        reason = choice.get("finish_reason")
        delta = choice.get("delta") or choice
        if not reason and len(delta) == 1 and isinstance(only := delta.get("content"), str):
            # Nearly every delta is a piece of text and nothing else.
            assembly.say(only)
            return (Piece("text", only, 0, "", "", number),) if only else ()
        pieces = _pieces(delta, number, assembly)
        for piece in pieces:
            assembly.push(piece)
        if reason:
            assembly.finish = _FINISH.get(reason, "stop")
        return pieces


def _pieces(delta: Mapping[str, Any], choice: int, assembly: Assembly) -> list[Piece]:
    pieces = []
    thought, said = _told(delta.get("content"))
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or thought
    if isinstance(reasoning, str) and reasoning:
        pieces.append(Piece("reasoning", reasoning, choice=choice))
    if delta.get("reasoning_signature"):
        pieces.append(Piece("signature", delta["reasoning_signature"], choice=choice))
    for data in delta.get("redacted_thinking") or ():
        pieces.append(Piece("redacted", data, choice=choice))
    text = said or delta.get("text") or delta.get("refusal")
    if isinstance(text, str) and text:
        pieces.append(Piece("text", text, choice=choice))
    for call in delta.get("tool_calls") or ():
        pieces.extend(_call(call, choice, assembly))
    return pieces


def _call(call: Mapping[str, Any], choice: int, assembly: Assembly) -> list[Piece]:
    """A fragment of a tool call. Without an index a name opens a new call, and arguments go to the last one."""
    function = call.get("function") or {}
    index = call.get("index")
    if index is None:
        index = assembly.opened if function.get("name") else max(assembly.opened - 1, 0)
    pieces = []
    if not assembly.knows(index) and function.get("name"):
        pieces.append(Piece("call", number=index, id=call.get("id") or f"call_{index}", name=function["name"], choice=choice))
    if function.get("arguments"):
        pieces.append(Piece("arguments", function["arguments"], number=index, choice=choice))
    return pieces


def _error_text(error: Any) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text or "the upstream reported an error")
