"""Published clients in Python, each through a real Reef to a provider's double: a tool is used, records and receipts hold.

The SDKs are in the development environment. The agents and `reef-client` are installed from PyPI, so only with
REEF_TEST_CLIENTS=1 (`make test-clients`); REEF_TEST_CLIENTS_ROOT names a folder that keeps their environments.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from tests.doubles.upstream import Chat, Messages, Responses, Upstream, stream
from tests.e2e.server import LIMIT_S, Server

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
installed = pytest.mark.skipif(not os.environ.get("REEF_TEST_CLIENTS"), reason="set REEF_TEST_CLIENTS=1")
PINS = {"reef-client": "0.3.1", "mini-swe-agent": "2.4.6", "aider-chat": "0.86.2"}


def plays(provider: Upstream, *turns: Any) -> None:
    """Answers by how many tool results a request holds: text, or `(tool, arguments)`."""

    async def script(request: web.Request, raw: bytes) -> web.StreamResponse:
        body = json.loads(raw)
        done = max(raw.count(mark) for mark in (b'"role":"tool"', b'"role": "tool"', b'tool_result"', b'function_call_output"'))
        turn = turns[min(done, len(turns) - 1)]
        provider.text, provider.calls = (
            ("", [(f"call_{done}", turn[0], json.dumps(turn[1]))]) if isinstance(turn, tuple) else (turn, ())
        )
        kind = request.path.rsplit("/", 1)[-1]
        wire = {"completions": Chat, "messages": Messages, "responses": Responses}[kind](provider, body)
        return await stream(request, wire.frames()) if body.get("stream") else web.json_response(wire.whole())

    provider.script = script


def kept(front: Server, scenario: str) -> list[dict[str, Any]]:
    """All exchanges of a scenario, whole, each complete and with the receipt its row has."""
    rows = front.get(f"/reef/scenarios/{scenario}/records", request_type="inference")["records"]
    records = [front.get(f"/reef/scenarios/{scenario}/records/{row['id']}") for row in rows]
    assert records and all(record["complete"] and record["release_id"] for record in records)
    return records


def cited(front: Server, scenario: str, receipts: list[str]) -> None:
    reply = front.client(**{"x-reef-scenario": scenario}).post("/reef/report", json={"score": 1, "references": receipts})
    assert reply.status_code == 200 and [one["reference"] for one in reply.json()["eligible"]] == receipts


@pytest.mark.parametrize("streams", [False, True])
def test_openai_chat_uses_a_tool(front: Server, provider: Upstream, streams: bool) -> None:
    scenario = f"openai-{streams}"
    plays(provider, ("bash", {"command": "ls"}), "Two files.")
    tools: Any = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "what is here?"}]
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.token, default_headers={"x-reef-scenario": scenario})
    receipts = []
    with client:
        for _ in range(2):
            if streams:
                with client.chat.completions.stream(model="m", messages=messages, tools=tools) as running:
                    for _event in running:
                        pass
                    message = running.get_final_completion().choices[0].message
                    receipts.append(running._response.headers["x-reef-agent-record-id"])
            else:
                raw = client.chat.completions.with_raw_response.create(model="m", messages=messages, tools=tools)
                message = raw.parse().choices[0].message
                receipts.append(raw.headers["x-reef-agent-record-id"])
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            for call in message.tool_calls or ():
                assert (call.function.name, json.loads(call.function.arguments)) == ("bash", {"command": "ls"})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "a b"})
    assert message.content == "Two files."
    records = kept(front, scenario)
    assert [record["id"] for record in records] == receipts and records[1]["messages"][-1]["content"] == "a b"
    cited(front, scenario, receipts)


def test_openai_responses_use_a_tool(front: Server, provider: Upstream) -> None:
    plays(provider, ("bash", {"command": "ls"}), "Two files.")
    tools: Any = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
    given: list[Any] = [{"role": "user", "content": "what is here?"}]
    with openai.OpenAI(
        base_url=f"{front.url}/v1", api_key=front.token, default_headers={"x-reef-scenario": "responses"}
    ) as client:
        for _ in range(2):
            with client.responses.stream(model="m", input=given, tools=tools, store=False) as running:
                for _event in running:
                    pass
                final = running.get_final_response()
            given += [item.model_dump(exclude_none=True) for item in final.output]
            given += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "a b"}
                for item in final.output
                if item.type == "function_call"
            ]
    assert final.output_text == "Two files."
    records = kept(front, "responses")
    assert [record["finish"] for record in records] == ["tool_calls", "stop"]
    cited(front, "responses", [record["id"] for record in records])


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_uses_a_tool(front: Server, provider: Upstream, streams: bool) -> None:
    scenario = f"anthropic-{streams}"
    plays(provider, ("bash", {"command": "ls"}), "Two files.")
    ask: dict[str, Any] = {"model": "m", "max_tokens": 50, "tools": [{"name": "bash", "input_schema": SCHEMA}]}
    messages: list[Any] = [{"role": "user", "content": "what is here?"}]
    headers = {"x-reef-scenario": scenario}
    with anthropic.Anthropic(base_url=front.url, auth_token=front.token, api_key=None, default_headers=headers) as client:
        for _ in range(2):
            if streams:
                with client.messages.stream(messages=messages, **ask) as running:
                    answer = running.get_final_message()
            else:
                answer = client.messages.create(messages=messages, **ask)
            messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "a b"}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
    assert answer.content[-1].text == "Two files." and answer.stop_reason == "end_turn"
    records = kept(front, scenario)
    assert [record["finish"] for record in records] == ["tool_calls", "stop"]
    cited(front, scenario, [record["id"] for record in records])


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs a package into an environment of its own; its `bin`."""

    def install(package: str) -> Path:
        root = Path(os.environ.get("REEF_TEST_CLIENTS_ROOT") or tmp_path_factory.mktemp("clients")) / package
        if not (root / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
            pip = [str(root / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
            subprocess.run([*pip, f"{package}=={PINS[package]}"], check=True, timeout=900)
        return root / "bin"

    return install


def plain(work: Path, **more: str) -> dict[str, str]:
    """A small environment without the developer's settings or proxies."""
    return {"HOME": str(work), "PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1,localhost", "LANG": "C.UTF-8", **more}


@installed
@pytest.mark.slow
def test_reef_client(front: Server, provider: Upstream, tmp_path: Path, environment: Callable[[str], Path]) -> None:
    bin_ = environment("reef-client")
    plays(provider, ("bash", {"command": "ls"}), "Two files.")
    program = f"""
import json, os, sys
from reef_client import ReefClient, ReefClientError
client = ReefClient({front.url!r}, token=sys.stdin.read())
ask = {{"model": "m", "messages": [{{"role": "user", "content": "what is here?"}}]}}
body, first = client.inference_with_record("seeds", "/v1/chat/completions", ask, extra_headers={{"x-reef-tag-session": "run"}})
call = body["choices"][0]["message"]["tool_calls"][0]
ask["messages"] += [body["choices"][0]["message"], {{"role": "tool", "tool_call_id": call["id"], "content": "a b"}}]
body, second = client.inference_with_record("seeds", "/v1/chat/completions", ask, extra_headers={{"x-reef-tag-session": "run"}})
told = client.report("seeds", {{"score": 1.0, "feedback": "good"}}, references=[first, second])
try:
    client.report("seeds", {{"score": 1.0}}, references=["nowhere"])
except ReefClientError as error:
    refused = error.status
before = client.harness_versions("seeds")
pulls = []
for text in ("one", "two"):
    entry = {{"id": f"rule-{{text}}", "kind": "rules", "config": {{"text": text}}}}
    edit = {{"mutations": [{{"op": "create", "entry": entry}}], "reason": "r"}}
    pulls.append(client.post("/reef/harness/proposals", "seeds", edit)[0]["release_id"])
assert client.harness_pull("seeds", "pulled") == pulls[1]
assert open("pulled/rules/rule-two/text.md").read() == "two"
assert client.harness_pull("seeds", "pulled", version=pulls[0]) == pulls[0]
assert open("pulled/rules/rule-one/text.md").read() == "one" and not os.path.exists("pulled/rules/rule-two/text.md")
versions = [row["artifact_version"] for row in client.harness_versions("seeds")]
assert before == [] and versions == pulls, (before, versions)
text = body["choices"][0]["message"]["content"]
print(json.dumps([call["function"]["name"], text, [first, second], told, refused]))
"""
    ran = subprocess.run(
        [bin_ / "python", "-c", program],
        input=front.token,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=plain(tmp_path),
        cwd=tmp_path,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    tool, text, receipts, told, refused = json.loads(ran.stdout)
    assert (tool, text, refused) == ("bash", "Two files.", 400)
    assert [record["id"] for record in kept(front, "seeds")] == receipts
    assert [one["reference"] for one in told["eligible"]] == receipts

    lines = [
        {"agent_record_id": "old:1", "request_type": "inference", "dialect": "chat", "model": "m", "request": {"messages": []}},
        {"agent_record_id": "old:2", "request_type": "report", "score": 1.0, "references": ["old:1"]},
    ]
    lines[0]["response"] = {"role": "assistant", "content": "x"}
    file = tmp_path / "old.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        moved = subprocess.run(
            [bin_ / "reef-client", "import", str(file), "--url", front.url, "--scenario", "seeds"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=plain(tmp_path, REEF_TOKEN=front.token),
            check=False,
        )
        assert moved.returncode == 0 and "2 records acknowledged" in moved.stdout, moved.stderr
        (tmp_path / "old.jsonl.reef-import.json").unlink()
    assert front.get("/reef/scenarios/seeds/records/old:2")["references"] == ["old:1"]


@installed
@pytest.mark.slow
def test_mini_swe_agent(front: Server, provider: Upstream, tmp_path: Path, environment: Callable[[str], Path]) -> None:
    bin_ = environment("mini-swe-agent")
    plays(
        provider,
        ("bash", {"command": "echo made > made.txt"}),
        ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    )
    variables = {
        "OPENAI_API_BASE": f"{front.url}/v1",
        "OPENAI_API_KEY": front.token,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "config"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    header = 'model.model_kwargs.extra_headers={"x-reef-scenario":"mini"}'
    words = [
        "-y",
        "--exit-immediately",
        "-m",
        "openai/m",
        "-c",
        "mini.yaml",
        "-c",
        header,
        "-t",
        "make a file",
        "-o",
        "out.traj.json",
    ]
    ran = subprocess.run(
        [bin_ / "mini", *words],
        cwd=tmp_path,
        env=plain(tmp_path, **variables),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert (tmp_path / "made.txt").read_text() == "made\n"
    records = kept(front, "mini")
    assert [record["stream"] for record in records] == [False, False]
    assert [call["function"]["name"] for record in records for call in record["response"]["tool_calls"]] == ["bash", "bash"]
    (session,) = front.get("/reef/scenarios/mini/sessions")["sessions"]
    (branch,) = front.get(f"/reef/scenarios/mini/sessions/{session['session']}")["branches"]
    assert len(branch["turns"]) == 2
    cited(front, "mini", [record["id"] for record in records])


@installed
@pytest.mark.slow
def test_aider(front: Server, provider: Upstream, tmp_path: Path, environment: Callable[[str], Path]) -> None:
    bin_ = environment("aider-chat")
    provider.text = "Here it is.\n\nhello.txt\n```\nmade by the model\n```\n"
    (tmp_path / "hello.txt").write_text("empty\n")
    settings = [{"name": "openai/m", "edit_format": "whole", "extra_params": {"extra_headers": {"x-reef-scenario": "aider"}}}]
    (tmp_path / "models.yml").write_text(json.dumps(settings))
    words = ["--model", "openai/m", "--model-settings-file", "models.yml", "--no-git", "--yes-always", "--no-check-update"]
    words += [
        "--no-show-model-warnings",
        "--analytics-disable",
        "--no-show-release-notes",
        "--message",
        "fill the file",
        "hello.txt",
    ]
    variables = {"OPENAI_API_BASE": f"{front.url}/v1", "OPENAI_API_KEY": front.token, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ran = subprocess.run(
        [bin_ / "aider", *words],
        cwd=tmp_path,
        env=plain(tmp_path, **variables),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert (tmp_path / "hello.txt").read_text() == "made by the model\n"
    records = kept(front, "aider")
    assert records[0]["stream"] is True and records[0]["usage"]["completion_tokens"] == 7, "asked for by Reef, not by aider"
    assert "usage" not in ran.stderr
    cited(front, "aider", [record["id"] for record in records])
