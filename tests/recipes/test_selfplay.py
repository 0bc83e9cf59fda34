"""Self-play: regret and bands on worked numbers, both roles' reports, whole steps, the memory of a game."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.selfplay.play import Memory, Played, _distinct
from recipes.selfplay.program import played
from recipes.selfplay.recipe import BAND, ROLE, SelfPlayRecipe, SelfPlaySettings
from recipes.selfplay.regret import Trial, trial
from recipes.selfplay.sums import Sums
from reef_cli.core.errors import ConfigError
from reef_cli.core.types import Sample
from reef_cli.trainer.process import join_alone
from tests.recipes.kit import admitted, learner, on_policy, record, refused
from tests.trainer.conftest import toy_model

__all__ = ["toy_model"]  # the fixture, borrowed
SMALL: dict[str, Any] = {"batch_size": 8, "group_size": 4, "proposals": 4, "policy_lr": 1e-2}


@pytest.fixture(scope="module", autouse=True)
def group() -> None:
    join_alone(threads=1)


def recipe(**settings: Any) -> SelfPlayRecipe:
    return SelfPlayRecipe(SelfPlaySettings(**{**SMALL, **settings}))


def proposal(number: int, *, group: str = "0", **told: Any) -> Sample:
    return admitted(recipe(), number, metadata={"role": "proposer", "group": group, "rollout": number, **told})


def attempt(number: int, score: float, *, group: str = "0/0", answer: str = "say") -> Sample:
    told = {"role": "solver", "group": group, "rollout": number}
    return admitted(recipe(), number, answer=answer, score=score, metadata=told)


# -- regret ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "hinted", "regret", "band"),
    [
        ((1, 0, 0, 0), (1, 1), 0.75, "frontier"),
        ((1, 1), (1, 1), 0.0, "mastered"),
        ((0, 0, 0, 0), (0, 0), 0.0, "out_of_reach"),
        ((1, 1, 0, 0), (0, 0), -0.5, "frontier"),
        ((0.9,), (1,), 0.1, "frontier"),
        ((0.1,), (1,), 0.9, "frontier"),
    ],
)
def test_regret_and_bands(plain: tuple[float, ...], hinted: tuple[float, ...], regret: float, band: str) -> None:
    found = Trial(plain, hinted)
    assert found.regret == pytest.approx(regret) and found.band(0.9, 0.1) == band


@pytest.mark.parametrize("broken", [[], [2.0], ["1"], [True], "1", None, [float("nan")]])
def test_scores_that_are_none_make_no_trial(broken: Any) -> None:
    assert trial({"plain": broken, "hinted": [1.0]}) is None and trial({"plain": [1.0], "hinted": broken}) is None


# -- samples -----------------------------------------------------------------------------------------------------------------


def test_a_proposals_reward_is_its_regret_whatever_score_it_brings() -> None:
    found = proposal(1, plain=[1, 0, 0, 0], hinted=[1, 1])
    assert found.reward == 0.75 and (found.extras[ROLE], found.extras[BAND]) == ("proposer", "frontier")
    told = {"role": "proposer", "group": 0, "rollout": 1, "plain": [1, 1], "hinted": [1, 1]}
    assert admitted(recipe(), 2, score=9.0, metadata=told).reward == 0.0
    none = proposal(3, valid=False)
    assert none.reward == -1.0 and none.extras[BAND] == "refused"


def test_reports_that_do_not_train_say_why() -> None:
    place = {"group": "0", "rollout": 0}
    assert refused(recipe(), record(), score=1.0, metadata=place) == "needs_role"
    assert refused(recipe(), record(), score=1.0, metadata={"role": "solver"}) == "needs_group"
    assert refused(recipe(), record(), metadata={"role": "solver", **place}) == "needs_score"
    assert refused(recipe(), record(), score=1.0, metadata={"role": "proposer", **place}) == "needs_attempts"
    only = recipe(train_proposer=False)
    assert refused(only, record(), metadata={"role": "proposer", **place, "valid": False}) == "proposer_does_not_train"


def test_roles_never_share_a_group() -> None:
    one, other = proposal(1, plain=[0], hinted=[1]), attempt(2, 1.0, group="0")
    first, second = recipe().group(one), recipe(group_size=2).group(other)
    assert (first.size, second.size) == (4, 2) and first.key != second.key


@pytest.mark.parametrize(
    "wrong", [{"proposals": 1}, {"mastered": 0.2, "out_of_reach": 0.5}, {"mastered": 2.0}, {"policy_lr": 0}]
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        recipe(**wrong)


# -- the step ----------------------------------------------------------------------------------------------------------------


def test_both_roles_learn_in_one_step(toy_model: Path) -> None:
    """What earned more than its group becomes likelier, in either role, and nothing crosses from one group to another."""
    lab = learner(toy_model, recipe().program())
    plain = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    proposals = [replace(proposal(i, plain=plain[i], hinted=[1.0]), id=f"a{i}") for i in range(3)]  # type: ignore[arg-type]
    samples = [*proposals, replace(proposal(3, valid=False), id="a3")]  # type: ignore[arg-type]
    samples += [attempt(4 + i, float(i == 2), answer="xyzw"[i] * 3) for i in range(4)]
    before = [sum(row) for row in lab.score(None, samples)]
    metrics = lab.step(on_policy(lab, samples)).metrics
    assert metrics["published"] is True
    assert metrics["groups"] == 2 and metrics["flat_groups"] == 0 and metrics["proposals"] == 4
    assert metrics["proposer_reward"] == pytest.approx((0.5 + 1.0 + 0.0 - 1.0) / 4) and metrics["solver_reward"] == 0.25
    assert (metrics["frontier_share"], metrics["refused_share"]) == (0.25, 0.25)
    after = [sum(row) for row in scored(lab, samples)]
    assert after[6] - before[6] > max(after[i] - before[i] for i in (4, 5, 7)), "the one right attempt gained most"


def scored(lab: Any, samples: list[Sample]) -> list[list[float]]:
    """Log-probs under the weights in memory."""
    batch = lab._batch(samples)
    found: dict[int, list[float]] = {}
    for micro in batch.micros:
        out = lab._policy.forward(micro).logprob.detach()
        found |= {position: part.tolist() for position, part in micro.split(out).items()}
    return [found[position] for position in range(len(samples))]


def test_a_batch_without_proposals_has_shares_of_nothing() -> None:
    found = played([attempt(1, 1.0)])
    assert found["proposals"] == 0 and found["solver_reward"] == 1.0 and found["frontier_share"] == 0.0


# -- the game ----------------------------------------------------------------------------------------------------------------


def test_sums_are_read_hinted_and_checked() -> None:
    sums = Sums()
    assert sums.task(" 12 + 7") == "12 + 7" and sums.task("03 + 4\n5 + 6") == "3 + 4"
    assert all(sums.task(text) is None for text in ("", "12+7", "123 + 4", "12 + 7 = 19", "a + b"))
    assert "7 + 12 = 19\n12 + 7 =" in sums.solve("12 + 7", hinted=True).prompt
    assert "19" not in sums.solve("12 + 7", hinted=False).prompt
    assert [sums.grade("12 + 7", text) for text in (" 19", "19", "190", "", "1 9")] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert sums.task(sums.dice(random.Random(3))) is not None
    assert all(sums.task(start) == start for start in sums.starts)


def test_copies_are_no_tasks() -> None:
    drawn = [("1 + 2", "r1"), ("1 + 2", "r2"), (None, "r3"), ("9 + 9", "r4")]
    assert _distinct(drawn, ["9 + 9"]) == [("1 + 2", "r1"), (None, "r2"), (None, "r3"), (None, "r4")]


def test_a_game_goes_on_from_its_file_and_shows_the_frontier_first(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tasks.jsonl"
    memory = Memory(path)
    assert memory.generation == 0 and memory.best(0.1, 0.9) == []
    memory.add(0, [Played("1 + 1", Trial((1.0,), (1.0,))), Played("9 + 8", Trial((0.5,), (1.0,))), Played(None, None)])
    memory.add(1, [Played("7 + 7", Trial((0.25,), (1.0,))), Played("9 + 8", Trial((0.75,), (1.0,)))])
    path.write_text(path.read_text() + '{"generation": 2, "task": "1')
    again = Memory(path)
    assert again.generation == 2 and again.best(0.1, 0.9) == ["7 + 7", "9 + 8"]
    again.add(2, [Played("5 + 5", Trial((0.5,), (0.5,)))])
    assert Memory(path).best(0.1, 0.9) == ["7 + 7", "9 + 8", "5 + 5"]
