"""A composite names its members, checks their settings like any file's, and leaves everything else to them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipes.composite.recipe import CompositeRecipe, CompositeSettings
from reef_cli.config.load import load
from reef_cli.core.errors import ConfigError, RecipeNotFound
from reef_cli.core.types import Surface
from reef_cli.learning.contract import Combining, members_of
from reef_cli.supervisor.learning import check_recipes
from tests.recipes.kit import record, report

SAO, EVOLVE = "recipes.sao.recipe:SAORecipe", "recipes.harness_evolve.recipe:HarnessEvolveRecipe"
GRPO, SELF = "recipes.grpo.recipe:GRPORecipe", "recipes.composite.recipe:CompositeRecipe"


def composite(*members: Mapping[str, Any], **shared: int) -> CompositeRecipe:
    return CompositeRecipe(CompositeSettings(members=members, **shared))


def test_members_come_weights_first_with_their_own_settings_before_shared_ones() -> None:
    made = composite({"recipe": EVOLVE, "batch_size": 3}, {"recipe": SAO, "policy_lr": 1e-3}, batch_size=7, max_staleness=0)
    weights, harness = members_of(made)
    assert isinstance(made, Combining) and [one.surface for one in (weights, harness)] == [Surface.WEIGHTS, Surface.HARNESS]
    assert (weights.settings.batch_size, harness.settings.batch_size) == (7, 3)
    assert weights.settings.max_staleness == harness.settings.max_staleness == 0, "0 is a value"
    assert weights.settings.gate_every == 8 and getattr(weights.settings, "policy_lr") == 1e-3
    assert members_of(None) == () and members_of(weights) == (weights,)


def test_it_admits_and_trains_as_its_member_for_the_weights() -> None:
    made, one = CompositeRecipe(CompositeSettings()), record()
    told = report(one, score=0.0)
    weights, harness = made.members()
    assert made.admit(told, [one], {"base": 0}) == weights.admit(told, [one], {"base": 0})
    assert made.program() == weights.program() != harness.program()


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ((), "not for nothing"),
        (({"recipe": SAO},), "not for weights"),
        (({"recipe": SAO}, {"recipe": GRPO}), "not for weights, weights"),
        (({"recipe": SAO}, {"batch_size": 3}), r"members\[1\] names no recipe"),
        (({"recipe": SAO, "batch_sise": 3}, {"recipe": EVOLVE}), r"members\[0\]: sao has no setting 'batch_sise'"),
        (({"recipe": SAO, "policy_lr": "fast"}, {"recipe": EVOLVE}), r"members\[0\]: sao refuses its settings"),
        (({"recipe": SAO, "eps_low": 7.0}, {"recipe": EVOLVE}), "eps_low"),
        (({"recipe": SELF}, {"recipe": EVOLVE}), "is a composite itself"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(members: Any, says: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        composite(*members)
    assert re.search(says, f"{wrong.value.message}: {wrong.value.why}")


def test_a_misspelt_setting_gets_a_suggestion_and_an_unknown_recipe_is_not_found() -> None:
    with pytest.raises(ConfigError) as wrong:
        composite({"recipe": SAO, "batch_sise": 3}, {"recipe": EVOLVE})
    assert wrong.value.hint == "did you mean batch_size?"
    with pytest.raises(RecipeNotFound):
        composite({"recipe": "recipes.nowhere.recipe:No"}, {"recipe": EVOLVE})


def test_a_file_with_a_wrong_member_is_refused_whole(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    text = f"reef:\n  recipe: {SELF}\n  members:\n    - {{recipe: '{EVOLVE}'}}\n    - {{recipe: '{SAO}', batch_sise: 4}}\n"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load([], {}, file)
    assert "members[1]: sao has no setting 'batch_sise'" in refused.value.why
    assert refused.value.hint == "did you mean batch_size?"
    file.write_text(text.replace("batch_sise", "batch_size"))
    assert [one.settings.batch_size for one in members_of(load([], {}, file).make_recipe())] == [4, 8]


def test_two_recipes_of_one_surface_are_no_deployment() -> None:
    weights, _ = CompositeRecipe(CompositeSettings()).members()
    with pytest.raises(ConfigError, match="both change the weights"):
        check_recipes([weights, weights])
