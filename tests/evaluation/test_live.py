"""Live comparisons: blocks, stated error rates, and drift that both sides share."""

import random

import pytest

from reef_cli.evaluation.decide import Tally
from reef_cli.evaluation.live import LiveTally


def run(
    draw: random.Random, share: float, sessions: int, candidate: float, others: float, wave: float = 0.0, alpha: float = 0.05
) -> str:
    """Sessions of pass rates that rise and fall together by `wave`; the first conclusion."""
    live = LiveTally(alpha)
    for number in range(sessions):
        is_candidate = draw.random() < share
        rate = (candidate if is_candidate else others) + wave * (1 if number // 50 % 2 else -1)
        live.add(candidate=is_candidate, reward=float(draw.random() < rate))
        if live.better or live.worse:
            return "better" if live.better else "worse"
    return "open"


def test_a_block_is_one_difference_of_means():
    live = LiveTally(0.05)
    for candidate, reward in ((False, 1.0), (False, 0.0), (True, 0.75), (True, 0.5), (False, 1.0), (False, 0.0)):
        live.add(candidate=candidate, reward=reward)
    assert live.tally.values == [0.25, -0.5]
    assert (live.candidate.sessions, live.others.sessions, live.others.block) == (2, 4, [0.0])
    evidence = live.evidence()
    assert evidence["candidate_mean"] == 0.625 and evidence["current_mean"] == 0.5 and evidence["blocks"] == 2
    assert evidence["interval"]["low"] < -0.125 < evidence["interval"]["high"]


def test_alternating_sessions_are_the_paired_test():
    draw, live, paired = random.Random(3), LiveTally(0.05), Tally(0.05)
    for _ in range(40):
        a, b = draw.random(), draw.random()
        live.add(candidate=False, reward=b)
        live.add(candidate=True, reward=a)
        paired.add(a - b)
    assert live.tally.better.log == pytest.approx(paired.better.log)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("wave", [0.0, 0.4])
def test_equal_sides_are_rarely_told_apart_whatever_changes_for_both(share: float, wave: float):
    draw = random.Random(f"{share} {wave}")
    results = [run(draw, share, 200, 0.5, 0.5, wave) for _ in range(60)]
    assert results.count("better") <= 7 and results.count("worse") <= 7


def test_a_broken_candidate_is_found_out_soon():
    draw = random.Random(1)
    assert [run(draw, 0.1, 400, 0.05, 0.9) for _ in range(20)] == ["worse"] * 20
    assert [run(draw, 0.5, 400, 0.9, 0.4) for _ in range(20)] == ["better"] * 20
