"""Tasksets of the verifiers library as suites; with the library where it is installed, and what is said where it is not."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from reef_cli.core.errors import ConfigError, EvaluationError, MissingDependency
from reef_cli.evaluation import Asker, Suite, run_suite

needs_verifiers = pytest.mark.skipif(find_spec("verifiers") is None, reason="the verifiers library is not installed")
NEW = "r2-aaaaaaaa"

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State]):
    @vf.reward(weight=0.75)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 4)

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(12):
            yield Sum(Data(prompt=f"{n} + {n}?", system_prompt="Only the number.", answer=str(2 * n), name="sum"))

__all__ = ["Sums"]
"""


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(text: str = TASKSET) -> str:
        name = f"reef_sums_{abs(hash((text, str(tmp_path)))) % 10**9}"
        (tmp_path / f"{name}.py").write_text(text)
        return f"verifiers:{name}"

    return make


@needs_verifiers
async def test_a_taskset_is_asked_and_scored_by_its_own_rewards(taskset, release, scripted):
    suite = Suite.load(taskset())
    assert len(suite.items) == 12 and {item.split for item in suite.items} == {"development", "heldout"}
    assert [message["role"] for message in suite.items[0].messages] == ["system", "user"]
    assert suite.digest == Suite.load(taskset()).digest

    def reply(name, question, sampling):
        number = int(question.split()[0])
        return str(2 * number) if number % 3 else "I do not know"

    report = await run_suite(answering := scripted(reply), suite, [release(NEW)], asker=Asker(answering, pauses_s=()))
    assert sorted(row.score for row in report.rows) == [0.0] * 4 + [1.0] * 8
    assert "right 1" in report.rows[-1].reason or "right 0" in report.rows[-1].reason


@needs_verifiers
async def test_a_reward_that_breaks_is_an_outage(taskset, release, scripted):
    broken = TASKSET.replace("return float(trace.last_reply == self.data.answer)", "raise KeyError('x')")
    suite = Suite.load(taskset(broken))
    with pytest.raises((EvaluationError, BaseExceptionGroup)):
        await run_suite(answering := scripted(lambda *_: "1"), suite, [release(NEW)], asker=Asker(answering))


@needs_verifiers
def test_tasks_that_are_more_than_a_question_are_refused(taskset):
    with pytest.raises(ConfigError, match="cannot be asked as one question"):
        Suite.load(
            taskset(
                TASKSET.replace(
                    "class Sum(vf.Task[Data, vf.State]):", "class Sum(vf.Task[Data, vf.State]):\n    NEEDS_CONTAINER = True"
                )
            )
        )
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Suite.load("verifiers:no_such_taskset_here")


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(MissingDependency, match="verifiers") as caught:
        Suite.load("verifiers:anything")
    assert "reef-cli[verifiers]" in caught.value.hint
