"""Real agents through a real server: installed, used, reported, updated to a new release, and removed without a trace.

The model behind the server is a stub. Needs the npm registry, so only with REEF_TEST_CLIENTS=1.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.doubles.background import background_upstream
from tests.doubles.upstream import Chat, Upstream, stream
from tests.e2e.server import Server, serving
from tests.harness.conftest import picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("REEF_TEST_CLIENTS"), reason="set REEF_TEST_CLIENTS=1"),
]
RULES = {"id": "house", "kind": "rules", "config": {"text": "HOUSE-RULE-SEEN"}}
SKILL = {"id": "make-pdf", "kind": "skill", "config": {"description": 'Makes PDFs: say "please"', "text": "# Steps"}}
NEWER = {**RULES, "config": {"text": "NEWER-RULE-SEEN"}}
HEADLESS = {
    "pi@1.6.0": ["-p"],
    "pi@0.84.2": ["-p"],
    "claude-code": ["--settings", '{"permissions": {"allow": ["Bash"]}}', "-p"],
    "codex": ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"],
    "opencode": ["run", "--title", "t"],
}
SHELL_TOOLS = {"bash": "command", "Bash": "command", "shell": "command", "exec_command": "cmd", "shell_command": "command"}


async def working(request: web.Request, raw: bytes) -> web.StreamResponse:
    """A model that runs one command with the agent's own shell tool, then says it has finished."""
    body = orjson.loads(raw)
    offered = [tool["function"]["name"] for tool in body.get("tools") or () if "function" in tool]
    name = next((name for name in offered if name in SHELL_TOOLS), None)
    answered = any(message.get("role") == "tool" for message in body["messages"])
    call = name is not None and not answered
    command: Any = "echo made > made.txt"
    calls = (("call_1", name, json.dumps({SHELL_TOOLS[name]: command})),) if call and name else ()
    wire = Chat(Upstream(text="Finished.", calls=calls), body)
    return await stream(request, wire.frames()) if body.get("stream") else web.json_response(wire.whole())


@pytest.fixture(scope="module")
def provider() -> Iterator[Upstream]:
    with background_upstream() as double:
        double.script = working
        yield double


@pytest.fixture(scope="module")
def server(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("clients") / "h"
    with serving(home, Path("stub-model"), **{"engine.kind": "upstream", "engine.url": provider.url}) as running:
        yield running


class Machine:
    """A user's machine: a fresh HOME with one agent, installed by pipe from the server."""

    def __init__(self, server: Server, name: str, home: Path) -> None:
        self.server, self.name, self.home = server, name, home
        self.scenario = name.replace("@", "-").replace(".", "-")
        self.work = home.parent / "work"
        self.work.mkdir()
        self.bare = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "HTTP_PROXY": "http://127.0.0.1:9"}

    def propose(self, *mutations: dict[str, Any]) -> str:
        client = self.server.client(**{"x-reef-scenario": self.scenario})
        reply = client.post("/reef/harness/proposals", json={"mutations": list(mutations)})
        assert reply.status_code == 201, reply.text
        return str(reply.json()["release_id"])

    def install(self) -> None:
        registry = {key: value for key, value in os.environ.items() if key.lower().startswith(("npm_config", "node_extra"))}
        registry.setdefault("npm_config_userconfig", str(Path("~/.npmrc").expanduser()))
        plain = {key: value for key, value in self.bare.items() if key != "HTTP_PROXY"}
        environment = {**plain, **registry, "REEF_TOKEN": self.server.token}
        pipe = (
            f'curl -fsS -H "Authorization: Bearer $REEF_TOKEN" -H "x-reef-scenario: {self.scenario}" '
            f"'{self.server.url}/reef/harness/install?adapter={self.name}' | bash"
        )
        done = subprocess.run(["bash", "-o", "pipefail", "-c", pipe], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "installed" in done.stderr, done.stderr

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        wrapper = self.home / ".local/bin" / f"reef-{self.name.partition('@')[0]}"
        return subprocess.run(
            [str(wrapper), *words],
            env=self.bare,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Whole records, oldest first."""
        rows = self.server.get(f"/reef/scenarios/{self.scenario}/records", order="oldest", limit=100)["records"]
        path = f"/reef/scenarios/{self.scenario}/records"
        return [self.server.get(f"{path}/{row['id']}") for row in rows if row["kind"] == kind]


@pytest.fixture
def machine(server: Server, home: Path) -> Callable[[str], Machine]:
    return lambda name: Machine(server, name, home)


@pytest.mark.parametrize("name", HEADLESS)
def test_agent_installs_runs_reports_updates_and_leaves_no_trace(
    name: str, machine: Callable[[str], Machine], home: Path, provider: Upstream
) -> None:
    mine = machine(name)
    before = picture(home)
    first = mine.propose({"op": "create", "entry": RULES}, {"op": "create", "entry": SKILL})
    mine.install()

    ran = mine.run(*HEADLESS[name], "make a file")
    assert ran.returncode == 0 and "Finished." in ran.stdout, ran.stdout + ran.stderr
    assert (mine.work / "made.txt").read_text() == "made\n" and "available" not in ran.stderr
    asked = str([seen.body for seen in provider.seen if seen.method == "POST"])
    assert "HOUSE-RULE-SEEN" in asked and "make-pdf" in asked and "Makes PDFs" in asked
    records = mine.records("inference")
    assert len(records) >= 2
    assert {record["tags"]["harness"] for record in records} == {first}
    assert len({record["tags"]["session"] for record in records}) == 1

    assert mine.run("report", "--score", "1", "--feedback", "good").returncode == 0
    (report,) = mine.records("report")
    assert report["score"] == 1.0 and set(report["references"]) <= {record["id"] for record in records}

    provider.seen.clear()
    second = mine.propose({"op": "update", "entry": NEWER})
    offered = mine.run(*HEADLESS[name], "again")
    assert offered.returncode == 0, offered.stderr
    if not name.startswith("claude-code"):  # it shows the notice in its own screen
        assert f"release {second} is available" in offered.stderr
        assert "What changed: changed rules house" in offered.stderr, offered.stderr
    assert "HOUSE-RULE-SEEN" in str([seen.body for seen in provider.seen if seen.method == "POST"])
    updated = mine.run("update")
    assert updated.returncode == 0, updated.stderr
    provider.seen.clear()
    last = mine.run(*HEADLESS[name], "and again")
    assert last.returncode == 0 and "available" not in last.stderr, last.stderr
    asked = str([seen.body for seen in provider.seen if seen.method == "POST"])
    assert "NEWER-RULE-SEEN" in asked and "HOUSE-RULE-SEEN" not in asked
    assert {record["tags"]["harness"] for record in mine.records("inference")} == {first, second}

    assert mine.run("diff").stdout.strip() == ""
    assert mine.run("uninstall").returncode == 0
    assert picture(home) == before
