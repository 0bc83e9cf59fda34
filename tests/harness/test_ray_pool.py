"""Episodes as tasks of a real Ray on this machine: they keep sandbox, token and outage semantics. Needs the extra `ray`."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from reef_cli.core.errors import EvaluationError, MissingDependency
from reef_cli.harness import discovery, ray_pool, sandbox
from reef_cli.harness.admission import provision
from reef_cli.harness.episodes import Caps, Episode, Runtime, Task, run
from reef_cli.harness.files import TreeFile
from reef_cli.harness.pool import Job
from reef_cli.harness.ray_pool import RayPool
from reef_cli.harness.trajectory import Trajectory
from tests.harness.gateway import FakeGateway
from tests.harness.test_episodes import TREE, left

needs_sandbox = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pool, "find_spec", lambda _: None)
    with pytest.raises(MissingDependency) as refused:
        RayPool(2)
    assert "reef-cli[ray]" in refused.value.hint


def passed(work: Path, trajectory: object) -> tuple[float, str]:
    return (1.0, "made by the agent") if (work / "made.txt").read_text() == "one\n" else (0.0, "not made")


def broken(work: Path, trajectory: object) -> tuple[float, str]:
    raise ValueError("no grade")


def job(runtime: Runtime, state: Path, label: str, grade: object = None, seconds: float = 60.0) -> Job:
    task = Task(label, "go", {"given.txt": TreeFile(b"one\n")})

    def work(cancel: threading.Event) -> Episode:
        caps = Caps(seconds=seconds)
        return run(runtime, TREE, task, state=state, grade=grade, caps=caps, cancel=cancel, identity=label)  # type: ignore[arg-type]

    return Job(label, label, work)


@needs_sandbox
@pytest.mark.slow
async def test_episodes_on_ray_are_what_they_are_here(gateway: FakeGateway, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    adapter = discovery.adapter("native", {})
    place = provision(adapter, tmp_path / "agents", dict(os.environ))
    runtime, state = Runtime(adapter, place, gateway.url, gateway.token, "demo", "m"), tmp_path / "s"
    pool = RayPool(2)
    try:
        gateway.replies = [[("bash", {"command": "cat given.txt > made.txt; ls /home; env"})], "Done."]
        graded = await pool.run(job(runtime, state, "graded", passed))
        assert (graded.outcome, graded.score, graded.graded) == ("ran", 1.0, "made by the agent"), graded.reason
        assert graded.trajectory.final == "Done." and graded.receipts == ("receipt-demo-0", "receipt-demo-1")
        seen = "".join(step.text for step in graded.trajectory.steps if step.role == "tool")
        assert gateway.token not in seen and "HOME=/reef/home" in seen, "a sandbox in the worker too"
        assert gateway.requests[0]["headers"]["authorization"] == f"Bearer {gateway.token}"

        lost = await pool.run(job(replace(runtime, gateway="http://127.0.0.1:9"), state, "lost", passed, 2.0))
        assert (lost.outcome, lost.score) == ("outage", None), "no score for what could not run"
        with pytest.raises(EvaluationError, match="grader"):
            await pool.run(job(runtime, state, "ungraded", broken))

        await several(pool, runtime, state)
        await cancelled(pool, runtime, gateway, state)
        await worker_gone(pool, state)
        assert left(state) == []
    finally:
        await pool.close()


async def several(pool: RayPool, runtime: Runtime, state: Path) -> None:
    """The bound holds on the cluster as well."""
    marks = state.parent / "marks"
    marks.mkdir()

    def timed(label: str) -> Job:
        inner = job(runtime, state, label).work

        def work(cancel: threading.Event) -> Episode:
            begun = time.time()
            episode = inner(cancel)
            (marks / label).write_text(f"{begun} {time.time()} {os.getpid()}")
            return episode

        return Job(label, label, work)

    found = await asyncio.gather(*(pool.run(timed(f"e{number}")) for number in range(4)))
    assert [one.outcome for one in found] == ["ran"] * 4
    spans = [tuple(map(float, path.read_text().split())) for path in marks.iterdir()]
    assert max(sum(begun <= at < ended for begun, ended, _ in spans) for at, _, _ in spans) <= 2
    assert os.getpid() not in {int(pid) for _, _, pid in spans}


async def cancelled(pool: RayPool, runtime: Runtime, gateway: FakeGateway, state: Path) -> None:
    """Whoever stops waiting has killed the episode, and it is gone then."""
    gateway.replies = [[("bash", {"command": "sleep 300"})]]
    before = len(gateway.requests)
    task = asyncio.create_task(pool.run(job(runtime, state, "slow")))
    while len(gateway.requests) == before:
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sandbox.marked("slow") == [] and left(state) == []


async def worker_gone(pool: RayPool, state: Path) -> None:
    """A worker that dies is an outage."""

    def work(_: threading.Event) -> Episode:
        os.kill(os.getpid(), signal.SIGKILL)
        return Episode("dead", "dead", "ran", "", 0, 0.0, 1, (), Trajectory())

    gone = await pool.run(Job("dead", "dead", work))
    assert (gone.outcome, gone.score, gone.id) == ("outage", None, "dead") and "worker is gone" in gone.reason
