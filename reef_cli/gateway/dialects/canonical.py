"""The form every dialect is read into and written from.

Messages are OpenAI chat messages (plain dicts): roles `system`, `developer`, `user`, `assistant`, `tool`; content a string, a
list of parts, or None; `tool_calls`, `tool_call_id`; and the wire's common extensions `reasoning_content`,
`reasoning_signature`, `redacted_thinking` and `is_error`, which keep what other dialects say and chat has no word for.
Tools are OpenAI function tools. An answer is an `Answered`; an answer under way is a row of pieces. Knows no HTTP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from reef_cli.core.errors import InvalidRequest, ReefError, UnsupportedField
from reef_cli.core.types import Dialect
from reef_cli.core.values import immutable

Body = Mapping[str, Any]
Message = dict[str, Any]
Finish = Literal["stop", "length", "tool_calls", "content_filter", "abort"]


def names(text: str) -> frozenset[str]:
    """The words of a text: how the modules write down their field names."""
    return frozenset(text.split())


@immutable
class Options:
    """What the client asked of the answer; None means it did not say."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    response_format: Mapping[str, Any] | None = None
    ignore_eos: bool = False


_CLIENTS: Mapping[tuple[Dialect, str], str] = {
    ("messages", "stop"): "stop_sequences",
    ("messages", "response_format"): "output_config.format",
    ("responses", "response_format"): "text.format",
    ("responses", "reasoning_effort"): "reasoning.effort",
}


@immutable
class ChatRequest:
    """One request, whatever dialect it came in. `prompt` is set for raw completions only: text, or token ids.

    `namespaces` maps a tool's name here to the namespace and name the client knows it by (responses only). `extra` are fields
    that have no canonical meaning and are not known to be harmless; who cannot pass them on refuses them. `left_out` names
    hints and tools that only their own provider understands: the client is told that they had no effect.
    """

    dialect: Dialect
    model: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Options = Options()
    stream: bool = False
    include_usage: bool = False
    prompt: str | Sequence[int] | None = None
    echo: bool = False
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()

    def called(self, option: str) -> str:
        """The client's own name of an option."""
        return _CLIENTS.get((self.dialect, option), option)

    def refuse_extra(self, engine: str) -> None:
        """Raise `UnsupportedField` naming the first field that would be lost."""
        for name in self.extra:
            raise UnsupportedField(f"The field `{name}` cannot be served by {engine}.", hint="Leave it out.", param=name)


@immutable
class Usage:
    """Token counts. `prompt` includes the cached ones; `output` includes the reasoning ones."""

    prompt: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0
    cache_written: int = 0


@immutable
class TokenScore:
    """One sampled token with its log-probability in nats."""

    token: str
    logprob: float


@immutable
class Answered:
    """A whole answer. `matched` is the stop string that ended it, `scores` the tokens' log-probs where asked for."""

    content: str | None
    finish: Finish
    tool_calls: Sequence[Mapping[str, Any]] = ()
    reasoning: str | None = None
    signature: str | None = None
    redacted: Sequence[str] = ()
    matched: str | None = None
    usage: Usage = Usage()
    scores: Sequence[TokenScore] | None = None

    def message(self) -> Message:
        """The answer as a canonical assistant message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.signature:
            message["reasoning_signature"] = self.signature
        if self.redacted:
            message["redacted_thinking"] = list(self.redacted)
        return message


class Piece(NamedTuple):
    """A piece of an answer under way. A tuple, since there is one per token and a frozen dataclass takes four times as long.

    `text` and `reasoning` append to the text of that kind; `signature` signs the reasoning so far; `redacted` is one opaque
    reasoning block; `call` opens tool call `number` with its id and name; `arguments` appends to that call's JSON text.
    `choice` tells the answers of one request apart where several were asked for. `scores` are the tokens sampled since the
    piece before, where the client asked for their log-probs.
    """

    kind: Literal["text", "reasoning", "signature", "redacted", "call", "arguments"]
    text: str = ""
    number: int = 0
    id: str = ""
    name: str = ""
    choice: int = 0
    scores: "Sequence[TokenScore]" = ()


def pieces_of(answer: Answered, choice: int = 0) -> list[Piece]:
    """A whole answer as the pieces a stream of it would have brought."""
    pieces = [Piece("redacted", data, choice=choice) for data in answer.redacted]
    for kind, text in (("reasoning", answer.reasoning), ("signature", answer.signature), ("text", answer.content)):
        if text:
            pieces.append(Piece(kind, text, choice=choice))  # type: ignore[arg-type]
    for index, call in enumerate(answer.tool_calls):
        function = call["function"]
        pieces.append(Piece("call", number=index, id=call["id"], name=function["name"], choice=choice))
        pieces.append(Piece("arguments", function["arguments"], number=index, choice=choice))
    return pieces


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is known of an answer before it is there. `receipt` is None where nothing is recorded."""

    id: str
    model: str
    created: int
    receipt: str | None = None
    request_id: str = ""
    prompt_tokens: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    """Told beside the receipt at the end of a stream: what its head could not know yet (weights that changed meanwhile)."""

    def reef(self) -> dict[str, Any]:
        """The member that carries the receipt, or nothing."""
        return {"reef": {"agent_record_id": self.receipt, **self.more}} if self.receipt else {}


