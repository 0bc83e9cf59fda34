"""A local model's raw text read by the conventions models are taught: reasoning first, then text and tool calls.

Reasoning is what stands in `<think>…</think>`, also where the template opened the tag, or in the channel for it. Tool calls are
read only when tools were offered, so an agent that parses its own markup keeps it. The families are told apart by their
markers; the first whose reader finds a call is the one. What cannot be read stays text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from reef_cli.core.ports import ParsedMessage
from reef_cli.engines import call_formats, harmony
from reef_cli.engines.call_formats import Call, Offered, Reader

FAMILIES: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), call_formats.deepseek),
    (("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"), call_formats.kimi),
    (("[TOOL_CALLS]",), call_formats.mistral),
    (("<tool_call>",), call_formats.tagged),
    (("<tool_call>",), call_formats.paired),
    (("<function=",), call_formats.functions),
)
"""Markers and who reads what they open. Bare JSON and Python lists have none and are the whole text."""

BARE = ("<|python_tag|>", "<|python_start|>", "{", "[")
CHANNELS = ("<|channel|>", "<|start|>")
_THINK = ("<think>", "</think>")

MARKERS = tuple(marker for markers, _ in FAMILIES for marker in markers) + BARE[:2]
"""What opens a call. Where such a marker is a special token of the model, its text must be asked for with them."""

ALWAYS = (*CHANNELS, *_THINK)
"""Markers that stand in any answer, tools or not."""


def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedMessage:
    """Split raw text into reasoning, content and calls; content is None when calls or reasoning are all there is."""
    offered = call_formats.offered_of(tools)
    if harmony.speaks(text):
        return harmony.parse(text, offered)
    reasoning, rest = _reasoning(text)
    calls: list[Call] = []
    if offered:
        rest, calls = _calls(rest, offered)
    content = rest.strip("\n") if calls or reasoning is not None else rest
    return ParsedMessage(content or (None if calls or reasoning is not None else ""), tuple(calls), reasoning)


def _reasoning(text: str) -> tuple[str | None, str]:
    opened = text.lstrip().startswith("<think>")
    if not opened and "</think>" not in text:
        return None, text
    inner = text.lstrip().removeprefix("<think>") if opened else text
    thought, closed, rest = inner.partition("</think>")
    return thought.strip(), rest.lstrip("\n") if closed else ""


def _calls(text: str, offered: Offered) -> tuple[str, list[Call]]:
    """The calls of the family whose marker comes first; before any what is nothing but calls: its strings may hold markers."""
    readers: list[Reader] = [call_formats.bare]
    places = [(min((text.find(mark) for mark in marks if mark in text), default=-1), reader) for marks, reader in FAMILIES]
    readers += [reader for at, reader in sorted(places, key=lambda place: place[0]) if at >= 0]
    for reader in readers:
        rest, calls = reader(text, offered)
        if calls:
            return rest, calls
    return text, []
