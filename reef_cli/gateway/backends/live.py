"""Text of a local model, told apart while it streams.

Text goes out as soon as it cannot be the start of a reasoning tag or a tool call. Reasoning between tags streams as reasoning;
from the first sign of a tool call on everything waits for the end, where the model's own parser reads the whole text. That
parser has the last word: blanks it may drop are held back, and `rest` sends what it found beyond what is out, so the pieces
together equal the unstreamed answer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from reef_cli.core.ports import ParsedMessage
from reef_cli.gateway.dialects.canonical import Answered, Piece

THINK, END_THINK = "<think>", "</think>"
CALL_OPENERS = (
    *("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>", "<|python_start|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    *("{", "["),
)
"""How tool calls start in the formats open models use; brackets count only as the very first thing a model writes."""

_BARE = ("{", "[")

Mode = Literal["text", "reasoning", "between", "held"]
"""`between`: behind a message in a channel, where nothing but the next header may stand."""

_START, _ANALYSIS, _FINAL = "<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_END, _CHANNEL, _ANOTHER = "<|end|>", "<|channel|>", ("<|start|>", "<|call|>", "<|return|>")
_MODES: Mapping[str, Mode] = {
    THINK: "reasoning",
    END_THINK: "text",
    _END: "between",
    _ANALYSIS: "reasoning",
    _START + _ANALYSIS: "reasoning",
    _FINAL: "text",
    _START + _FINAL: "text",
}
"""What follows a tag. After any other tag everything waits: it opens a call, or a channel that is read at the end."""

_HEADS = (THINK, _ANALYSIS, _FINAL, _START + _ANALYSIS, _START + _FINAL, _CHANNEL, _ANOTHER[0])
_LEADING = (*_BARE, *_HEADS)


class LiveText:
    """One answer under way. `read` is the model's parser; `thinking` says that the prompt opened the reasoning already."""

    def __init__(self, read: Callable[[str], ParsedMessage], *, tools: bool, thinking: bool = False, choice: int = 0) -> None:
        self._read = read
        self._openers = CALL_OPENERS if tools else ()
        self._choice = choice
        self._mode: Mode = "reasoning" if thinking else "text"
        self._thought = thinking
        self._channels = False
        self._buffer = ""
        self.raw = ""
        self.text = ""
        self.reasoning = ""

    def feed(self, text: str) -> Sequence[Piece]:
        """Pieces that are certain now."""
        self.raw += text
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Send what is certain; True when the mode changed and there may be more."""
        if self._mode == "held":
            return False
        tags = self._tags()
        at, tag = _first(self._buffer, tags, () if self._channels else _LEADING)
        if tag is None or any(len(one) > len(self._buffer) - at and one.startswith(self._buffer[at:]) for one in tags):
            self._send(min(at, len(self._buffer) - _maybe(self._buffer, tags)), pieces)
            return False
        self._send(at, pieces)
        if tag not in _MODES:
            self._mode = "held"
        if self._mode == "held":
            return False
        self._buffer = self._buffer.lstrip()[len(tag) :]
        self._channels = self._channels or tag not in (THINK, END_THINK)
        self._mode, self._thought = _MODES[tag], True
        return True

    def _tags(self) -> tuple[str, ...]:
        """Tags that may come next: reasoning only before anything else, brackets only as the first thing. Who begins in
        channels goes on in them."""
        if self._mode == "between":
            return (_START + _FINAL, _FINAL, _CHANNEL, *_ANOTHER)
        if self._channels:
            return (_END, *_ANOTHER)
        if self._mode == "reasoning":
            return (END_THINK,)
        openers = tuple(opener for opener in self._openers if not (self.text and opener in _BARE))
        return openers if self.text or self._thought else (*_HEADS, *openers)

    def _send(self, end: int, pieces: list[Piece]) -> None:
        """Send the buffer up to `end` without the blanks at its end, which the parser may drop."""
        ready = self._buffer[:end].rstrip()
        if not ready:
            return
        if self._mode == "between":
            self._mode = "held"
            return
        rest = self._buffer[len(ready) :]
        kind: Literal["text", "reasoning"] = "reasoning" if self._mode == "reasoning" else "text"
        if not (self.reasoning if kind == "reasoning" else self.text):
            if kind == "text" and self._openers and not self._thought and ready[0] == "\n":
                # Whether the parser keeps these depends on a tool call that may still come.
                self._mode = "held"
                return
            ready = self._beginning(kind, ready, self.raw[: len(self.raw) - len(rest)])
        self._buffer = rest
        if kind == "reasoning":
            self.reasoning += ready
        else:
            self.text += ready
        pieces.append(Piece(kind, ready, choice=self._choice))

    def _beginning(self, kind: str, ready: str, so_far: str) -> str:
        """The first piece of its kind as the parser would begin it."""
        parsed = self._read(so_far)
        begun = ((parsed.reasoning if kind == "reasoning" else parsed.content) or "").rstrip()
        return begun if begun and ready.endswith(begun) else ready.lstrip()

    def rest(self, answer: Answered) -> Sequence[Piece]:
        """What the whole answer holds beyond what was sent."""
        pieces: list[Piece] = []
        reasoning, content = answer.reasoning or "", answer.content or ""
        if reasoning.startswith(self.reasoning) and len(reasoning) > len(self.reasoning) and not self.text:
            pieces.append(Piece("reasoning", reasoning[len(self.reasoning) :], choice=self._choice))
        if content.startswith(self.text) and len(content) > len(self.text):
            pieces.append(Piece("text", content[len(self.text) :], choice=self._choice))
        elif not content.startswith(self.text) and not answer.tool_calls and self._buffer.strip():
            # Read to its end the answer is another one than what is out; the rest goes as it stands.
            pieces.append(Piece("text", self._buffer, choice=self._choice))
        for index, call in enumerate(answer.tool_calls):
            function = call["function"]
            pieces.append(Piece("call", number=index, id=call["id"], name=function["name"], choice=self._choice))
            pieces.append(Piece("arguments", function["arguments"], number=index, choice=self._choice))
        return pieces


def _first(text: str, tags: Sequence[str], leading: Sequence[str]) -> tuple[int, str | None]:
    """The earliest tag in the text; those that lead an answer count only at its start."""
    best: tuple[int, str | None] = (len(text), None)
    lead = len(text) - len(text.lstrip())
    for tag in tags:
        at = text.find(tag)
        if at >= 0 and (at, -len(tag)) < (best[0], -len(best[1] or "")) and (tag not in leading or at == lead):
            best = (at, tag)
    return best


def _maybe(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of the text that may be the start of a tag."""
    longest = max((len(tag) for tag in tags), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        end = text[-size:]
        if any(tag.startswith(end) for tag in tags):
            return size
    return 0


def thinks(prompt_tail: str) -> bool:
    """Whether a prompt ends inside an opened reasoning tag, as templates of some reasoning models do."""
    return re.search(r"<think>\s*$", prompt_tail) is not None
