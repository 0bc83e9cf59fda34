"""opencode keeps sessions in a database; headless runs print the same events as JSON lines. Its MCP fields have other names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reef_cli.harness.trajectory import Step, ToolCall, Trajectory


def mcp_server(server: Mapping[str, Any]) -> dict[str, Any]:
    if "url" in server:
        return {"type": "remote", "url": server["url"], "enabled": True, "headers": dict(server.get("headers", {}))}
    command = [server["command"], *server.get("args", ())]
    return {"type": "local", "command": command, "enabled": True, "environment": dict(server.get("env", {}))}


def read_trajectory(_files: Sequence[Path], output: str) -> Trajectory:
    steps: list[Step] = []
    skipped = 0
    for line in output.splitlines():
        try:
            event = json.loads(line)
            kind, part = event["type"], event.get("part") or {}
        except (ValueError, KeyError, TypeError):
            skipped += 1
            continue
        if kind == "text":
            steps.append(Step("assistant", part.get("text", "")))
        elif kind == "tool_use":
            state = part.get("state") or {}
            call = ToolCall(part.get("callID", ""), part.get("tool", ""), state.get("input"))
            steps += [Step("assistant", "", (call,)), Step("tool", str(state.get("output", "")), call_id=call.id)]
        elif kind == "error":
            steps.append(Step("assistant", "", error=json.dumps(event.get("error"))))
    return Trajectory(tuple(steps), skipped)
