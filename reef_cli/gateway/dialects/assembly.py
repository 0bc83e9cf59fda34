"""Puts the pieces of a streamed answer together again.

What every reader of a provider's stream shares: pieces in, `Answered` out, and the facts that close an answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from reef_cli.core.errors import UpstreamError
from reef_cli.gateway.dialects.canonical import Answered, Finish, Piece, Usage, tool_call
from reef_cli.gateway.sse import Event


class StreamReader(Protocol):
    """Reads one provider's stream, event by event.

    `done` says whether the terminal event came, `finished` whether the model had ended its answer, `error` what the provider
    reported inside the stream. `answers` may be asked at any time; an unfinished one has finish `abort`.
    """

    done: bool
    error: UpstreamError | None

    def feed(self, event: Event) -> Sequence[Piece]: ...

    def only_text(self, event: Mapping[str, Any], /) -> str | None:
        """The text of an event that brings nothing else, so that it may be joined with its like; else None. May raise."""
        ...

    @property
    def finished(self) -> bool: ...

    def answers(self) -> list[Answered]: ...


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Assembly:
    """One answer under way."""

    def __init__(self) -> None:
        self.finish: Finish | None = None
        self.matched: str | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._signatures: list[str] = []
        self._redacted: list[str] = []
        self._calls: dict[int, _Call] = {}

    def push(self, piece: Piece) -> None:
        match piece.kind:
            case "text":
                self._texts.append(piece.text)
            case "reasoning":
                self._reasoning.append(piece.text)
            case "signature":
                self._signatures.append(piece.text)
            case "redacted":
                self._redacted.append(piece.text)
            case "call":
                self._calls[piece.number] = _Call(piece.id, piece.name)
            case "arguments":
                self._calls.setdefault(piece.number, _Call("", "")).arguments.append(piece.text)

    def say(self, text: str) -> None:
        """`push` of a piece of text."""
        self._texts.append(text)

    def knows(self, index: int) -> bool:
        """Whether tool call `index` was opened."""
        return index in self._calls

    @property
    def opened(self) -> int:
        """How many tool calls there are so far."""
        return len(self._calls)

    def answered(self, usage: Usage) -> Answered:
        calls: list[dict[str, Any]] = [
            tool_call(call.id, call.name, "".join(call.arguments)) for _, call in sorted(self._calls.items())
        ]
        finish = self.finish or "abort"
        text = "".join(self._texts)
        return Answered(
            content=text if text or not calls else None,
            finish="tool_calls" if finish == "stop" and calls else finish,
            tool_calls=calls,
            reasoning="".join(self._reasoning) or None,
            signature="".join(self._signatures) or None,
            redacted=tuple(self._redacted),
            matched=self.matched,
            usage=usage,
        )
