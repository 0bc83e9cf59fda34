"""An agent installed from a real server: what its installer touches and refuses, sessions side by side, bare shells.

The native agent needs no registry; how others are fetched is shown with programs that only write down how they are called.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reef_cli.harness import discovery, install
from reef_cli.harness.tree import Tree
from tests.doubles.upstream import Upstream
from tests.e2e.server import LIMIT_S, Server, until
from tests.harness.conftest import picture
from tests.harness.test_install import STUBS

BARE = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
RULES = {"id": "house", "kind": "rules", "config": {"text": "Answer in one short sentence."}}
Shell = subprocess.CompletedProcess[str]
Install = Callable[..., Shell]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / ".profile").write_text("# mine\n")
    return folder


def propose(front: Server, scenario: str, *entries: dict[str, Any], op: str = "create") -> str:
    mutations = [{"op": op, "entry": entry} for entry in entries]
    reply = front.client(**{"x-reef-scenario": scenario}).post("/reef/harness/proposals", json={"mutations": mutations})
    assert reply.status_code == 201, reply.text
    return str(reply.json()["release_id"])


@pytest.fixture
def into(front: Server, home: Path) -> Install:
    """`curl … | sh` as the documentation has it, for a scenario."""

    def run(scenario: str, adapter: str = "native", **environment: str) -> Shell:
        line = (
            'curl -fsS -H "Authorization: Bearer $REEF_TOKEN" -H "x-reef-scenario: $SCENARIO" '
            f'"{front.url}/reef/harness/install?adapter={adapter}" | sh'
        )
        variables = BARE | {"HOME": str(home), "REEF_TOKEN": front.token, "SCENARIO": scenario} | environment
        return subprocess.run(["sh", "-c", line], env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    return run


def wrapper(home: Path, *words: str, name: str = "reef-native", cwd: str = "/", env: dict[str, str] | None = None) -> Shell:
    return subprocess.run(
        [str(home / ".local/bin" / name), *words],
        env=BARE if env is None else env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def exchanges(front: Server, scenario: str) -> list[str]:
    """Receipts, oldest first."""
    rows = front.get(f"/reef/scenarios/{scenario}/records", request_type="inference", order="oldest")["records"]
    return [row["id"] for row in rows]


def cited(front: Server, scenario: str) -> list[list[str]]:
    """What each report of a scenario cites, oldest report first."""
    rows = front.get(f"/reef/scenarios/{scenario}/records", request_type="report", order="oldest")["records"]
    return [front.get(f"/reef/scenarios/{scenario}/records/{row['id']}")["references"] for row in rows]


@pytest.mark.parametrize("environment", [{}, BARE], ids=["empty", "bare"])
def test_the_wrapper_works_from_any_shell(
    front: Server, provider: Upstream, home: Path, into: Install, tmp_path: Path, environment: dict[str, str]
) -> None:
    """No virtual environment, no token, not even a HOME: what it needs was written down when it was installed."""
    scenario = f"shell-{len(environment)}"
    propose(front, scenario, RULES)
    done = into(scenario)
    assert done.returncode == 0, done.stderr
    work = tmp_path / "else where"
    work.mkdir()
    ran = wrapper(home, "-p", "hello", cwd=str(work), env=environment)
    assert (ran.returncode, ran.stdout) == (0, f"{provider.text}\n"), ran.stderr
    assert RULES["config"]["text"] in json.dumps(provider.seen[-1].body)
    reported = wrapper(home, "report", "--score", "1", cwd=str(work), env=environment)
    assert reported.returncode == 0, reported.stderr
    assert cited(front, scenario) == [exchanges(front, scenario)] and len(exchanges(front, scenario)) == 1
    assert not list(work.iterdir()) and (home / ".profile").read_text() == "# mine\n"


def test_an_install_touches_its_own_folders_only_and_the_second_nothing(
    front: Server, home: Path, into: Install, tmp_path: Path
) -> None:
    stubs, calls = tmp_path / "stubs", tmp_path / "calls"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(text.replace("v20.1.0", "v24.0.1"))
        (stubs / name).chmod(0o755)
    for name in ("pip3", "uv", "python", "git"):
        (stubs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "$CALLS"\nexit 9\n')
        (stubs / name).chmod(0o755)
    propose(front, "tidy", RULES)
    before = picture(home)
    environment = {"PATH": f"{stubs}:{BARE['PATH']}", "CALLS": str(calls)}
    done = into("tidy", "pi@0.84.2", **environment)
    assert done.returncode == 0, done.stderr
    (call,) = calls.read_text().splitlines()
    assert call.startswith("npm ") and "--prefix" in call and " -g" not in call
    after = picture(home)
    own = (".local/share/reef-harness", ".local/bin/reef-pi")
    strangers = {path for path in after if path not in before and not path.startswith(own)}
    assert strangers == {".local", ".local/share", ".local/bin"} and {p: after[p] for p in before} == before
    times = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    again = into("tidy", "pi@0.84.2", **environment)
    assert again.returncode == 0 and "is up to date" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == times and len(calls.read_text().splitlines()) == 1
    assert wrapper(home, "uninstall", name="reef-pi").returncode == 0 and picture(home) == before


@pytest.mark.parametrize("path", ["../x", "/tmp/reef-escaped", "a/../../x", ".git/hooks/x"])
def test_no_file_leaves_its_folder(front: Server, home: Path, path: str) -> None:
    """Refused where it is proposed; and a script that has it all the same, from whoever, is refused where it runs."""
    skill = {"id": "odd", "kind": "skill", "config": {"description": "d", "text": "x", "files": {path: {"text": "y"}}}}
    client = front.client(**{"x-reef-scenario": "escapes"})
    reply = client.post("/reef/harness/proposals", json={"mutations": [{"op": "create", "entry": skill}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "artifact_invalid"), reply.text
    assert path in reply.json()["error"]["message"]
    assert client.get("/reef/harness/releases").json()["releases"] == []

    facts = install.ReleaseFacts("escapes", "r1-aaaaaaaa", "sha256:x", 1)
    content = install.payload(discovery.adapter("native"), Tree.of([RULES]), facts, install.Target(front.url, "m"))
    content["tree"][0]["path"] = path
    before = picture(home)
    environment = BARE | {"HOME": str(home), "REEF_TOKEN": front.token}
    done = subprocess.run(
        ["sh"], input=install.script(content), env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode != 0 and path in done.stderr, done.stderr
    assert picture(home) == before and not Path("/tmp/reef-escaped").exists() and not (home.parent / "x").exists()


def needs(*items: tuple[str, str]) -> dict[str, Any]:
    return RULES | {"config": {"text": "x", "requires": [{"kind": kind, "name": name} for kind, name in items]}}


def test_what_a_release_needs_is_asked_for_before_anything_is_written(
    front: Server, provider: Upstream, home: Path, into: Install, tmp_path: Path
) -> None:
    plain = propose(front, "needs", RULES)
    propose(front, "needs", needs(("env", "FOO")), op="update")
    before = picture(home)
    refused = into("needs")
    assert refused.returncode == 3 and picture(home) == before, refused.stderr
    assert "env FOO" in refused.stderr and f"release {plain} needs nothing" in refused.stderr
    assert into("needs", FOO="1").returncode == 0
    assert wrapper(home, "-p", "x", env=BARE | {"FOO": "1"}).returncode == 0

    tool = tmp_path / "bin" / "needed-tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    variables = {"PATH": f"{tool.parent}:{BARE['PATH']}", "FOO": "1", "HOME": str(home)}
    propose(front, "needs", needs(("program", "needed-tool"), ("service", "postgres")), op="update")
    waiting = wrapper(home, "update", env=variables)
    assert waiting.returncode == 3 and "service postgres" in waiting.stderr, waiting.stderr
    assert f"release {plain} needs nothing" in waiting.stderr
    assert wrapper(home, "setup", "program needed-tool", env=variables).returncode == 3, "looked up, never confirmed"
    noted = wrapper(home, "setup", "service postgres", env=variables)
    assert noted.returncode == 0 and "does not ask for it" in noted.stderr, "the release that does is not installed yet"
    assert wrapper(home, "update", env=variables).returncode == 0
    asked = len(provider.seen)
    assert wrapper(home, "-p", "x", env=variables).returncode == 0 and len(provider.seen) > asked
    tool.unlink()
    asked = len(provider.seen)
    stopped = wrapper(home, "-p", "x", env=variables)
    assert stopped.returncode == 3 and "program needed-tool" in stopped.stderr
    assert len(provider.seen) == asked, "no session began"


def together(count: int, work: Callable[[], Shell]) -> list[Shell]:
    done: list[Shell] = []
    threads = [threading.Thread(target=lambda: done.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(done) == count
    return done


def test_sessions_and_reports_side_by_side(front: Server, provider: Upstream, home: Path, into: Install) -> None:
    propose(front, "beside", RULES)
    assert into("beside").returncode == 0
    assert [ran.returncode for ran in together(3, lambda: wrapper(home, "-p", "hello"))] == [0, 0, 0]
    receipts = exchanges(front, "beside")
    assert len(receipts) == 3
    reported = together(3, lambda: wrapper(home, "report", "--score", "0.5"))
    assert [one.returncode for one in reported] == [0, 0, 0], reported
    assert sorted(cited(front, "beside")) == sorted([receipt] for receipt in receipts)
    assert "no run waits" in wrapper(home, "report", "--score", "0.5").stderr
    assert len(cited(front, "beside")) == 3


def test_a_reporter_that_was_killed_leaves_its_run_to_the_next(
    front: Server, provider: Upstream, home: Path, into: Install
) -> None:
    """The server stands still while the first one reports, so that it is killed with its claim in hand."""
    propose(front, "killed", RULES)
    assert into("killed").returncode == 0 and wrapper(home, "-p", "hello").returncode == 0
    spool = home / ".local/share/reef-harness/native/scenarios/killed/spool"
    os.kill(front.pid, signal.SIGSTOP)
    try:
        program = str(home / ".local/bin/reef-native")
        killed = subprocess.Popen([program, "report", "--score", "1"], env=BARE, stderr=subprocess.DEVNULL)
        until(lambda: list(spool.glob("*.claim-*")), "a claim", every_s=0.01)
        killed.kill()
        killed.wait()
    finally:
        os.kill(front.pid, signal.SIGCONT)
    assert wrapper(home, "report", "--score", "1").returncode == 0
    assert cited(front, "killed") == [exchanges(front, "killed")]
    assert [path.suffix for path in spool.iterdir()] == [".sent"]


def test_a_report_belongs_to_its_scenario(front: Server, provider: Upstream, home: Path, into: Install) -> None:
    for scenario in ("here", "beside-it"):
        propose(front, scenario, RULES)
        assert into(scenario).returncode == 0
    names = {path.name for path in (home / ".local/bin").iterdir()}
    assert names == {"reef-native", "reef-native-beside-it"}, "the second one has a name of its own"
    for name in sorted(names):
        assert wrapper(home, "-p", "hello", name=name).returncode == 0
    assert wrapper(home, "report", "--score", "1", name="reef-native-beside-it").returncode == 0
    assert cited(front, "here") == [] and cited(front, "beside-it") == [exchanges(front, "beside-it")]
    assert len(exchanges(front, "here")) == len(exchanges(front, "beside-it")) == 1
    assert wrapper(home, "report", "--score", "1").returncode == 0
    assert cited(front, "here") == [exchanges(front, "here")] and len(cited(front, "beside-it")) == 1
