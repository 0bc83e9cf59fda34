"""Episodes with real processes: isolation, limits, outages, no secrets inside, nothing left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from reef_cli.core.errors import EvaluationError, MissingDependency, UnsupportedArtifact
from reef_cli.harness import discovery, sandbox
from reef_cli.harness.admission import fault, load_test, provision
from reef_cli.harness.episodes import Caps, Episode, Runtime, Task, run, sweep
from reef_cli.harness.files import TreeFile
from reef_cli.harness.pool import Job, LocalPool
from reef_cli.harness.tree import Tree
from tests.harness.gateway import FakeGateway

needs_sandbox = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
MODES = [pytest.param(False, id="sandbox", marks=needs_sandbox), pytest.param(True, id="unsafe")]
TREE = Tree.of([{"id": "house", "kind": "rules", "config": {"text": "Be brief."}}])
KEY = "provider-key-" + "9f8e7d6c"


@pytest.fixture
def make(tmp_path: Path, gateway: FakeGateway) -> Callable[[bool], Runtime]:
    adapter = discovery.adapter("native", {})
    place = provision(adapter, tmp_path / "agents", dict(os.environ))
    return lambda unsafe: Runtime(adapter, place, gateway.url, gateway.token, "demo", "m", unsafe=unsafe)


def nothing(work: Path, trajectory: object) -> tuple[float, str]:
    return 0.0, ""


def half(work: Path, trajectory: object) -> tuple[float, str]:
    return 0.5, ""


def left(state: Path) -> list[str]:
    return [path.name for path in (state / "roots").iterdir()] + [
        path.name for path in Path(tempfile.gettempdir()).glob("reef-ep-*")
    ]


@pytest.mark.parametrize("unsafe", MODES)
def test_an_episode_runs_is_graded_and_leaves_only_what_is_kept(
    unsafe: bool, make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path
) -> None:
    gateway.replies = [[("bash", {"command": "cat given.txt > made.txt; ./run.sh >> made.txt"})], "Done."]
    task = Task("t", "go", {"given.txt": TreeFile(b"one\n"), "run.sh": TreeFile(b"#!/bin/sh\necho two\n", True)})
    seen: list[str] = []

    def grade(work: Path, trajectory: object) -> tuple[float, str]:
        seen.append((work / "made.txt").read_text())
        return 1.0, "made"

    result = run(make(unsafe), TREE, task, state=tmp_path / "s", grade=grade)
    assert (result.outcome, result.score, result.exit_status, result.limit) == ("ran", 1.0, 0, None), result.reason
    assert result.graded == "made"
    assert (
        seen == ["one\ntwo\n"]
        and result.receipts == ("receipt-demo-0", "receipt-demo-1")
        and result.trajectory.final == "Done."
    )
    assert [step.response_id for step in result.trajectory.steps if step.role == "assistant"] == [
        "receipt-demo-0",
        "receipt-demo-1",
    ]
    headers = gateway.requests[0]["headers"]
    assert headers["x-reef-tag-trial"] == result.id and headers["authorization"] == "Bearer real-token"
    assert "Be brief." in gateway.requests[0]["body"]["messages"][0]["content"]
    assert left(tmp_path / "s") == [] and list(result.kept.glob("trajectory/sessions/*.jsonl"))
    assert json.loads((result.kept / "episode.json").read_text())["score"] == 1.0


PROBE = """
tr '\\0' '\\n' < /proc/$PPID/environ; env; id -u; ls /home /root 2>&1; echo ---; cat /proc/net/route | wc -l
python3 - <<'X' 2>&1 || true
import socket
try: socket.create_connection(("192.0.2.1", 80), 1); print("OUT")
except OSError as e: print("closed", e)
X
touch /usr/pwned 2>&1; ls /proc | grep -c '^[0-9]'
"""


@needs_sandbox
def test_the_sandbox_shows_no_secret_no_network_and_no_other_home(
    make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    runtime = make(False)
    runtime.place.root.mkdir(parents=True)
    runtime.place.token.write_text("real-token")
    scan = f"grep -rl 'real-''token' {runtime.place.adapter} /reef /home /tmp 2>/dev/null; echo scanned"
    gateway.replies = [[("bash", {"command": PROBE}), ("bash", {"command": scan})], "ok"]
    result = run(runtime, TREE, Task("t", "go"), state=tmp_path / "s")
    assert result.outcome == "ran", result.reason
    probe, scanned = (step.text for step in result.trajectory.steps if step.role == "tool")
    assert KEY not in probe and "real-token" not in probe and "closed" in probe and "OUT" not in probe
    assert "1000" in probe and "Read-only file system" in probe and scanned == "scanned\n"
    assert not any(
        KEY.encode() in path.read_bytes() or b"real-token" in path.read_bytes()
        for path in result.kept.rglob("*")
        if path.is_file()
    )


def test_no_key_in_any_process_or_file_while_it_runs(
    make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    gateway.replies = [[("bash", {"command": "sleep 3"})], "ok"]
    worker = threading.Thread(target=run, args=(make(True), TREE, Task("t", "go")), kwargs={"state": tmp_path / "s"})
    worker.start()
    deadline = time.monotonic() + 10
    pids: list[int] = []
    while len(pids) < 3 and time.monotonic() < deadline:
        names = [path.name for path in (tmp_path / "s" / "roots").glob("*")]
        pids = sandbox.marked(names[0]) if names else []
        time.sleep(0.05)
    assert len(pids) >= 3
    for pid in pids:
        for part in ("environ", "cmdline"):
            data = Path(f"/proc/{pid}/{part}").read_bytes()
            assert KEY.encode() not in data and b"real-token" not in data
    for path in (tmp_path / "s").rglob("*"):
        assert not path.is_file() or b"real-token" not in path.read_bytes()
    worker.join()


@pytest.mark.parametrize("unsafe", MODES)
def test_the_time_limit_ends_everything_it_started(
    unsafe: bool, make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path
) -> None:
    gateway.replies = [[("bash", {"command": "setsid sleep 300 & trap '' TERM; sleep 300"})]]
    begun = time.monotonic()
    result = run(
        make(unsafe), TREE, Task("t", "go"), state=tmp_path / "s", caps=Caps(seconds=2), grade=lambda work, _: (0.0, "")
    )
    assert time.monotonic() - begun < 8
    assert (result.outcome, result.limit, result.score) == ("ran", "time", 0.0)
    assert sandbox.marked(result.id) == [] and left(tmp_path / "s") == []


def test_the_request_cap_ends_a_loop(make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.replies = [[("bash", {"command": "true"})]] * 50
    result = run(
        make(True), TREE, Task("t", "go"), state=tmp_path / "s", caps=Caps(requests=4), grade=lambda work, _: (0.5, "")
    )
    assert (result.outcome, result.limit, result.requests, result.score) == ("ran", "requests", 4, 0.5)


@pytest.mark.parametrize(
    ("caps", "calls"),
    [(Caps(tokens=300), 3), (Caps(cost=0.0005, price=(1.0, 10.0)), 3), (Caps(cost=1.0, price=(1.0, 10.0), requests=5), 5)],
)
def test_the_budget_ends_a_loop(
    caps: Caps, calls: int, make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path
) -> None:
    gateway.replies = [[("bash", {"command": "true"})]] * 50
    result = run(make(True), TREE, Task("t", "go"), state=tmp_path / "s", caps=caps)
    assert (result.requests, result.tokens) == (calls, (100 * calls, 10 * calls))
    assert result.limit == ("requests" if calls == 5 else "budget") and result.outcome == "ran"


def test_what_could_not_run_is_an_outage_and_no_score(
    make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path
) -> None:
    runtime, state = make(True), tmp_path / "s"

    def never(work: Path, _: object) -> float:
        pytest.fail("an outage is not graded")

    gateway.fail = 401
    assert "401" in run(runtime, TREE, Task("t", "go"), state=state, grade=never).reason
    gateway.fail = None
    broken = run(
        replace(runtime, gateway="http://127.0.0.1:9"), TREE, Task("t", "go"), state=state, grade=never, caps=Caps(seconds=2)
    )
    assert broken.outcome == "outage" and "could not be reached" in broken.reason and broken.score is None
    program = runtime.place.agent("1.0.0") / "native/reef-native.pyz"
    program.write_bytes(b"not an archive")
    assert "no model call" in run(runtime, TREE, Task("t", "go"), state=state, grade=never).reason
    program.unlink()
    assert "not installed" in run(runtime, TREE, Task("t", "go"), state=state, grade=never).reason


def test_a_failed_answer_is_graded_not_excused(make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.fail = 400
    result = run(make(True), TREE, Task("t", "go"), state=tmp_path / "s", grade=nothing)
    assert (result.outcome, result.score, result.exit_status) == ("ran", 0.0, 1)


def test_a_broken_grader_is_an_error_and_leaves_nothing(make: Callable[[bool], Runtime], tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="grader"):
        run(make(True), TREE, Task("t", "go"), state=tmp_path / "s", grade=lambda work, _: 1 / 0)
    assert left(tmp_path / "s") == []


def test_without_a_sandbox_episodes_are_refused(
    make: Callable[[bool], Runtime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "problem", lambda: "the program bwrap is missing")
    with pytest.raises(MissingDependency, match="sandbox") as caught:
        run(make(False), TREE, Task("t", "go"), state=tmp_path / "s")
    assert "bubblewrap" in caught.value.hint


def test_load_test_finds_trees_the_agent_does_not_start_with(make: Callable[[bool], Runtime], tmp_path: Path) -> None:
    runtime = make(True)
    assert fault(load_test(runtime, TREE, tmp_path / "s")) is None
    bad = Tree.of([{"id": "c", "kind": "config", "config": {"value": {"max_turns": "many"}}}])
    assert fault(load_test(runtime, bad, tmp_path / "s"))
    with pytest.raises(UnsupportedArtifact):
        load_test(runtime, Tree.of([{"id": "x", "kind": "mcp", "config": {"command": "x"}}]), tmp_path / "s")


OWNER = """
import sys; sys.path.insert(0, {repo!r})
from pathlib import Path
from reef_cli.harness import discovery
from reef_cli.harness.client.store import Place
from reef_cli.harness.episodes import Runtime, Task, run
from reef_cli.harness.tree import Tree
place = Place(Path({base!r}), "native", "episodes")
run(Runtime(discovery.adapter("native", {{}}), place, {url!r}, "real-token", "demo", unsafe={unsafe}),
    Tree.of([]), Task("t", "go"), state=Path({state!r}))
