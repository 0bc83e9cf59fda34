"""Turns of one episode as one sequence: who said what, when it cannot be, and that the mask keeps tool output out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.grpo.recipe import GRPORecipe, GRPOSettings
from reef_cli.core.types import Sample, TokenSpan, TokenTrace
from reef_cli.learning.contract import Refusal
from reef_cli.learning.turns import joined
from tests.recipes.kit import record, report


def trace(prompt: tuple[int, ...], output: tuple[int, ...], version: str = "base") -> TokenTrace:
    n = len(output)
    return TokenTrace(prompt, output, tuple(-0.5 - k for k in range(n)), (1,) * n, (TokenSpan(version, 0, n),))


FIRST, SECOND = trace((1, 2), (3, 4)), trace((1, 2, 3, 4, 9, 9, 5), (6,), "s@r1-00000000")


def test_two_turns_are_one_sequence() -> None:
    whole = joined([FIRST, SECOND])
    assert whole is not None and whole.fault() is None
    assert whole.prompt_ids == (1, 2) and whole.output_ids == (3, 4, 9, 9, 5, 6)
    assert whole.loss_mask == (1, 1, 0, 0, 0, 1) and whole.logprobs == (-0.5, -1.5, 0, 0, 0, -0.5)
    assert [(span.version, span.start, span.end) for span in whole.spans] == [
        ("base", 0, 2), ("s@r1-00000000", 2, 5), ("s@r1-00000000", 5, 6),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "later", [trace((1, 2, 3, 8, 9), (6,)), trace((1, 2, 3), (6,)), replace(SECOND, temperature=0.5)],
    ids=["rewritten", "shorter", "another temperature"],
)  # fmt: skip
def test_what_does_not_extend_is_not_joined(later: TokenTrace) -> None:
    assert joined([FIRST, later]) is None


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(0, 9), min_size=1, max_size=3)), min_size=1
    )
)
def test_joining_loses_and_invents_nothing(turns: list[tuple[list[int], list[int]]]) -> None:
    history: list[int] = [7]
    traces, said = [], []
    for between, output in turns:
        history += between
        traces.append(trace(tuple(history), tuple(output)))
        history += output
        said += output
    whole = joined(traces)
    assert whole is not None and whole.fault() is None
    assert [*whole.prompt_ids, *whole.output_ids] == history
    assert [t for t, m in zip(whole.output_ids, whole.loss_mask, strict=True) if m] == said


def test_an_episode_is_admitted_as_one_sample() -> None:
    recipe = GRPORecipe(GRPOSettings())
    one, two = record("r1", tokens=FIRST), record("r2", tokens=SECOND)
    told = report("p1", "r1", "r2", score=1.0, metadata={"group": "g", "rollout": 0})
    sample = recipe.admit(told, [one, two], {"base": 0, "s@r1-00000000": 1})
    assert isinstance(sample, Sample) and sample.records == ("r1", "r2") and sample.step == 0
    assert recipe.admit(told, [two, one], {"base": 0, "s@r1-00000000": 1}) == Refusal("turns_do_not_join")
