"""The gate over scripted answers: verdicts, interleaving, early stops, outages, anchors, evidence."""

import asyncio
import json
import random

import pytest

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.errors import EngineError, EngineUnavailable, EvaluationError
from reef_cli.core.types import Cadence, Outcome
from reef_cli.evaluation import Asker, Gate

NEW, OLD = "r2-aaaaaaaa", "r1-bbbbbbbb"


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
def judge(suite, release, scripted):
    """`judge(reply, items=..., ...)` -> (verdict, the scripted answerer)."""

    async def run(reply, *, items=40, anchors=0, cadence=Cadence.GATED, made=None, progress=None, delay_s=0.0, **settings):
        answering = scripted(reply, delay_s)
        chosen = EvaluationSettings(**{"concurrency": 4, **settings})
        asker = Asker(answering, chosen.max_new_tokens, chosen.temperature, "salt", sleep=no_pause)
        gate = Gate(answering, made or suite(items, anchors), chosen, cadence=cadence, asker=asker)
        return await gate.gate("s", release(NEW), release(OLD), progress), answering

    return run


async def test_a_better_candidate_is_selected_early(judge):
    seen = []
    reply = lambda name, question, sampling: "yes" if name == NEW else "no"  # noqa: E731
    verdict, answering = await judge(reply, progress=lambda done, total: seen.append((done, total)))
    assert verdict.outcome is Outcome.SELECT and "shown better" in verdict.reason
    evidence = verdict.evidence
    assert evidence["stopped_early"] and evidence["asked"] < 12 and evidence["wins"] == evidence["pairs"]
    assert len(answering.calls) < 2 * 20
    assert (evidence["candidate_mean"], evidence["current_mean"], evidence["difference"]) == (1.0, 0.0, 1.0)
    assert evidence["interval"]["low"] > 0 and seen == [(n + 1, 40) for n in range(evidence["asked"])]
    json.dumps(evidence, allow_nan=False)


async def test_a_worse_candidate_is_rejected_early(judge):
    verdict, _ = await judge(lambda name, question, sampling: "no" if name == NEW else "yes")
    assert verdict.outcome is Outcome.REJECT and "shown worse" in verdict.reason and verdict.evidence["stopped_early"]


async def test_equal_answers_are_inconclusive(judge):
    verdict, answering = await judge(lambda name, question, sampling: "yes")
    assert verdict.outcome is Outcome.INCONCLUSIVE and "not shown better" in verdict.reason
    assert verdict.evidence["ties"] == 40 and verdict.evidence["needs_about"] is None and len(answering.calls) == 80


async def test_a_lean_says_how_many_items_more(judge):
    def reply(name, question, sampling):
        number = int(question[1:])
        return "yes" if (number % 5 < 3 if name == NEW else number % 5 in (3, 4)) else "no"

    verdict, _ = await judge(reply, items=20)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.evidence["needs_about"] > 0 and f"about {verdict.evidence['needs_about']} more" in verdict.reason


async def test_sides_are_interleaved_on_the_same_seeds(judge):
    verdict, answering = await judge(lambda name, question, sampling: "yes", items=10, concurrency=1, temperature=0.7)
    first = [answering.calls[index][0] for index in range(0, 20, 2)]
    assert first == [NEW, OLD] * 5, "who answers first alternates"
    assert [a[1] for a in answering.calls[::2]] == [b[1] for b in answering.calls[1::2]]
    for number in range(10):
        ours, theirs = answering.samplings[NEW, f"q{number}"], answering.samplings[OLD, f"q{number}"]
        assert ours == theirs and ours.temperature == 0.7 and ours.seed is not None
    assert len({answering.samplings[NEW, f"q{number}"].seed for number in range(10)}) == 10
    assert verdict.evidence["sampling"]["temperature"] == 0.7


async def test_concurrency_is_bounded_and_used(judge):
    _, answering = await judge(lambda name, question, sampling: "yes", concurrency=3, delay_s=0.002)
    assert answering.most == 3


async def test_quick_answers_do_not_decide_first(suite, release, scripted):
    """The verdict and its numbers do not depend on how long each answer takes."""

    class Slow(scripted):
        async def answer(self, messages, sampling, release):
            await asyncio.sleep(draw.uniform(0, 0.004))
            return await super().answer(messages, sampling, release)

    def reply(name, question, sampling):
        return "yes" if (int(question[1:]) % 3 == 0) != (name == NEW and int(question[1:]) % 2 == 0) else "no"

    found = []
    for seed in range(3):
        draw = random.Random(seed)
        gate = Gate(answering := Slow(reply), suite(60), EvaluationSettings(concurrency=8))
        verdict = await gate.gate("s", release(NEW), release(OLD))
        found.append({key: verdict.evidence[key] for key in ("asked", "wins", "losses", "difference")})
        assert answering.running == 0, "nothing is left running after an early stop"
    assert found[0] == found[1] == found[2]