"""


@pytest.mark.parametrize("unsafe", MODES)
def test_kill_nine_of_the_owner_leaves_no_orphans_and_sweep_removes_roots(
    unsafe: bool, make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path
) -> None:
    runtime, state = make(unsafe), tmp_path / "s"
    gateway.replies = [[("bash", {"command": "sleep 300"})]]
    text = OWNER.format(
        repo=str(Path(__file__).parents[2]), base=str(runtime.place.base), url=gateway.url, state=str(state), unsafe=unsafe
    )
    owner = subprocess.Popen([sys.executable, "-c", text])
    deadline = time.monotonic() + 20
    while not gateway.requests and time.monotonic() < deadline:
        time.sleep(0.05)
    (root,) = list((state / "roots").iterdir())
    time.sleep(0.3)
    assert sandbox.marked(root.name)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert sweep(state) == 1
    assert sandbox.marked(root.name) == [] and left(state) == []
    assert sweep(state) == 0


async def test_the_pool_bounds_and_kills_on_cancel(
    make: Callable[[bool], Runtime], gateway: FakeGateway, tmp_path: Path
) -> None:
    runtime, state = make(True), tmp_path / "s"
    running, most, order = 0, 0, []
    lock = threading.Lock()

    def job(label: str) -> Job:
        def work(cancel: threading.Event) -> Episode:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
                order.append(label)
            result = run(runtime, TREE, Task(label, "go"), state=state, cancel=cancel)
            with lock:
                running -= 1
            return result

        return Job(label, label, work)

    pool = LocalPool(2)
    found = await asyncio.gather(*(pool.run(job(f"t{n}")) for n in range(6)))
    assert most == 2 and [(one.task, one.outcome) for one in found] == [(f"t{n}", "ran") for n in range(6)]
    assert sorted(order) == [f"t{n}" for n in range(6)]
    await pool.close()
    gateway.replies = [[("bash", {"command": "sleep 300"})]]
    before = len(gateway.requests)
    slow = Job("x", "x", lambda cancel: run(runtime, TREE, Task("x", "go"), state=state, cancel=cancel))
    task = asyncio.create_task(LocalPool(1).run(slow))
    while len(gateway.requests) == before:
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left(state) == []
