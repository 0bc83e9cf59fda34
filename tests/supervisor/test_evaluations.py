"""Evaluations over the real chain and publisher: several releases, a whole chain, a run that was killed half-way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.errors import InvalidRequest, ReleaseNotFound, ReleaseNotServable, SuiteNotFound
from reef_cli.core.types import Draft, Operation, Release, Surface
from reef_cli.evaluation import Suite
from reef_cli.evaluation.asking import Bench
from reef_cli.supervisor.evaluations import TOGETHER, Asked, Evaluations
from tests.evaluation.conftest import Scripted
from tests.learning.world import SCENARIO
from tests.supervisor.test_publisher import Setting

ITEMS = 20


def made_suite() -> Suite:
    rows = (
        {"id": f"q{n}", "messages": [{"role": "user", "content": f"q{n}"}], "grader": {"kind": "contains", "value": "yes"}}
        for n in range(ITEMS)
    )
    return Suite.parse("\n".join(map(json.dumps, rows)), "made.jsonl")


def rising(name: str, question: str, sampling: object) -> str:
    """Release n of a chain passes 3n + 2 of the items."""
    return "yes" if int(question[1:]) < 3 * int(name[1 : name.index("-")]) + 2 else "no"


def evaluations(
    setting: Setting, answering: Scripted, suite: Suite | None = None, agents: Scripted | None = None, **settings: object
) -> Evaluations:
    chosen = EvaluationSettings(**{"concurrency": 4, **settings})  # type: ignore[arg-type]
    folder = setting.home / "evaluations"
    who = None if agents is None else Asked(agents, suite)
    return Evaluations(Asked(answering, suite), setting.publisher, chosen, Bench(), setting.releases, folder, who)


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    made = Setting(tmp_path)
    await made.log.scenarios.ensure(SCENARIO)
    await made.publisher.open(SCENARIO)
    yield made
    made.log.close()


@pytest.fixture
async def chain(setting: Setting) -> list[Release]:
    """The creation release and five published ones, oldest first."""
    return [setting.publisher.served(SCENARIO), *[await setting.publish() for _ in range(5)]]


async def test_several_releases_and_what_is_kept(setting: Setting, chain: list[Release]) -> None:
    asked = evaluations(setting, answering := Scripted(rising), made_suite())
    body = {"releases": [chain[2].release_id, chain[3].release_id], "against": chain[0].release_id}
    answer = await asked.evaluate(SCENARIO, body)
    assert [row["release"] for row in answer["releases"]] == [chain[n].release_id for n in (0, 2, 3)]
    assert [row["mean"] for row in answer["releases"]] == pytest.approx([0.1, 0.4, 0.55])
    assert answer["score"] == pytest.approx(0.55) and answer["release_id"] == chain[3].release_id
    assert answer["differences"][1]["wins"] == 9 and answer["differences"][1]["against"] == chain[0].release_id
    assert answer["spent"]["calls"] == 3 * ITEMS == len(answering.calls)
    json.dumps(answer)
    again = await asked.evaluate(SCENARIO, {"releases": [chain[3].release_id, chain[1].release_id]})
    assert len(answering.calls) == 4 * ITEMS, "a further release costs its own answers only"
    assert again["spent"]["calls"] == ITEMS and again["differences"][0]["result"] in ("worse", "open")
    await asked.evaluate(SCENARIO, {**body, "again": True})
    assert len(answering.calls) == 7 * ITEMS


async def test_a_chain_shows_whether_it_got_better(setting: Setting, chain: list[Release]) -> None:
    asked = evaluations(setting, answering := Scripted(rising), made_suite())
    answer = await asked.evaluate(SCENARIO, {"since": chain[0].release_id})
    assert [row["release"] for row in answer["releases"]] == [release.release_id for release in chain]
    assert len(chain) > TOGETHER and len(answering.calls) == len(chain) * ITEMS
    last = answer["differences"][-1]
    assert (last["against"], last["wins"], last["losses"], last["result"]) == (chain[0].release_id, 15, 0, "better")
    few = await asked.evaluate(SCENARIO, {"since": chain[0].release_id, "points": 3})
    assert [row["release"] for row in few["releases"]] == [chain[n].release_id for n in (0, 2, 5)]
    await setting.publisher.rollback(SCENARIO, chain[2].release_id, None, "test")
    same = await asked.evaluate(SCENARIO, {"since": chain[1].release_id})
    assert len(same["releases"]) == 5, "content that came back is evaluated once"
    with pytest.raises(InvalidRequest, match="not in the chain"):
        await asked.evaluate(SCENARIO, {"since": "r9-00000000"})


async def test_how_far_an_evaluation_is_can_be_seen(setting: Setting, chain: list[Release]) -> None:
    told: list[tuple[int, int]] = []

    def watched(name: str, question: str, sampling: object) -> str:
        state = asked.under_way()
        assert state is not None and (state["scenario"], state["suite"]) == (SCENARIO, "made.jsonl")
        told.append((state["done"], state["total"]))
        return rising(name, question, sampling)

    asked = evaluations(setting, Scripted(watched), made_suite())
    for body in ({"releases": [chain[0].release_id, chain[1].release_id]}, {"since": chain[0].release_id, "again": True}):
        told.clear()
        assert asked.under_way() is None
        answer = await asked.evaluate(SCENARIO, body)
        total = ITEMS * len(answer["releases"])
        assert told == sorted(told) and told[0] == (0, total) and total - 8 <= told[-1][0] < total
    assert asked.under_way() is None


async def test_weights_are_asked_by_themselves_and_a_harness_by_agents(setting: Setting, chain: list[Release]) -> None:
    harness = []
    for number in range(2):
        folder = setting.home / f"tree{number}"
        folder.mkdir()
        (folder / "tree.json").write_text(f'{{"entries": [], "format": 1, "mark": {number}}}')
        artifact = setting.releases.store(folder, "harness")
        draft = Draft(artifact.content_id, "harness", Surface.HARNESS, Operation.TRAINING, "test")
        head = setting.publisher.served(SCENARIO, Surface.HARNESS).release_id
        harness.append(await setting.publisher.publish(SCENARIO, draft, head))
    model, agents = Scripted(rising), Scripted(lambda *_: "yes")
    asked = evaluations(setting, model, made_suite(), agents)
    creation, names = chain[0].release_id, [release.release_id for release in harness]
    answer = await asked.evaluate(SCENARIO, {"release_id": chain[1].release_id, "against": creation})
    assert (answer["score"], len(agents.calls)) == (0.25, 0)
    answer = await asked.evaluate(SCENARIO, {"releases": names, "against": creation})
    assert [row["mean"] for row in answer["releases"]] == [1.0, 1.0, 1.0], "the creation stands for an agent without a harness"
    assert len(agents.calls) == 3 * ITEMS and len(model.calls) == 2 * ITEMS
    since = await asked.evaluate(SCENARIO, {"since": names[0]})
    assert [row["release"] for row in since["releases"]] == names, "the chain of one surface"
    with pytest.raises(InvalidRequest, match="of weights or of harnesses"):
        await asked.evaluate(SCENARIO, {"releases": [names[0], chain[1].release_id]})
    with pytest.raises(ReleaseNotServable, match="no agent works here"):
        await evaluations(setting, model, made_suite()).evaluate(SCENARIO, {"release_id": names[0]})


async def test_a_suite_of_ones_own(setting: Setting, chain: list[Release], tmp_path: Path) -> None:
    asked = evaluations(setting, Scripted(rising))
    with pytest.raises(SuiteNotFound):
        await asked.evaluate(SCENARIO, {"release_id": chain[1].release_id})
    own = tmp_path / "own.jsonl"
    row = {"messages": [{"role": "user", "content": "q0"}], "grader": {"kind": "contains", "value": "yes"}}
    own.write_text("\n".join(json.dumps({"id": f"x{n}", **row, "split": "development"}) for n in range(4)))
    body = {"release_id": chain[1].release_id, "suite": str(own), "split": "development", "limit": 3}
    answer = await asked.evaluate(SCENARIO, body)
    assert (answer["items"], answer["score"], answer["split"]) == (3, 1.0, "development")
    with pytest.raises(ReleaseNotFound):
        await asked.evaluate(SCENARIO, {**body, "release_id": "r9-00000000"})


async def test_a_budget_ends_a_run_which_goes_on_when_asked_again(setting: Setting, chain: list[Release]) -> None:
    asked = evaluations(setting, answering := Scripted(rising), made_suite(), max_calls=12)
    first = await asked.evaluate(SCENARIO, {"release_id": chain[5].release_id})
    assert first["budget_spent"] and first["items"] == 12 and first["missing"] == 8 and len(first["missing_items"]) == 8
    second = await asked.evaluate(SCENARIO, {"release_id": chain[5].release_id})
    assert not second["budget_spent"] and second["items"] == 20 and len(answering.calls) == 20


RUN = """
import asyncio, sys
from pathlib import Path
from reef_cli.evaluation import run_suite
from tests.evaluation.conftest import Scripted, make_release
from tests.supervisor.test_evaluations import made_suite, rising
answering = Scripted(rising, float(sys.argv[2]))
releases = [make_release("r1-aaaaaaaa"), make_release("r4-bbbbbbbb")]
report = asyncio.run(run_suite(answering, made_suite(), releases, state=Path(sys.argv[1]), concurrency=2))
print(len(answering.calls), [round(summary.mean, 3) for summary in report.summaries])
"""


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    command = [sys.executable, "-c", RUN, str(state)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen([*command, "0.05"], env=environment, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not state.exists() or len(state.read_bytes().splitlines()) < 12:
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    kept = state.read_bytes().count(b"\n") - 1
    done = subprocess.run([*command, "0"], env=environment, capture_output=True, text=True, check=True)
    calls, means = done.stdout.split(" ", 1)
    assert 11 <= kept < 2 * ITEMS and int(calls) == 2 * ITEMS - kept
    assert means.strip() == "[0.25, 0.7]"