async def test_a_transient_failure_is_asked_again(judge):
    failures = {}

    def reply(name, question, sampling):
        failures[name, question] = failures.get((name, question), 0) + 1
        if failures[name, question] <= 2:
            raise EngineUnavailable("the engine is restarting")
        return "yes"

    verdict, _ = await judge(reply, items=6)
    assert verdict.evidence["missing"] == 0 and verdict.evidence["pairs"] == 6
    assert verdict.evidence["cost"]["calls"] == 36


async def test_what_stays_unanswered_is_missing_not_zero(judge):
    def reply(name, question, sampling):
        if question == "q3" and name == NEW:
            raise EngineUnavailable("gone")
        return "yes"

    verdict, _ = await judge(reply, items=12)
    evidence = verdict.evidence
    assert (evidence["missing"], evidence["pairs"], evidence["losses"]) == (1, 11, 0)
    assert evidence["candidate_mean"] == evidence["current_mean"] == 1.0
    assert evidence["missing_items"][0]["id"] == "q3" and "gone" in evidence["missing_items"][0]["why"]


async def test_an_outage_decides_nothing(judge):
    asked = 0

    def reply(name, question, sampling):
        nonlocal asked
        asked += 1
        if asked > 10:
            raise EngineUnavailable("the engine is gone")
        return "yes" if name == NEW else "no" if asked % 4 else "yes"

    with pytest.raises(EvaluationError, match="got no answer") as outage:
        await judge(reply, items=100)
    assert outage.value.details["asked"] < 20, "it stops, it does not try the other 90"


async def test_a_candidate_that_breaks_the_engine_is_rejected(judge):
    def reply(name, question, sampling):
        if name == NEW:
            raise EngineError("probability tensor contains nan")
        return "yes"

    verdict, _ = await judge(reply)
    assert verdict.outcome is Outcome.REJECT and "fails on the candidate's requests" in verdict.reason


async def test_an_engine_that_breaks_for_both_is_an_outage(judge):
    def reply(name, question, sampling):
        raise EngineError("out of memory")

    with pytest.raises(EvaluationError):
        await judge(reply)


async def test_an_anchor_must_not_regress(judge):
    def reply(name, question, sampling):
        return ("no" if name == NEW else "yes") if question == "q0" else ("yes" if name == NEW else "no")

    verdict, answering = await judge(reply, anchors=2)
    assert verdict.outcome is Outcome.REJECT and "q0" in verdict.reason and "must not regress" in verdict.reason
    assert verdict.evidence["anchors"]["regressed"] == ["q0"]
    assert answering.calls.count((NEW, "q0")) == 2, "a regression is confirmed"


async def test_an_anchor_that_flickers_is_forgiven(judge):
    seen = 0

    def reply(name, question, sampling):
        nonlocal seen
        if question == "q0" and name == NEW:
            seen += 1
            return "no" if seen == 1 else "yes"
        return "yes" if name == NEW or question == "q0" else "no"

    verdict, _ = await judge(reply, anchors=1)
    assert verdict.outcome is Outcome.SELECT and verdict.evidence["anchors"] == {"count": 1, "regressed": []}


async def test_all_anchors_are_asked_before_anything_is_selected(judge):
    def reply(name, question, sampling):
        if question == "q11" and name == NEW:
            raise EngineUnavailable("gone")
        return "yes" if name == NEW else "no"

    verdict, answering = await judge(reply, anchors=12)
    assert {question for _, question in answering.calls} >= {f"q{number}" for number in range(12)}
    assert verdict.outcome is Outcome.INCONCLUSIVE and "q11" in verdict.reason


async def test_rolling_returns_only_what_was_shown_worse(judge):
    same, _ = await judge(lambda name, question, sampling: "yes", cadence=Cadence.ROLLING)
    assert same.outcome is Outcome.INCONCLUSIVE and "not shown worse" in same.reason and same.evidence["gate"] == "rolling"
    worse, _ = await judge(lambda name, question, sampling: "no" if name == NEW else "yes", cadence=Cadence.ROLLING)
    assert worse.outcome is Outcome.REJECT and worse.evidence["stopped_early"]
    slightly = lambda name, question, sampling: "no" if name == NEW and int(question[1:]) % 10 == 0 else "yes"  # noqa: E731
    assert (await judge(slightly, items=200, cadence=Cadence.ROLLING))[0].outcome is Outcome.REJECT
    kept, _ = await judge(slightly, items=200, cadence=Cadence.ROLLING, regression_margin=0.15)
    assert kept.outcome is Outcome.INCONCLUSIVE and kept.evidence["test"]["margin"] == 0.15


async def test_identical_noisy_candidates_rarely_pass(suite, release, scripted):
    """The whole gate, 100 times, over answers right by a coin toss: at most a few are published."""
    draw = random.Random(2)
    published = 0
    for _ in range(100):
        gate = Gate(scripted(lambda name, question, sampling: draw.choice(["yes", "no"])), suite(30), EvaluationSettings())
        published += (await gate.gate("s", release(NEW), release(OLD))).outcome is Outcome.SELECT
    assert published <= 10