class StreamEncoder(Protocol):
    """Writes one streamed answer in a dialect. `finish` holds every terminal frame and is sent once the record is durable."""

    def begin(self) -> bytes: ...

    def push(self, piece: Piece) -> bytes: ...

    def keepalive(self) -> bytes: ...

    def finish(self, answers: Sequence[Answered]) -> bytes: ...

    def fail(self, error: ReefError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Tool:
    """A function tool taken apart."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool | None = None

    def canonical(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A canonical tool call; `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(content: Any, where: str) -> str:
    """The text of content that may be a string, parts or null; other parts raise `UnsupportedField`."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif "text" in part and isinstance(part["text"], str):
            texts.append(part["text"])
        else:
            kind = str(part.get("type", "unknown"))
            raise UnsupportedField(f"Content of type `{kind}` cannot be sent in `{where}` here.", param=where)
    return "".join(texts)


def no_counterpart(name: str) -> UnsupportedField:
    """The refusal of a field that the upstream's dialect has no word for."""
    return UnsupportedField(f"The field `{name}` has no counterpart in the upstream's dialect.", param=name)


def failed(content: Any) -> Any:
    """The result of a tool call that failed, for dialects that can say so in words only."""
    said = content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())
    if "error" in said[:80].lower():
        return content
    return f"Error: {said}" if isinstance(content, str | None) else [{"type": "text", "text": "Error:"}, *content]


def compact(content: Any) -> Any:
    """Parts that are all plain text become one string, so that equal conversations have equal records."""
    if (
        isinstance(content, list)
        and content
        and all(set(part) == {"type", "text"} and part["type"] == "text" for part in content)
    ):
        return content[0]["text"] if len(content) == 1 else content
    return content


def _objects(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110 - every message of every request comes by here
        if not isinstance(item, dict):
            return False
    return True


class Fields:
    """Reads the optional scalars of a body and says which one has the wrong type."""

    def __init__(self, body: Body) -> None:
        self.body = body

    def _get(self, name: str, fits: Callable[[Any], bool], kind: str) -> Any:
        value = self.body.get(name)
        if value is None or fits(value):
            return value
        raise InvalidRequest(f"`{name}` must be {kind}.", param=name)

    def integer(self, name: str, least: int | None = None) -> int | None:
        value = self._get(name, lambda v: isinstance(v, int) and not isinstance(v, bool), "an integer")
        if value is not None and least is not None and value < least:
            raise InvalidRequest(f"`{name}` must be at least {least}.", param=name)
        return value  # type: ignore[no-any-return]

    def number(self, name: str) -> float | None:
        return self._get(name, lambda v: isinstance(v, int | float) and not isinstance(v, bool), "a number")  # type: ignore[no-any-return]

    def flag(self, name: str) -> bool | None:
        return self._get(name, lambda v: isinstance(v, bool), "true or false")  # type: ignore[no-any-return]

    def text(self, name: str) -> str | None:
        return self._get(name, lambda v: isinstance(v, str), "a string")  # type: ignore[no-any-return]

    def mapping(self, name: str) -> dict[str, Any] | None:
        return self._get(name, lambda v: isinstance(v, dict), "an object")  # type: ignore[no-any-return]

    def objects(self, name: str) -> list[dict[str, Any]]:
        """A list of objects; absent and null count as empty."""
        value = self._get(name, _objects, "an array of objects")
        return value or []

    def texts(self, name: str) -> list[str]:
        """A list of strings; absent and null count as empty."""
        value = self._get(
            name, lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v), "an array of strings"
        )
        return value or []

    def stop(self, name: str) -> tuple[str, ...]:
        value = self.body.get(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise InvalidRequest(f"`{name}` must be a string or an array of strings.", param=name)
        return tuple(item for item in values if item)

    def model(self) -> str:
        value = self.text("model")
        return value or ""

    def extra(self, known: frozenset[str]) -> dict[str, Any]:
        """The members that are neither known nor empty."""
        return {name: value for name, value in self.body.items() if name not in known and value not in (None, [], {}, "")}

    def hints(self, harmless: frozenset[str]) -> list[str]:
        """The harmless members that say something."""
        return [name for name, value in self.body.items() if name in harmless and value not in (None, [], {}, "", False)]


class InOrder:
    """Puts the pieces of an answer in an order that dialects with one open block at a time can write.

    Everything up to the end of the first tool call passes at once. Providers may interleave the arguments of parallel calls,
    so whatever else comes after the first call opened waits, call by call, until `rest`.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._held: dict[int, list[Piece]] = {}

    def push(self, piece: Piece) -> Sequence[Piece]:
        if self._first is None:
            if piece.kind == "call":
                self._first = piece.number
            return (piece,)
        if piece.kind == "arguments" and piece.number == self._first:
            return (piece,)
        lane = piece.number if piece.kind in ("call", "arguments") else -1
        self._held.setdefault(lane, []).append(piece)
        return ()

    def rest(self) -> Sequence[Piece]:
        """What waited: calls by number, then text that followed them."""
        lanes = sorted(self._held, key=lambda lane: (lane < 0, lane))
        pieces = [piece for lane in lanes for piece in self._held[lane]]
        self._held = {}
        return pieces
