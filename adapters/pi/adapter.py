"""Pi's session files: one JSON object a line, messages under `message`, tool calls as content parts."""

from collections.abc import Sequence
from pathlib import Path

from reef_cli.harness.trajectory import Step, ToolCall, Trajectory, lines, text_of

ROLES = {"user": "user", "assistant": "assistant", "toolResult": "tool", "system": "system"}


def read_trajectory(files: Sequence[Path], _output: str) -> Trajectory:
    steps: list[Step] = []
    skipped = 0
    for entry in (entry for path in files for entry in lines(path)):
        if entry.get("type") != "message":
            continue
        message = entry["message"]
        role = ROLES.get(message.get("role"))
        if role is None:
            skipped += 1
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        calls = tuple(
            ToolCall(part.get("id", ""), part.get("name", ""), part.get("arguments"))
            for part in parts
            if part.get("type") == "toolCall"
        )
        failed = message.get("errorMessage") if message.get("stopReason") in ("error", "aborted") else None
        steps.append(Step(role, text_of(content), calls, message.get("toolCallId"), message.get("responseId"), failed))
    return Trajectory(tuple(steps), skipped)
