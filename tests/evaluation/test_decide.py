"""The statistics: error rates by simulation, power, coverage, and agreement of the fast and the plain form."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.evaluation.decide import Tally, Wealth, binary_result, decide, decide_return, interval
from reef_cli.evaluation.intervals import bootstrap, of_scores, wilson

RUNS = 2000


def publish_rate(items: int, win: float, loss: float, *, runs: int = RUNS, seed: int = 0) -> float:
    """Share of runs in which the sequential gate says "better", stopping as soon as it says anything."""
    draw = random.Random(f"{seed} {items} {win} {loss}")
    published = 0
    for _ in range(runs):
        wins = losses = 0
        for _ in range(items):
            dice = draw.random()
            if dice < win:
                wins += 1
            elif dice < win + loss:
                losses += 1
            else:
                continue
            if (result := binary_result(wins, losses)) != "open":
                published += result == "better"
                break
    return published / runs


@pytest.mark.parametrize("items", [5, 20, 100, 400])
@pytest.mark.parametrize("discordant", [0.1, 0.5, 1.0])
def test_identical_candidates_are_published_in_at_most_five_percent_of_runs(items, discordant):
    assert publish_rate(items, discordant / 2, discordant / 2) <= 0.05


def test_the_naive_rule_is_far_worse():
    """ "More wins than losses on 3 tasks", scores 0 or 1 with chance 1/2: identical candidates pass a third of the time."""
    draw = random.Random(1)
    rate = sum(sum(draw.getrandbits(1) - draw.getrandbits(1) for _ in range(3)) > 0 for _ in range(RUNS)) / RUNS
    assert 0.28 < rate < 0.40
    assert publish_rate(3, 0.25, 0.25) == 0.0


def test_power_for_real_improvements():
    assert publish_rate(300, 0.20, 0.10, runs=500) > 0.6
    assert publish_rate(1000, 0.15, 0.10, runs=300) > 0.5
    assert publish_rate(100, 0.30, 0.02, runs=300) > 0.95
    assert publish_rate(300, 0.10, 0.20, runs=500) < 0.01


def test_fractional_scores_keep_the_error_rate():
    draw = random.Random(3)
    published = 0
    for _ in range(400):
        published += decide((draw.betavariate(2, 2) - draw.betavariate(2, 2) for _ in range(60)), 0.05).result == "better"
    assert published / 400 <= 0.05


def test_one_sided_results_end_quickly():
    assert decide([1.0] * 100).pairs <= 8 and decide([1.0] * 100).result == "better"
    assert decide([-1.0] * 100).result == "worse"
    flat = decide([0.0] * 100)
    assert (flat.result, flat.ties, flat.needs, flat.log_better) == ("open", 100, None, 0.0)


def test_an_open_result_says_how_much_is_missing():
    lean = decide([1.0, -1.0, 1.0, -1.0, 1.0] * 6)
    assert lean.result == "open" and lean.needs is not None and lean.needs > 10
    closer = decide([1.0, 1.0, -1.0] * 10 + [1.0])
    assert closer.result == "open" and closer.needs < lean.needs


@given(wins=st.integers(0, 60), losses=st.integers(0, 60))
def test_the_cached_form_agrees_with_the_plain_one(wins, losses):
    tally = Tally()
    for _ in range(wins):
        tally.add(1.0)
    for _ in range(losses):
        tally.add(-1.0)
    assert tally.conclude().result == binary_result(wins, losses)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_order_and_ties_do_not_matter(values):
    one, two = Tally(), Tally()
    for value in values:
        one.add(value)
    for value in [*reversed(values), 0.0, 0.0]:
        two.add(value)
    assert one.better.log == pytest.approx(two.better.log, abs=1e-9)


@given(st.lists(st.floats(-1, 1), min_size=0, max_size=40))
def test_the_interval_holds_the_mean_and_mirrors(values):
    low, high = interval(values)
    mean = math.fsum(values) / len(values) if values else 0.0
    assert -1 <= low <= mean + 1e-9 and mean - 1e-9 <= high <= 1
    mirrored = interval([-value for value in values])
    assert mirrored == pytest.approx((-high, -low), abs=1e-6)


def test_the_interval_covers_the_truth():
    """True mean 0.1 (15 % wins, 5 % losses); checked after 50 and 200 items of each run: at most 5 % of runs ever miss it."""
    draw = random.Random(7)
    missed = 0
    for _ in range(200):
        values = [float((dice := draw.random()) < 0.15) - float(dice > 0.95) for _ in range(200)]
        missed += any(not low <= 0.1 <= high for low, high in (interval(values[:50]), interval(values)))
    assert missed / 200 <= 0.05


@given(wins=st.integers(0, 40), losses=st.integers(0, 40), ties=st.integers(0, 20))
def test_decision_and_interval_tell_one_story(wins, losses, ties):
    low, high = interval([1.0] * wins + [-1.0] * losses + [0.0] * ties, 0.1)
    assert ("better" if low > 0 else "worse" if high < 0 else "open") == binary_result(wins, losses, 0.05)


def test_return_only_when_worse_by_more_than_the_margin():
    assert decide_return([-1.0] * 40 + [0.0] * 10, 0.1).result == "worse"
    slightly = ([-1.0] + [0.0] * 19) * 20
    assert decide_return(slightly, 0.1).result == "open" and decide_return(slightly, 0.0).result == "worse"
    draw = random.Random(11)
    wrong = 0
    for _ in range(400):
        values = (float((dice := draw.random()) < 0.1) - float(dice > 0.8) for _ in range(200))
        wrong += decide_return(values, 0.1).result == "worse"
    assert wrong / 400 <= 0.05


def test_differences_are_bounded():
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        Tally().add(1.5)
    assert Wealth().log == 0.0


def test_intervals_at_fixed_size():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(8, 10)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    assert wilson(10, 10)[1] == 1.0 and wilson(0, 10)[0] == 0.0
    assert of_scores([1.0, 0.0] * 5) == wilson(5, 10)
    low, high = of_scores([0.2, 0.4, 0.6, 0.9])
    assert 0.2 <= low < 0.525 < high <= 0.9
    assert bootstrap([0.5] * 9) == (0.5, 0.5) and bootstrap([]) == (-math.inf, math.inf)
