"""The choice of parents: worked numbers of the method, lineage blocking, and which states stay."""

import pytest

from reef_cli.discovery.puct import Node, ancestors, choose, kept, related, scores

FOUR = [
    Node(0, 2.0, True, 10, 2.5),
    Node(1, 2.3, False, 4, 2.6),
    Node(2, 2.5, False, 1, 2.55),
    Node(3, 2.6, False, 0, None),
]


def test_worked_scores() -> None:
    assert scores(FOUR, 15) == pytest.approx([2.510909, 2.648000, 2.730000, 3.080000], abs=1e-6)
    assert choose(FOUR, 15, 4) == [3, 2, 1, 0]
    three = [Node(0, 1.0, True, 3, 4.0), Node(1, 2.0, False, 2, 4.0), Node(2, 4.0)]
    assert scores(three, 3) == pytest.approx([4.166667, 4.444444, 6.0], abs=1e-6)


def test_a_cold_start_ranks_equal_seeds_by_their_order() -> None:
    seeds = [Node(i, 2.5, True) for i in range(3)]
    found = scores(seeds, 0)
    assert [score - 2.5 for score in found] == pytest.approx([1e-6 / 2, 1e-6 / 3, 1e-6 / 6], rel=1e-6)
    assert choose(seeds, 0, 3) == [0, 1, 2]


def test_a_visited_state_without_a_valid_child_keeps_its_own_value() -> None:
    assert scores([Node(0, 2.0, True, 8, None)], 8, c=0.0) == [2.0]
    assert scores([Node(0, 2.0, True, 8, 1.5)], 8, c=0.0) == [1.5], "a worse child counts once there is one"


def test_the_exploration_weight_scales_only_the_second_term() -> None:
    plain, double = scores(FOUR, 15, c=1.0), scores(FOUR, 15, c=2.0)
    q = scores(FOUR, 15, c=0.0)
    assert q == [2.5, 2.6, 2.55, 2.6]
    assert [two - base for two, base in zip(double, q, strict=True)] == pytest.approx(
        [2 * (one - base) for one, base in zip(plain, q, strict=True)]
    )


CHAIN = [
    Node(0, 1.0, True, 3, 2.0),
    Node(1, 2.0, False, 2, 3.0, frozenset({0})),
    Node(2, 3.0, False, 1, None, frozenset({0, 1})),
    Node(3, 1.5, True, 1, 1.6),
    Node(4, 1.6, False, 0, None, frozenset({3})),
    Node(5, 1.9, False, 0, None, frozenset({0})),
]


def test_a_pick_blocks_its_whole_lineage() -> None:
    found = scores(CHAIN, 4)
    order = sorted(range(6), key=lambda i: (-found[i], -CHAIN[i].value))
    assert order[0] == 2
    picked = choose(CHAIN, 4, 3)
    assert picked[0] == 2 and 0 not in picked and 1 not in picked, "ancestors of the best are blocked"
    assert picked[1:] == [5, 4], "a sibling is no relative; of the other tree one is taken"
    assert related(CHAIN[0], CHAIN[2]) and related(CHAIN[2], CHAIN[0]) and not related(CHAIN[2], CHAIN[5])


def test_with_too_few_unrelated_states_blocked_ones_follow_by_score_then_picks_repeat() -> None:
    line = CHAIN[:3]
    found = scores(line, 3)
    rest = sorted((0, 1), key=lambda i: -found[i])
    assert choose(line, 3, 3) == [2, *rest]
    assert choose(line[:1], 3, 3) == [0, 0, 0] and choose([], 0, 2) == []


def test_only_the_best_two_children_of_a_parent_stay_and_at_most_so_many() -> None:
    parents: dict[int, int | None] = {1: None, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2}
    values = {2: 1.0, 3: 3.0, 4: 2.0, 5: 9.0, 6: 0.5}
    assert kept(values, parents, per_parent=2, most=100) == {3, 4, 5, 6}
    assert kept(values, parents, per_parent=2, most=2) == {3, 5}
    assert kept(values, parents, per_parent=2, most=-1) == set()
    assert list(ancestors(5, parents)) == [2, 1]
