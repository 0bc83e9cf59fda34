"""What an agent did, in one shape for all agents: steps with a role, text and tool calls.

Agents write logs of many forms; an adapter's `read_trajectory` turns its own into steps with the helpers here. Unknown
roles and kinds of lines are skipped and counted, since agents add new ones with every version; a torn last line is normal.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool the agent called; `arguments` is an object, or the raw text when it is no JSON."""

    id: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Step:
    """One message. `role` is system, user, assistant or tool; `call_id` names the call a tool result answers;
    `response_id` is the gateway's completion id, the key to the record; `error` is the agent's own word for a failure."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    response_id: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Steps in order, how many lines were not understood, and whether the agent said it failed."""

    steps: tuple[Step, ...] = ()
    skipped: int = 0

    @property
    def final(self) -> str:
        """The last thing the assistant said."""
        return next((step.text for step in reversed(self.steps) if step.role == "assistant" and step.text), "")

    @property
    def error(self) -> str | None:
        """The failure of the last assistant step, if it failed."""
        last = next((step for step in reversed(self.steps) if step.role == "assistant"), None)
        return last.error if last else None


def lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Objects of a JSONL file; broken lines are skipped (an agent that was killed leaves half a line)."""
    for raw in path.read_bytes().splitlines():
        try:
            value = json.loads(raw)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def text_of(content: Any) -> str:
    """The text of a message's content: a string, a list of parts, or nothing."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def arguments(raw: Any) -> Any:
    """Tool arguments: parsed when they are JSON text."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def of_chat(messages: Sequence[Mapping[str, Any]]) -> Trajectory:
    """Steps of messages in chat-completions form."""
    steps = []
    for message in messages:
        calls = tuple(
            ToolCall(call.get("id", ""), call["function"]["name"], arguments(call["function"].get("arguments", "")))
            for call in message.get("tool_calls") or ()
            if isinstance(call.get("function"), Mapping) and "name" in call["function"]
        )
        role = {"developer": "system"}.get(message.get("role", ""), message.get("role", ""))
        steps.append(
            Step(
                role,
                text_of(message.get("content")),
                calls,
                message.get("tool_call_id"),
                message.get("response_id"),
                message.get("error"),
            )
        )
    known = ("system", "user", "assistant", "tool")
    return Trajectory(tuple(step for step in steps if step.role in known), sum(step.role not in known for step in steps))
