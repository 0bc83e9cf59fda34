"""Budgets are limits: calls, tokens and money, also with many calls under way, and what a verdict says when one ends."""

import asyncio

import pytest

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.errors import EngineUnavailable
from reef_cli.core.ports import Answer
from reef_cli.core.types import Cadence, Outcome
from reef_cli.evaluation import Asker, Gate
from reef_cli.evaluation.asking import Bench
from reef_cli.evaluation.budget import Budget, BudgetSpent, Price, Use

NEW, OLD = "r2-aaaaaaaa", "r1-bbbbbbbb"


@pytest.fixture
def judge(suite, release, scripted):
    async def run(reply, *, items=40, anchors=0, cadence=Cadence.GATED, cost=None, prices=Price(), delay_s=0.0, **settings):
        class Counted(scripted):
            async def answer(self, messages, sampling, release):
                answer = await super().answer(messages, sampling, release)
                return Answer(answer.text, 10, "stop", None, 20, cost)

        answering = Counted(reply, delay_s)
        chosen = EvaluationSettings(**{"concurrency": 4, "max_new_tokens": 16, **settings})
        asker = Asker(answering, 16, 0.0, "salt", pauses_s=(), bench=Bench(price=prices))
        verdict = await Gate(answering, suite(items, anchors), chosen, cadence=cadence, asker=asker).gate(
            "s", release(NEW), release(OLD)
        )
        return verdict, answering

    return run


def leaning(name, question, sampling):
    number = int(question[1:])
    return "yes" if (number % 5 < 3 if name == NEW else number % 5 == 4) else "no"


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_calls_are_a_limit(judge, concurrency):
    verdict, answering = await judge(leaning, max_calls=21, concurrency=concurrency, delay_s=0.001)
    evidence = verdict.evidence
    assert verdict.outcome is Outcome.INCONCLUSIVE and evidence["budget_spent"]
    assert len(answering.calls) <= 21 and evidence["cost"]["calls"] == len(answering.calls)
    assert verdict.reason.startswith(f"the budget ended after {evidence['pairs']} of 40 items")
    assert f"needs about {evidence['needs_about']} more episodes" in verdict.reason
    assert evidence["budget"] == {"calls": 21} and evidence["missing"] == 0
    assert evidence["pairs"] >= 21 // 2 - concurrency


async def test_tokens_and_money_are_limits_and_told(judge):
    verdict, answering = await judge(leaning, max_tokens=600)
    cost = verdict.evidence["cost"]
    assert 400 <= cost["prompt_tokens"] + cost["output_tokens"] <= 600
    assert (cost["prompt_tokens"], cost["output_tokens"]) == (20 * len(answering.calls), 10 * len(answering.calls))
    verdict, answering = await judge(leaning, max_money=0.004, prices=Price(5.0, 10.0))
    assert 0.003 <= verdict.evidence["cost"]["money"] <= 0.004
    assert verdict.evidence["cost"]["money"] == pytest.approx(len(answering.calls) * (20 * 5 + 10 * 10) / 1e6)
    verdict, answering = await judge(leaning, cost=0.5, prices=Price(5.0, 10.0), items=10)
    charged = verdict.evidence["cost"]["money"]
    assert charged == 0.5 * len(answering.calls), "what the provider charged counts before any price"


async def test_an_early_decision_needs_no_more_budget(judge):
    verdict, _ = await judge(lambda name, *_: "yes" if name == NEW else "no", max_calls=30)
    assert verdict.outcome is Outcome.SELECT and not verdict.evidence["budget_spent"]


async def test_nothing_is_selected_before_every_anchor_was_asked(judge):
    reply = lambda name, *_: "yes" if name == NEW else "no"  # noqa: E731
    for cadence in Cadence:
        verdict, _ = await judge(reply, anchors=20, max_calls=30, concurrency=1, cadence=cadence)
        assert verdict.outcome is Outcome.INCONCLUSIVE, cadence
        assert "budget ended" in verdict.reason


async def test_a_budget_too_small_for_one_pair_decides_nothing(judge):
    verdict, answering = await judge(leaning, max_calls=1)
    assert verdict.outcome is Outcome.INCONCLUSIVE and verdict.evidence["pairs"] == 0 and len(answering.calls) == 1


async def test_attempts_that_fail_are_calls_too(judge):
    def away(*_):
        raise EngineUnavailable("restarting")

    verdict, answering = await judge(lambda name, q, s: "yes" if q != "q0" else away(), items=8)
    assert verdict.evidence["cost"]["calls"] == len(answering.calls) == 16


async def test_a_call_waits_for_those_under_way_before_it_is_refused():
    budget = Budget(tokens=100)
    order = []

    async def call(name, most, used, pause):
        async with budget.call(Use(1, 0, most)) as receipt:
            await asyncio.sleep(pause)
            receipt.use = Use(1, 0, used)
            order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(call("first", 90, 10, 0.02))
        await asyncio.sleep(0)
        group.create_task(call("second", 80, 70, 0.0))
    assert order == ["first", "second"] and budget.used == Use(2, 0, 80)
    with pytest.raises(BudgetSpent):
        await call("third", 30, 30, 0)


async def test_a_cancelled_call_gives_its_room_back():
    budget = Budget(calls=2)

    async def stuck():
        async with budget.call(Use(1)):
            await asyncio.sleep(60)

    task = asyncio.create_task(stuck())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with budget.call(Use(1)):
        pass
    assert budget.used.calls == 2
