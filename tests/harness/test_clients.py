"""Real agents, installed through Reef and driven against a stub. Needs the npm registry, so only with REEF_TEST_CLIENTS=1."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reef_cli.harness import install
from tests.harness.conftest import picture
from tests.harness.gateway import FakeGateway

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.environ.get("REEF_TEST_CLIENTS"), reason="set REEF_TEST_CLIENTS=1")]
ENTRIES = [
    {"id": "house", "kind": "rules", "config": {"text": "HOUSE-RULE-SEEN"}},
    {"id": "make-pdf", "kind": "skill", "config": {"description": 'Makes PDFs: say "please"', "text": "# Steps"}},
]
HEADLESS = {
    "pi@1.6.0": ["-p"],
    "pi@0.84.2": ["-p"],
    "claude-code": ["-p"],
    "codex": ["exec", "--skip-git-repo-check"],
    "opencode": ["run", "--title", "t"],
}


@pytest.mark.parametrize("name", HEADLESS)
def test_agent_installs_runs_reports_and_leaves_no_trace(
    name: str, payload: Callable[..., dict[str, Any]], env: dict[str, str], home: Path, gateway: FakeGateway, tmp_path: Path
) -> None:
    before = picture(home)
    registry = {key: value for key, value in os.environ.items() if key.lower().startswith(("npm_config", "node_extra"))}
    registry.setdefault("npm_config_userconfig", str(Path("~/.npmrc").expanduser()))
    said = install.local_install(
        payload(name, ENTRIES), {**{k: v for k, v in env.items() if "proxy" not in k.lower()}, **registry}
    )
    assert "installed" in said
    (item,) = install.installed(env)
    work = tmp_path / "work"
    work.mkdir()
    gateway.replies = [[("bash", {"command": "echo made > made.txt"})], "Finished."]
    gateway.head = {"release_id": "r2-bbbbbbbb", "content_id": "sha256:new"}
    bare = {"HOME": env["HOME"], "PATH": env["PATH"], "HTTP_PROXY": env["HTTP_PROXY"]}
    ran = subprocess.run(
        [item.wrapper, *HEADLESS[name], "make a file"],
        env=bare,
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    if name.startswith("pi"):
        assert "Finished." in ran.stdout and (work / "made.txt").read_text() == "made\n"
    else:
        assert ran.stdout.strip()
    if item.adapter != "claude-code":  # it shows the notice in its own screen
        assert "r2-bbbbbbbb is available" in ran.stderr
    bodies = str([request["body"] for request in gateway.requests])
    assert "HOUSE-RULE-SEEN" in bodies and "make-pdf" in bodies and "Makes PDFs" in bodies
    assert install.run_client(item, "report", "--score", "1", environment=bare).returncode == 0
    assert [bool(report["references"]) for report in gateway.reports.values()] == [True]
    assert install.run_client(item, "diff", environment=bare).stdout.strip() == ""
    assert install.run_client(item, "uninstall", environment=bare).returncode == 0
    assert picture(home) == before
