"""Codex's rollout files: response items, one a line."""

from collections.abc import Sequence
from pathlib import Path

from reef_cli.harness.trajectory import Step, ToolCall, Trajectory, arguments, lines, text_of

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def read_trajectory(files: Sequence[Path], _output: str) -> Trajectory:
    steps: list[Step] = []
    skipped = 0
    for entry in (entry for path in files for entry in lines(path)):
        item = entry.get("payload") if entry.get("type") == "response_item" else None
        if entry.get("type") == "event_msg" and entry.get("payload", {}).get("type") == "error":
            steps.append(Step("assistant", "", error=str(entry["payload"].get("message", "failed"))))
        if not isinstance(item, dict):
            continue
        kind = item.get("type")
        if kind == "message":
            steps.append(
                Step(ROLES.get(item.get("role", ""), "user"), text_of(item.get("content")), response_id=item.get("id"))
            )
        elif kind in ("function_call", "custom_tool_call"):
            call = ToolCall(item.get("call_id", ""), item.get("name", ""), arguments(item.get("arguments", item.get("input"))))
            steps.append(Step("assistant", "", (call,)))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            steps.append(Step("tool", str(item.get("output", "")), call_id=item.get("call_id")))
        else:
            skipped += 1
    return Trajectory(tuple(steps), skipped)
