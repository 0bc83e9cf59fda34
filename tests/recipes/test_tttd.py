"""TTT-Discover: admission into grids, its worked numbers, a whole step against an oracle, and what calls a step off."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import recipes.guidance_ttt.recipe as guidance
import recipes.tttd.recipe as tttd
from recipes.guidance_ttt.recipe import GuidanceTTTRecipe, GuidanceTTTSettings
from recipes.tttd.recipe import TTTDRecipe, TTTDSettings
from reef_cli.config.load import load
from reef_cli.core.errors import ConfigError
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Extras, Inference, Report, Sample
from reef_cli.learning.contract import Group, Grouping, Refusal
from reef_cli.learning.grid import GridRecipe
from reef_cli.trainer.entropic import EntropicProgram, ProgramSettings, advantages
from reef_cli.trainer.learner import Learner
from reef_cli.trainer.process import join_alone
from tests.recipes.test_sao_recipe import STEPS, TRACE
from tests.trainer.conftest import TOY, sample, toy_model

__all__ = ["toy_model"]

SETTINGS = ProgramSettings(1e-2, 0.1, math.log(2), None, None, 0.0)
PLACE = {"run": "p-1", "step": 3, "group": 1, "rollout": 2}


def record(name: str = "r1") -> Inference:
    return Inference(RecordId(name), "s", 1.0, "completions", "m", b"{}", (), None, tokens=TRACE)


def admit(metadata: dict[str, Any], score: float | None = 2.5, **settings: Any) -> Sample | Refusal:
    report = Report(RecordId("p1"), "s", 2.0, (RecordId("r1"),), score, metadata=metadata)
    return TTTDRecipe(TTTDSettings(batch_size=8, group_size=4, **settings)).admit(report, [record()], STEPS)


def test_a_try_knows_its_place_and_a_step_is_one_group() -> None:
    made = admit(PLACE)
    assert isinstance(made, Sample)
    recipe = TTTDRecipe(TTTDSettings(batch_size=8, group_size=4))
    assert isinstance(recipe, Grouping) and recipe.group(made) == Group("p-1/3", 8, "p-1/3/1/2")
    assert made.extras[Extras.GROUP] == "p-1/3/1" and recipe.settings.max_staleness == 0 and recipe.groups == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": None}, "needs_step_group_rollout"),
        ({"group": "1"}, "needs_step_group_rollout"),
        ({"rollout": True}, "needs_step_group_rollout"),
        ({"group": 2}, "outside_the_grid"),
        ({"rollout": 4}, "outside_the_grid"),
        ({"step": -1}, "outside_the_grid"),
    ],
)
def test_reports_without_a_place_are_refused(change: dict[str, Any], reason: str) -> None:
    assert admit({**PLACE, **change}) == Refusal(reason)


def test_reports_without_a_score_are_refused() -> None:
    assert admit(PLACE, score=None) == Refusal("needs_score")
    assert admit(PLACE, score=math.nan) == Refusal("score_not_finite")


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_size": 2}, {"group_size": 1}, {"group_size": 3, "batch_size": 8}, {"lr": 0.0}, {"kl_coefficient": -0.1},
        {"divergence": 0.0}, {"beta": 0.0}, {"weight_cap": -1.0},
    ],
)  # fmt: skip
def test_impossible_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TTTDSettings(**{"batch_size": 8, "group_size": 4, **wrong})


def test_groups_of_two_need_a_cap() -> None:
    assert TTTDSettings(batch_size=4, group_size=2, weight_cap=20.0).weight_cap == 20.0


@pytest.mark.parametrize(("module", "recipe"), [(tttd, TTTDRecipe), (guidance, GuidanceTTTRecipe)])
def test_every_setting_is_documented_and_the_examples_load(module: ModuleType, recipe: type[GridRecipe]) -> None:
    folder = Path(str(module.__file__)).parent
    readme = (folder / "README.md").read_text()
    names = [field.name for field in fields(recipe.settings_type)]
    assert not [name for name in names if f"`{name}`" not in readme and name != "gate_every"]
    for name in ("serve", "sglang"):
        assert load([], {}, folder / "examples" / folder.name / f"{name}.yaml").recipe is recipe


def test_a_guide_learns_as_tttd_does_on_smaller_grids() -> None:
    guide = GuidanceTTTRecipe(GuidanceTTTSettings())
    assert guide.groups == 8 and guide.settings.batch_size == 128 and guide.settings.max_staleness == 0
    assert guide.program().path == TTTDRecipe(TTTDSettings()).program().path


# -- advantages ------------------------------------------------------------------------------------------------------------


def group(key: str, *rewards: float) -> list[Sample]:
    return [replace(sample(i, reward), extras={Extras.GROUP: key}) for i, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0, 0, 1, 2), (-0.905288, -0.905288, -0.450166, 9.882502)),
        ((0, 1, 2, 3), (-0.969633, -0.866698, -0.338701, 8.865418)),
        ((0, 0, 0, 1), (-0.797963, -0.797963, -0.797963, 11.848729)),
        ((0, 0, 1), (-0.890454, -0.890454, 16.257185)),
        ((0, 0, 1, 1), (-1, -1, 2, 2)),
        ((0, 1, 1), (-1, 1, 1)),
        ((1, 1, 1, 0), (0.5, 0.5, 0.5, -1)),
        ((0, 2.5414, 2.6, 2.6358), (-1, -0.885019, -0.078435, 7.033)),
        ((2.635983080, 2.635983083, 2.635983084, 2.6359), (0.494505, 0.501570, 0.503935, -1)),
    ],
)
def test_worked_groups(rewards: Sequence[float], expected: Sequence[float]) -> None:
    grid = advantages(group("a", *rewards), SETTINGS)
    assert grid.advantages == pytest.approx(expected, abs=1e-4) and all(grid.trains)


def test_a_fixed_beta_replaces_the_adaptive_one() -> None:
    grid = advantages(group("a", 0, 1, 2, 3), replace(SETTINGS, beta=2.0))
    assert grid.advantages == pytest.approx((-0.993554, -0.951708, -0.602265, 18.214797), abs=1e-4) and grid.betas == [2.0]


def test_groups_are_compared_inside_only_and_constant_ones_do_not_train() -> None:
    mixed = [*group("a", 0, 0, 1, 2), *group("b", 1, 1, 1, 1), *group("c", 1000, 1001, 1002, 1003)]
    order = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    grid = advantages([mixed[i] for i in order], SETTINGS)
    back = [grid.advantages[order.index(i)] for i in range(12)]
    assert back[:4] == pytest.approx((-0.905288, -0.905288, -0.450166, 9.882502), abs=1e-4)
    assert back[4:8] == [0] * 4 and [grid.trains[order.index(i)] for i in range(4, 8)] == [False] * 4
    assert back[8:] == pytest.approx((-0.969633, -0.866698, -0.338701, 8.865418), abs=1e-4)
    assert grid.constant == 1 and len(grid.betas) == 2


# -- a step ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    join_alone(threads=1)


def learner(model: Path, **changes: Any) -> Learner:
    settings = {field.name: getattr(SETTINGS, field.name) for field in fields(SETTINGS)} | changes
    return Learner(model, "reef_cli.trainer.entropic:EntropicProgram", settings, replace(TOY, precision="fp32"))


def grid_samples() -> list[Sample]:
    rewards = {"a": (0.0, 0.0, 1.0, 2.0), "b": (1.0, 1.0, 1.0, 1.0)}
    lengths = (3, 5, 4, 2)
    made = []
    for key, values in rewards.items():
        for i, reward in enumerate(values):
            one = sample(len(made), reward, length=lengths[i], mask=(1, 0, *(1,) * (lengths[i] - 2)))
            made.append(replace(one, extras={Extras.GROUP: key}))
    return made


def test_a_whole_step_equals_the_oracle(toy_model: Path) -> None:
    """The adapter is fresh, so policy and base are one: r = p / p sampled and d = log p sampled - log p, token by token."""
    lab = learner(toy_model)
    samples = grid_samples()
    now = lab.score(None, samples)
    shift = (0.3, -0.2, 0.5, 0.0, -0.4)
    stale = []
    for item, row in zip(samples, now, strict=True):
        values = iter(row)
        logprobs = tuple(next(values) - shift[k] if m else 0.0 for k, m in enumerate(item.tokens.loss_mask))
        stale.append(replace(item, tokens=replace(item.tokens, logprobs=logprobs)))
    trained = [i for i, item in enumerate(stale) if item.extras[Extras.GROUP] == "a"]
    gaps = {
        (i, k): stale[i].tokens.logprobs[k] - (stale[i].tokens.logprobs[k] + shift[k])
        for i in trained
        for k, m in enumerate(stale[i].tokens.loss_mask)
        if m
    }
    middle = sum(gaps.values()) / len(gaps)
    own = dict(zip(trained, (-0.905288, -0.905288, -0.450166, 9.882502), strict=True))
    total = -sum(math.exp(shift[k]) * (own[i] + 0.1 * (middle - gap)) for (i, k), gap in gaps.items())
    metrics = lab.step(stale).metrics
    assert metrics["policy_loss"] == pytest.approx(total, rel=1e-4)
    assert metrics["gap_to_base"] == pytest.approx(middle, abs=1e-5)
    assert (metrics["groups"], metrics["constant_groups"]) == (2, 1) and metrics["beta_mean"] == pytest.approx(
        1.621566, abs=1e-4
    )
    assert metrics["published"] is True


def test_the_worked_loss_is_a_sum_and_not_clipped() -> None:
    """L = -sum r A with lp [-1, -2, -.5], sampler [-1.1, -1.9, -.5], A = 2."""
    import torch

    from reef_cli.trainer.losses.importance import ratio

    now, sampled = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.9, -0.5])
    assert float(-(ratio(now, sampled) * 2).sum()) == pytest.approx(-6.020017, abs=1e-5)


def test_a_step_makes_the_winner_likelier(toy_model: Path) -> None:
    lab = learner(toy_model, kl_coefficient=0.0)
    samples = grid_samples()
    before = lab.score(None, samples)
    fresh = []
    for item, row in zip(samples, before, strict=True):
        values = iter(row)
        logprobs = tuple(next(values) if m else 0.0 for m in item.tokens.loss_mask)
        fresh.append(replace(item, tokens=replace(item.tokens, logprobs=logprobs)))
    lab.ensure(None, None)
    report = lab.step(fresh)
    assert report.policy_updated and report.metrics["gap_to_base"] is None and report.metrics["logprob_gap_lag0"] < 1e-4
    policy = lab.policy
    assert policy is not None
    from reef_cli.trainer import batching

    (micro,) = batching.build([fresh[3]], 1).micros
    assert float(policy.score(micro).logprob.sum()) > sum(before[3])


def test_a_grid_of_equal_rewards_changes_nothing(toy_model: Path) -> None:
    lab = learner(toy_model)
    same = [replace(item, reward=2.0) for item in grid_samples()]
    report = lab.step(same)
    assert not report.policy_updated and report.metrics["skipped"] == "constant_rewards"


def test_the_program_takes_exactly_the_settings_the_recipe_hands_over() -> None:
    spec = TTTDRecipe(TTTDSettings(lr=1e-3)).program()
    program = EntropicProgram(spec.settings)
    assert program.optimizer.lr == 1e-3 and program.optimizer.clip == 0.0
