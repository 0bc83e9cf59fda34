"""The server's side with real subprocesses: steps, faults, deaths, restarts, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file

from reef_cli.core.errors import TrainerError
from reef_cli.core.ports import TrainerProgress, Training
from reef_cli.learning.contract import ProgramSpec
from reef_cli.trainer.handle import TrainerHandle
from reef_cli.trainer.ranks import describe_death
from tests.trainer.conftest import TOY, batch, release, sample, spec

Make = Callable[..., TrainerHandle]


def faulty(how: str, rank: int = 0) -> ProgramSpec:
    return ProgramSpec("tests.trainer.programs:Faulty", {"how": how, "rank": rank})


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


async def gone(pids: list[int], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def test_steps_resume_and_progress_is_seen(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle()
    port: Training = handle
    seen: list[TrainerProgress] = []
    first = await port.train("s", release(), None, None, batch(), tmp_path / "1", seen.append)
    assert first.kind == "lora" and first.checkpoint == tmp_path / "1" / "checkpoint"
    assert first.metrics["policy_updated"] is True and first.metrics["samples"] == 4
    assert {"policy", "export"} <= {progress.phase for progress in seen}
    pids = handle.pids
    second = await port.train("s", release("lora", 1), first.directory, first.checkpoint, batch(), tmp_path / "2")
    assert second.metrics["state"] == "resumed" and handle.pids == pids and handle.starts == 1
    # The same step by another process from the files alone gives the same weights.
    other = make_handle()
    again = await other.train("s", release("lora", 1), first.directory, first.checkpoint, batch(), tmp_path / "3")
    a, b = (load_file(str(c.directory / "adapter_model.safetensors")) for c in (second, again))
    assert all((a[key] == b[key]).all() for key in a)
    await handle.stop()
    assert await gone(pids) and handle.pids == []


async def test_a_base_release_starts_from_the_model_and_ignores_its_folder(make_handle: Make, tmp_path: Path) -> None:
    candidate = await make_handle().train("s", release("base"), tmp_path / "nowhere", None, batch(), tmp_path / "1")
    assert candidate.metrics["state"].startswith("fresh")


async def test_a_killed_trainer_is_an_error_with_cause_and_restarts_from_the_checkpoint(
    make_handle: Make, tmp_path: Path
) -> None:
    handle = make_handle()
    first = await handle.train("s", release(), None, None, batch(), tmp_path / "1")
    os.kill(handle.pids[0], signal.SIGKILL)
    await asyncio.sleep(0.3)
    second = await handle.train("s", release("lora", 1), first.directory, first.checkpoint, batch(), tmp_path / "2")
    assert handle.starts == 2 and second.metrics["state"] == "resumed"


async def test_a_death_in_the_middle_of_a_step_is_reported_and_nothing_is_left(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle(faulty("die"))
    await handle.start()
    pids = handle.pids
    with pytest.raises(TrainerError) as caught:
        await handle.train("s", release(), None, None, batch(), tmp_path / "1")
    assert "SIGKILL" in caught.value.message and "memory" in caught.value.why and "micro_batch" in caught.value.hint
    assert caught.value.details["log_tail"]
    assert await gone(pids)
    assert not (tmp_path / "1").exists()


async def test_an_exit_carries_its_code_and_last_words(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle(faulty("exit_"))
    with pytest.raises(TrainerError) as caught:
        await handle.train("s", release(), None, None, batch(), tmp_path / "1")
    assert caught.value.details["exit_code"] == 7 and "last words" in caught.value.details["log_tail"]


async def test_a_frozen_trainer_is_killed_after_the_silence_limit(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle(faulty("stop"), replace(TOY, step_timeout_s=3))
    await handle.start()
    pids = handle.pids
    with pytest.raises(TrainerError, match="no sign of life for 3 s"):
        await handle.train("s", release(), None, None, batch(), tmp_path / "1")
    assert await gone(pids)


async def test_a_standstill_is_noticed_although_the_heart_beats(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle(faulty("stall"), replace(TOY, step_timeout_s=3))
    with pytest.raises(TrainerError, match="stood still"):
        await handle.train("s", release(), None, None, batch(), tmp_path / "1")


async def test_a_long_phase_beats_at_least_every_two_seconds(make_handle: Make, tmp_path: Path) -> None:
    times: list[float] = []
    handle = make_handle(faulty("sleep"))
    await handle.start()
    started = time.monotonic()
    await handle.train("s", release(), None, None, batch(), tmp_path / "1", lambda _: times.append(time.monotonic()))
    beats = [started, *times]
    assert max(b - a for a, b in pairwise(beats)) < 2


@pytest.mark.parametrize(
    ("how", "message", "hint"),
    [("raise_", "own mistake", "log"), ("memory", "out of memory|failed", "")],
)
async def test_a_failed_step_is_an_answer_and_the_process_lives_on(
    make_handle: Make, tmp_path: Path, how: str, message: str, hint: str
) -> None:
    import re

    handle = make_handle(faulty(how))
    await handle.start()
    pids = handle.pids
    with pytest.raises(TrainerError) as caught:
        await handle.train("s", release(), None, None, batch(), tmp_path / "1")
    assert re.search(message, f"{caught.value.message} {caught.value.why}") and hint in caught.value.hint
    assert handle.pids == pids and alive(pids[0])


async def test_a_refused_step_names_its_kind_and_leaves_the_old_checkpoint_valid(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle(spec(use_critic=False))
    first = await handle.train("s", release(), None, None, batch(), tmp_path / "1")
    with pytest.raises(TrainerError) as caught:
        bad = [sample(0, float("inf"))]
        await handle.train("s", release("lora", 1), first.directory, first.checkpoint, bad, tmp_path / "2")
    assert caught.value.details["kind"] == "StepRefused"
    after = await handle.train("s", release("lora", 1), first.directory, first.checkpoint, batch(), tmp_path / "3")
    assert after.metrics["state"] == "resumed" and handle.starts == 1


async def test_a_cancelled_step_ends_the_trainer_and_the_next_call_starts_another(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle(faulty("stall"))
    await handle.start()
    pids = handle.pids
    step = asyncio.create_task(handle.train("s", release(), None, None, batch(), tmp_path / "1"))
    await asyncio.sleep(0.5)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert await gone(pids)


async def test_stop_interrupts_a_running_step(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle(faulty("stall"))
    await handle.start()
    step = asyncio.create_task(handle.train("s", release(), None, None, batch(), tmp_path / "1"))
    await asyncio.sleep(0.5)
    await handle.stop()
    with pytest.raises(TrainerError):
        await step
    await handle.stop()


@pytest.mark.parametrize(
    ("path", "message"),
    [("tests.trainer.programs:Unhelpful", "no program today"), ("nowhere.at:All", "cannot be imported")],
)
async def test_a_trainer_that_cannot_start_says_why(make_handle: Make, path: str, message: str) -> None:
    handle = make_handle(ProgramSpec(path, {"how": "die"}))
    with pytest.raises(TrainerError) as caught:
        await handle.start()
    assert message in f"{caught.value.message} {caught.value.why}"
    assert handle.pids == []


async def test_a_slow_start_hits_the_limit(make_handle: Make) -> None:
    handle = make_handle(settings=replace(TOY, start_timeout_s=0.2))
    with pytest.raises(TrainerError, match=r"not ready after|no sign of life"):
        await handle.start()
    assert handle.pids == []


async def test_the_loop_is_never_blocked(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle()
    await handle.start()
    step = asyncio.create_task(handle.train("s", release(), None, None, batch(16), tmp_path / "1"))
    worst = 0.0
    while not step.done():
        before = time.monotonic()
        await asyncio.sleep(0.01)
        worst = max(worst, time.monotonic() - before)
    await step
    assert worst < 0.5


async def test_scores_are_the_trained_weights_own(make_handle: Make, tmp_path: Path) -> None:
    handle = make_handle()
    base = await handle.score(None, batch())
    candidate = await handle.train("s", release(), None, None, batch(), tmp_path / "1")
    assert [len(row) for row in base] == [sum(s.tokens.loss_mask) for s in batch()]
    assert await handle.score(candidate.directory, batch()) != base


def test_the_trainer_dies_with_its_server(toy_model: Path, tmp_path: Path) -> None:
    """kill -9 of the server in the middle of a step ends the trainer at once."""
    script = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from tests.trainer.conftest import TOY, batch, release
        from tests.trainer.test_handle import faulty
        from reef_cli.trainer.handle import TrainerHandle

        async def main():
            handle = TrainerHandle(TOY, Path({str(toy_model)!r}), faulty("stall"), Path({str(tmp_path / "t.log")!r}))
            await handle.start()
            print(handle.pids[0], flush=True)
            await handle.train("s", release(), None, None, batch(), Path({str(tmp_path / "o")!r}))

        asyncio.run(main())
    """)
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    time.sleep(0.5)
    assert alive(pid)
    server.kill()
    server.wait()
    server.stdout.close()
    assert asyncio.run(gone([pid], 3))


def test_deaths_are_described() -> None:
    killed = describe_death(-9, "x", True)
    assert "SIGKILL" in killed.message and "memory limit" in killed.why
    assert "SIGSEGV" in describe_death(-11, "Fatal Python error", False).message
    assert describe_death(1, "Traceback\nValueError: no\n", False).why == "ValueError: no"


def test_the_server_side_imports_no_torch() -> None:
    code = "import sys, reef_cli.trainer.handle; print('torch' in sys.modules or 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert out.stdout.strip() == "False"
