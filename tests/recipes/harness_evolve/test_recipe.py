"""What counts as a failure, what people ask for, and what is refused; settings and the shipped example."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.harness_evolve.recipe import ALWAYS_FRESH, LONGEST, HarnessEvolveRecipe, HarnessEvolveSettings
from reef_cli.config.load import load
from reef_cli.core.errors import ConfigError
from reef_cli.core.ids import RecordId, ReleaseId, new_id
from reef_cli.core.types import Inference, Report, Sample
from reef_cli.learning.contract import Refusal
from reef_cli.learning.evolving import Evolving

EXAMPLES = Path(__file__).resolve().parents[3] / "recipes/harness_evolve/examples/harness_evolve"
RECIPE = HarnessEvolveRecipe(HarnessEvolveSettings())


def record(**changes: Any) -> Inference:
    facts: dict[str, Any] = {
        "id": RecordId(new_id()),
        "scenario": "s",
        "created_at": 1.0,
        "dialect": "chat",
        "model": "m",
        "request": b"{}",
        "messages": [{"role": "system", "content": "secret sauce"}, {"role": "user", "content": "Name three rivers."}],
        "response": {"role": "assistant", "content": "Rhine, Oder, Elbe"},
        "session": "run-1",
        "release_id": ReleaseId("r3-00000000"),
    }
    return Inference(**{**facts, **changes})


def report(*records: Inference, **changes: Any) -> Report:
    return Report(RecordId(new_id()), "s", 2.0, tuple(one.id for one in records), **changes)


def test_a_failure_carries_what_was_asked_answered_and_said() -> None:
    first, last = record(), record()
    found = RECIPE.admit(report(first, last, score=0.0, feedback="a list please"), [first, last], {})
    assert isinstance(found, Sample)
    assert found.records == (first.id, last.id) and found.reward == 0.0
    given = found.extras
    assert (given["prompt"], given["answer"], given["feedback"], given["session"]) == (
        "Name three rivers.",
        "Rhine, Oder, Elbe",
        "a list please",
        "run-1",
    )
    assert "secret sauce" not in str(given) and RECIPE.group(found).size == 1 and not RECIPE.group(found).key


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"score": 0.5}, "not_failing"), ({"score": 1.0, "feedback": "great"}, "not_failing")],
)
def test_what_went_well_teaches_nothing(facts: dict[str, Any], reason: str) -> None:
    one = record()
    assert RECIPE.admit(report(one, **facts), [one], {}) == Refusal(reason)


def test_feedback_without_a_score_counts_and_a_missing_answer_does_not() -> None:
    one = record()
    assert isinstance(RECIPE.admit(report(one, feedback={"text": "too long"}), [one], {}), Sample)
    silent = record(response=None)
    assert RECIPE.admit(report(silent, score=0.0), [silent], {}) == Refusal("no_answer")


def test_wishes_are_jobs_of_their_own_and_never_stale() -> None:
    for kind in ("request", "proposal"):
        found = RECIPE.admit(report(feedback={"kind": kind, "text": "brief"}), [], {})
        assert isinstance(found, Sample) and found.step == ALWAYS_FRESH and found.records == ()
        assert RECIPE.group(found).size == 0 and found.id in RECIPE.group(found).key
    assert RECIPE.admit(report(feedback="hm"), [], {}) == Refusal("needs_receipt")
    assert RECIPE.admit(report(feedback={"kind": "failure"}), [], {}) == Refusal("needs_receipt")


def test_of_a_long_conversation_the_end_is_kept() -> None:
    messages = [{"role": "user", "content": f"{n} " + "x" * (LONGEST // 4)} for n in range(9)]
    one = record(messages=messages)
    found = RECIPE.admit(report(one, score=0.0), [one], {})
    assert isinstance(found, Sample) and [m["content"][0] for m in found.extras["messages"]] == ["6", "7", "8"]
    parts = record(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    found = RECIPE.admit(report(parts, score=0.0), [parts], {})
    assert isinstance(found, Sample) and found.extras["prompt"] == "a\nb"


def test_settings() -> None:
    assert isinstance(RECIPE, Evolving) and RECIPE.evolution().adapter == "native" and not RECIPE.evolution().unsafe
    wrong = ({"batch_size": 0}, {"promote": 3}, {"episode_seconds": 0.0}, {"proposer_engine": {"api_key": "k"}})
    for changes in wrong:
        with pytest.raises(ConfigError):
            replace(HarnessEvolveSettings(), **changes)
    graded = HarnessEvolveSettings(promote=3, promote_grader={"kind": "one_sentence"}, episode_sandbox="unsafe")
    assert HarnessEvolveRecipe(graded).evolution().unsafe


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_load(path: Path) -> None:
    loaded = load([], {}, path)
    assert loaded.recipe is HarnessEvolveRecipe
