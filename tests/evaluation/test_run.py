"""`run_suite`: reports, pairing, resumption, and what is refused."""

import json

import pytest

from reef_cli.core.errors import ConfigError, EngineUnavailable, EvaluationError
from reef_cli.core.ports import Answer, Completion
from reef_cli.evaluation import Asker, Suite, run_suite
from reef_cli.evaluation.rows import tokens_digest

A, B = "r1-aaaaaaaa", "r2-bbbbbbbb"


async def no_pause(seconds):
    return None


def reply(name, question, sampling):
    return "yes" if name == B or int(question[1:]) < 4 else "no"


async def test_a_report_of_two_releases_and_the_base(suite, release, scripted):
    seen = []
    made = suite(12, tags=["facts"])
    releases = [release(A), release(B), None]
    report = await run_suite(scripted(reply), made, releases, on_progress=lambda done, total: seen.append((done, total)))
    first, second, base = report.summaries
    assert (first.release, first.items, first.missing, first.mean) == (A, 12, 0, pytest.approx(4 / 12))
    assert second.mean == 1.0 and base.release == "base" and base.mean == first.mean
    assert first.interval[0] < 4 / 12 < first.interval[1] and first.by_tag == {"facts": (pytest.approx(4 / 12), 12)}
    better, same = report.differences
    assert (better.release, better.against, better.wins, better.losses, better.ties) == (B, A, 8, 0, 4)
    assert better.result == "better" and better.interval[0] > 0
    assert (same.wins, same.losses, same.result) == (0, 0, "open")
    assert sorted(seen)[-1] == (36, 36) and len(report.rows) == 36
    json.dumps(report.to_json())


async def test_turns_rotate(suite, release, scripted):
    answering = scripted(reply)
    await run_suite(answering, suite(4), [release(A), release(B)], concurrency=1)
    assert [name for name, _ in answering.calls] == [A, B, B, A, A, B, B, A]


async def test_a_run_resumes_where_it_was_cut(suite, release, scripted, tmp_path):
    state = tmp_path / "deep" / "state.jsonl"
    calls = 0

    def dying(name, question, sampling):
        nonlocal calls
        calls += 1
        if calls > 7:
            raise KeyError("killed")
        return reply(name, question, sampling)

    with pytest.raises(BaseExceptionGroup):
        await run_suite(scripted(dying), suite(10), [release(A), release(B)], state=state, concurrency=1)
    with state.open("a") as file:
        file.write('{"release": "r1-aaaa')
    kept = len(state.read_text().splitlines()) - 2
    assert kept == 7
    answering = scripted(reply)
    report = await run_suite(answering, suite(10), [release(A), release(B)], state=state)
    assert len(answering.calls) == 20 - kept and report.summaries[1].mean == 1.0
    again = scripted(reply)
    assert await run_suite(again, suite(10), [release(A), release(B)], state=state) == report and again.calls == []


async def test_a_state_of_another_run_is_refused(suite, release, scripted, tmp_path):
    state = tmp_path / "state.jsonl"
    await run_suite(scripted(reply), suite(3), [release(A)], state=state)
    with pytest.raises(ConfigError, match="another run") as refused:
        await run_suite(scripted(reply), suite(4), [release(A)], state=state)
    assert "suite" in refused.value.why
    with pytest.raises(ConfigError, match="another run"):
        await run_suite(scripted(reply), suite(3), [release(A)], state=state, temperature=1.0)
    state.write_text("not json\n")
    with pytest.raises(ConfigError, match="no state"):
        await run_suite(scripted(reply), suite(3), [release(A)], state=state)


async def test_missing_answers_are_listed_and_asked_again(suite, release, scripted, tmp_path):
    def gone(name, question, sampling):
        if question == "q2" and name == B:
            raise EngineUnavailable("gone")
        return "yes"

    state = tmp_path / "state.jsonl"
    asker = Asker(scripted(gone), sleep=no_pause)
    report = await run_suite(asker.answering, suite(6), [release(A), release(B)], state=state, asker=asker)
    assert report.missing == ((B, "q2", "engine_unavailable: gone"),)
    assert report.summaries[1].missing == 1 and report.summaries[1].mean == 1.0 and report.differences[0].pairs == 5
    healed = scripted(lambda *_: "yes")
    report = await run_suite(healed, suite(6), [release(A), release(B)], state=state)
    assert healed.calls == [(B, "q2")] and report.missing == ()


async def test_nothing_answered_is_an_outage(suite, release, scripted):
    def gone(*_):
        raise EngineUnavailable("gone")

    asker = Asker(scripted(gone), sleep=no_pause)
    with pytest.raises(EvaluationError, match="no item"):
        await run_suite(asker.answering, suite(3), [release(A)], asker=asker)


async def test_a_mistake_of_the_setting_is_raised_as_itself(suite, release, scripted):
    def refused(name, question, sampling):
        raise ConfigError("no model is named")

    with pytest.raises(ConfigError, match="no model is named"):
        await run_suite(scripted(refused), suite(5), [release("r1-a")])


async def test_each_release_once(suite, release, scripted):
    for releases in ([], [release(A), release(A)]):
        with pytest.raises(ConfigError):
            await run_suite(scripted(reply), suite(3), releases)


async def test_fractional_scores_get_a_bootstrap_interval(release, scripted, monkeypatch):
    import sys

    module = type(sys)("reef_test_fraction")
    module.share = lambda answer: len(answer) / 10
    monkeypatch.setitem(sys.modules, "reef_test_fraction", module)
    rows = [
        {
            "id": f"q{n}",
            "messages": [{"role": "user", "content": f"q{n}"}],
            "grader": {"kind": "python", "path": "reef_test_fraction:share"},
        }
        for n in range(8)
    ]
    made = Suite.parse("\n".join(map(json.dumps, rows)), "f")
    report = await run_suite(scripted(lambda name, question, _: "x" * (int(question[1:]) + 1)), made, [release(A)])
    (summary,) = report.summaries
    assert summary.mean == pytest.approx(0.45) and 0.2 < summary.interval[0] < 0.45 < summary.interval[1] < 0.8


def test_equal_token_digests_mean_equal_tokens():
    def answer(*ids):
        return Answer("same text", len(ids), "stop", Completion("same text", ids, (0.0,) * len(ids), "stop", (), 1))

    assert tokens_digest(answer(1, 2)) == tokens_digest(answer(1, 2)) != tokens_digest(answer(12))
    assert tokens_digest(Answer("x", 1, "stop")) == ""
