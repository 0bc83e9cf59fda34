"""Real coding agents, installed by pipe from a real Reef and run through it to a provider's double: one tool-using run each.

Needs the npm registry, so only with REEF_TEST_CLIENTS=1 (`make test-clients`).
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.upstream import Upstream
from tests.e2e.server import Server
from tests.e2e.test_packages import installed, kept, plays

pytestmark = [pytest.mark.slow, installed]
COMMAND = "echo made > made.txt"
AGENTS: dict[str, tuple[list[str], tuple[str, dict[str, Any]]]] = {
    "pi@1.6.0": (["-p"], ("bash", {"command": COMMAND})),
    "pi@0.84.2": (["-p"], ("bash", {"command": COMMAND})),
    "claude-code": (
        ["-p", "--permission-mode=acceptEdits", "--allowedTools=Bash(echo *)", "--"],
        ("Bash", {"command": COMMAND, "description": "makes it"}),
    ),
    "codex": (["exec", "--skip-git-repo-check"], ("exec_command", {"cmd": COMMAND})),
    "opencode": (["run", "--title", "t"], ("bash", {"command": COMMAND, "description": "makes it"})),
}
RULES = {"id": "house", "kind": "rules", "config": {"text": "HOUSE-RULE-SEEN"}}


@pytest.mark.parametrize("name", AGENTS)
def test_agent(name: str, front: Server, provider: Upstream, tmp_path: Path) -> None:
    words, tool = AGENTS[name]
    scenario = name.replace("@", "-")
    plays(provider, tool, "Finished.")
    client = front.client(**{"x-reef-scenario": scenario})
    proposed = client.post("/reef/harness/proposals", json={"mutations": [{"op": "create", "entry": RULES}]})
    assert proposed.status_code == 201, proposed.text
    script = client.get("/reef/harness/install", params={"adapter": name})
    assert script.status_code == 200, script.text

    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir(), work.mkdir()
    bare = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    registry = {key: value for key, value in os.environ.items() if key.lower().startswith(("npm_config", "node_extra"))}
    registry.setdefault("npm_config_userconfig", str(Path("~/.npmrc").expanduser()))
    made = run(["bash"], bare | registry | {"REEF_TOKEN": front.token}, work, script.text, 600)
    assert made.returncode == 0 and "installed" in made.stderr, made.stderr
    wrapper = str(home / ".local/bin" / f"reef-{name.partition('@')[0]}")
    ran = run([wrapper, *words, "make a file"], bare, work, "", 600)
    assert ran.returncode == 0 and "Finished." in ran.stdout, ran.stdout + ran.stderr
    assert (work / "made.txt").exists() or name == "codex", (
        "codex has a sandbox of its own, which not every machine lets it make"
    )

    records = kept(front, scenario)
    assert "HOUSE-RULE-SEEN" in str(records)
    assert {record["tags"]["harness"] for record in records} == {proposed.json()["release_id"]}
    assert [record["response"]["content"] for record in records][-1] == "Finished."
    assert records[-2]["response"]["tool_calls"][0]["function"]["name"] == tool[0]
    assert any(message["role"] == "tool" for message in records[-1]["messages"])
    (session,) = front.get(f"/reef/scenarios/{scenario}/sessions")["sessions"]
    tree = front.get(f"/reef/scenarios/{scenario}/sessions/{session['session']}")
    main = [turn["row"]["id"] for turn in tree["branches"][0]["turns"]]
    assert [record["id"] for record in records][-2:] == main[-2:], "the turn with the result continues the one that called"

    reported = run([wrapper, "report", "--score", "1"], bare, work, "", 300)
    assert reported.returncode == 0, reported.stderr
    (report,) = front.get(f"/reef/scenarios/{scenario}/records", request_type="report")["records"]
    cited = front.get(f"/reef/scenarios/{scenario}/records/{report['id']}")["references"]
    assert set(cited) <= {record["id"] for record in records} and main[-1] in cited
    assert run([wrapper, "uninstall"], bare, work, "", 300).returncode == 0


def run(argv: list[str], env: dict[str, str], work: Path, given: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, cwd=work, input=given, capture_output=True, text=True, timeout=limit_s, check=False)
