"""Claude Code's session files, and the flag that names the MCP servers of the tree."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reef_cli.harness.render import Rendered
from reef_cli.harness.trajectory import Step, ToolCall, Trajectory, lines, text_of
from reef_cli.harness.tree import Tree


def finish(out: Rendered, _tree: Tree) -> None:
    if "mcp" in out.documents:
        out.args.extend(["--mcp-config", "{config}/reef-mcp.json"])


def _steps(message: dict[str, Any], failed: bool) -> list[Step]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    results = [
        Step("tool", text_of(part.get("content")), call_id=part.get("tool_use_id"))
        for part in parts
        if part.get("type") == "tool_result"
    ]
    if results:
        return results
    calls = tuple(
        ToolCall(part.get("id", ""), part.get("name", ""), part.get("input"))
        for part in parts
        if part.get("type") == "tool_use"
    )
    text = text_of(content)
    return [Step(message.get("role", ""), text, calls, response_id=message.get("id"), error=text if failed else None)]


def read_trajectory(files: Sequence[Path], _output: str) -> Trajectory:
    entries = [entry for path in files for entry in lines(path)]
    spoken = [
        entry for entry in entries if entry.get("type") in ("user", "assistant") and isinstance(entry.get("message"), dict)
    ]
    steps = [step for entry in spoken for step in _steps(entry["message"], bool(entry.get("isApiErrorMessage")))]
    return Trajectory(tuple(steps), len(entries) - len(spoken))
