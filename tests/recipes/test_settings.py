"""Impossible settings of every recipe are named, with the page that explains them."""

from typing import Any

import pytest

from reef_cli.config.recipes import resolve_recipe
from reef_cli.core.errors import ConfigError

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("sao.recipe:SAORecipe", {"eps_low": 1.5}), ("sao.recipe:SAORecipe", {"gamma": 0.0}),
    ("sao.recipe:SAORecipe", {"critic_only_steps": -1}), ("grpo.recipe:GRPORecipe", {"policy_lr": 0.0}),
    ("sft.recipe:SFTRecipe", {"policy_lr": -1.0}), ("opd.recipe:OPDRecipe", {"gap_clip": 0.0}),
    ("opd.recipe:OPDRecipe", {"loss": "full", "teacher": "recorded"}), ("sdft.recipe:SDFTRecipe", {"alpha": 1.1}),
    ("sdft.recipe:SDFTRecipe", {"top_k": -1}),
    ("sdft.recipe:SDFTRecipe", {"context": "{question} only"}), ("sdpo.recipe:SDPORecipe", {"hybrid": 2.0}),
    ("openclawrl.recipe:OpenClawRLRecipe", {"votes": 0}), ("openclawrl.recipe:OpenClawRLRecipe", {"hint_weight": -1.0}),
    ("tttd.recipe:TTTDRecipe", {"weight_cap": 0.0}), ("guidance_ttt.recipe:GuidanceTTTRecipe", {"kl_coefficient": -0.1}),
    ("sft.recipe:SFTRecipe", {"policy_lr": float("nan")}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "settings"), WRONG, ids=lambda value: str(value))
def test_an_impossible_setting_is_named_with_its_page(path: str, settings: dict[str, Any]) -> None:
    folder, name = path.partition(".")[0], next(iter(settings))
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(f"recipes.{path}").settings_type(**settings)
    assert caught.value.message == f"{folder} cannot work with this {name}: {settings[name]}"
    assert caught.value.hint == f"see recipes/{folder}/README.md"


@pytest.mark.parametrize("path", ["sdft.recipe:SDFTRecipe", "sdpo.recipe:SDPORecipe", "opd.recipe:OPDRecipe"])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "decoupled"])
def test_a_distillation_loss_takes_weights_only(path: str, kind: str) -> None:
    listed = {"loss": "top_k"} if path.startswith("opd") else {}
    with pytest.raises(ConfigError, match="no clipped surrogate"):
        resolve_recipe(f"recipes.{path}").settings_type(off_policy={"kind": kind}, **listed)
