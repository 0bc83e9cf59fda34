"""Tools in namespaces (Codex's sub-agents): flat for whoever else answers, the client's own two words on the way back."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.gateway.inference_kit import API, PATHS, captures, local, payloads, post, relaying, stored

CODEX = next(capture for capture in captures() if capture.name == "codex-1-first")
ARGUMENTS = '{"message":"look around"}'
JOINED = "multi_agent_v1__spawn_agent"


def calls(raw: bytes, streams: bool) -> list[tuple[Any, ...]]:
    """The function calls of an answer; of a stream, those of the finished items."""
    items = [event["item"] for event in payloads(raw) if event["type"] == "response.output_item.done"] if streams else None
    found = orjson.loads(raw)["output"] if items is None else items
    return [(one.get("namespace"), one["name"], one["arguments"]) for one in found if one["type"] == "function_call"]


def replayed(body: dict[str, Any]) -> dict[str, Any]:
    call = {
        "type": "function_call",
        "call_id": "c1",
        "namespace": "multi_agent_v1",
        "name": "spawn_agent",
        "arguments": ARGUMENTS,
    }
    return {**body, "input": [*body["input"], call, {"type": "function_call_output", "call_id": "c1", "output": "agent 7"}]}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("provider", ["chat", "messages"])
async def test_a_provider_of_another_dialect_gets_flat_tools(tmp_path: Path, provider: str, streams: bool) -> None:
    async with relaying(tmp_path, API[provider]) as (made, up):
        up.calls = [("c1", JOINED, ARGUMENTS), ("c2", "exec_command", "{}")]
        status, headers, raw = await post(made, PATHS["responses"], {**CODEX.body, "stream": streams})
        assert status == 200, raw
        sent = up.seen[-1].body["tools"]
        tools = (
            {tool["function"]["name"]: tool["function"] for tool in sent}
            if provider == "chat"
            else {t["name"]: t for t in sent}
        )
        assert len(tools) == len(sent) == 12 and {"exec_command", JOINED, "multi_agent_v1__wait_agent"} <= set(tools)
        assert tools[JOINED]["description"].startswith("Tools for spawning and managing sub-agents.\n\n")
        assert calls(raw, streams) == [("multi_agent_v1", "spawn_agent", ARGUMENTS), (None, "exec_command", "{}")]
        record = stored(made, headers["x-reef-agent-record-id"])
        assert record.response is not None
        assert [call["function"]["name"] for call in record.response["tool_calls"]] == [JOINED, "exec_command"]

        status, headers, raw = await post(made, PATHS["responses"], {**replayed(CODEX.body), "stream": streams})
        assert status == 200 and JOINED.encode() in orjson.dumps(up.seen[-1].body["messages"])
        tree = made.log.session_tree("s1", made.log.sessions("s1")[0].session)
        assert len(tree.branches) == 1 and len(tree.branches[0].turns) == 2, "the next turn continues the first"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_local_engine_calls_them_by_their_joined_name(tmp_path: Path, streams: bool) -> None:
    text = f'<tool_call>{{"name": "{JOINED}", "arguments": {ARGUMENTS}}}</tool_call>'
    async with local(tmp_path, text) as (made, _):
        status, _, raw = await post(made, PATHS["responses"], {**CODEX.body, "stream": streams})
        assert status == 200
        assert [(*call[:2], orjson.loads(call[2])) for call in calls(raw, streams)] == [
            ("multi_agent_v1", "spawn_agent", {"message": "look around"})
        ]


async def test_a_provider_that_knows_namespaces_is_left_alone_and_its_records_read_alike(tmp_path: Path) -> None:
    async with relaying(tmp_path, "responses") as (made, up):
        item = {"type": "function_call", "id": "fc", "call_id": "c1", "namespace": "multi_agent_v1", "name": "spawn_agent"}
        up.replies(200, {"id": "r", "status": "completed", "output": [{**item, "arguments": ARGUMENTS}]})
        raw = orjson.dumps({**CODEX.body, "stream": False})
        _, headers, answer = await post(made, PATHS["responses"], raw)
        assert up.seen[-1].raw == raw and calls(answer, False) == [("multi_agent_v1", "spawn_agent", ARGUMENTS)]
        record = stored(made, headers["x-reef-agent-record-id"])
        assert record.response is not None and record.response["tool_calls"][0]["function"]["name"] == JOINED
        await post(made, PATHS["responses"], {**replayed(CODEX.body), "stream": False})
        (branch,) = made.log.session_tree("s1", made.log.sessions("s1")[0].session).branches
        assert len(branch.turns) == 2


@pytest.mark.parametrize("wrong", [{"tools": []}, {"name": "n"}, {"name": "n", "tools": ["x"]}, {"name": 3, "tools": []}])
async def test_a_malformed_namespace_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    async with relaying(tmp_path) as (made, up):
        body = {"model": "m", "input": "hi", "tools": [{"type": "namespace", **wrong}]}
        status, _, raw = await post(made, PATHS["responses"], body)
        assert status == 400 and orjson.loads(raw)["error"]["param"] == "tools" and up.seen == []