async def test_weights_count(judge, suite):
    heavy = suite(1, weight=10.0).items[0]
    from dataclasses import replace

    light = [replace(item, id=f"l{item.id}") for item in suite(9).items]
    made = replace(suite(1), items=(heavy, *light))
    verdict, _ = await judge(lambda name, question, sampling: "yes" if name == NEW else "no", made=made)
    assert verdict.evidence["difference"] == pytest.approx((1.0 + 9 * 0.1) / 10)


async def test_drift_is_shown(judge):
    def reply(name, question, sampling):
        return "yes " * 60 if name == NEW else "I'm sorry, I cannot. no"

    verdict, _ = await judge(reply)
    guards = verdict.evidence["guards"]
    assert guards["flags"][0].startswith("length") and any(flag.startswith("refused 1.00") for flag in guards["flags"])
    assert any(flag.startswith("looping") for flag in guards["flags"])


async def test_samples_are_few_short_and_clean(judge):
    verdict, _ = await judge(lambda name, question, sampling: ("yes" if name == NEW else "no") + "\x1b[2J" + "x" * 5000)
    samples = verdict.evidence["samples"]
    assert 1 <= len(samples) <= 6
    for sample in samples:
        for side in ("candidate", "current"):
            assert "\x1b" not in sample[side]["text"] and len(sample[side]["text"]) <= 400
    assert verdict.evidence["suite"]["digest"].startswith("sha256:") and verdict.evidence["suite"]["items"] == 40


async def test_no_suite_is_an_open_gate_that_says_so(release, scripted):
    gate = Gate(scripted(lambda *_: 1 / 0), None, EvaluationSettings())
    verdict = await gate.gate("s", release(NEW), release(OLD))
    assert verdict.outcome is Outcome.SELECT and verdict.reason == "no suite configured" and verdict.evidence["gate"] == "open"


async def test_the_same_content_is_not_evaluated(release, scripted, suite):
    answering = scripted(lambda *_: "yes")
    gate = Gate(answering, suite(5), EvaluationSettings())
    assert (await gate.gate("s", release(NEW), release(NEW))).outcome is Outcome.REJECT
    rolling = Gate(answering, suite(5), EvaluationSettings(), cadence=Cadence.ROLLING)
    assert (await rolling.gate("s", release(NEW), release(NEW))).outcome is Outcome.SELECT
    assert answering.calls == []


async def test_the_split_and_limit_of_the_settings_hold(judge, suite):
    verdict, answering = await judge(lambda *_: "yes", items=30, limit=7)
    assert verdict.evidence["asked"] == 7 and verdict.evidence["suite"]["split"] == "heldout" and len(answering.calls) == 14


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"loss": float("nan")}, "loss is not finite"),
        ({"grad": {"norm": float("inf")}}, "norm is not finite"),
        ({"kl_to_gated": 1.5}, "KL"),
        ({"kl_to_gated": 0.5, "loss": 1.0, "note": "x", "steps": 3}, None),
    ],
)
async def test_smoke_reads_the_metrics(release, scripted, suite, metrics, words):
    answering = scripted(lambda *_: "yes")
    gate = Gate(answering, suite(9), EvaluationSettings(max_kl=1.0))
    verdict = await gate.smoke("s", release(NEW, metrics=metrics), release(OLD))
    if words:
        assert verdict.outcome is Outcome.REJECT and words in verdict.reason and answering.calls == []
    else:
        assert verdict.outcome is Outcome.SELECT and len(answering.calls) == 8


@pytest.mark.parametrize("configured", [True, False])
async def test_smoke_reads_a_few_answers(release, scripted, suite, configured):
    made = suite(9) if configured else None
    for text in ("", "the the the " * 30):
        gate = Gate(scripted(lambda name, *_, text=text: text if name == NEW else "a fine answer"), made, EvaluationSettings())
        verdict = await gate.smoke("s", release(NEW), release(OLD))
        assert verdict.outcome is Outcome.REJECT and "4 of 4" in verdict.reason
        both = Gate(scripted(lambda *_, text=text: text), made, EvaluationSettings())
        assert (await both.smoke("s", release(NEW), release(OLD))).outcome is Outcome.SELECT, "no worse than what is served"


async def test_smoke_outage_and_broken_candidate(release, scripted, suite):
    def gone(*_):
        raise EngineUnavailable("gone")

    def broken(name, *_):
        if name == NEW:
            raise EngineError("nan")
        return "fine"

    asker = Asker(scripted(gone), sleep=no_pause)
    with pytest.raises(EvaluationError):
        await Gate(asker.answering, suite(9), EvaluationSettings(), asker=asker).smoke("s", release(NEW), release(OLD))
    verdict = await Gate(scripted(broken), suite(9), EvaluationSettings()).smoke("s", release(NEW), release(OLD))
    assert verdict.outcome is Outcome.REJECT


async def test_cancelling_a_gate_leaves_nothing_running(suite, release, scripted):
    answering = scripted(lambda *_: "yes", 5.0)
    task = asyncio.create_task(Gate(answering, suite(20), EvaluationSettings()).gate("s", release(NEW), release(OLD)))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answering.running == 0
