"""Composite: one recipe for the weights and one for the harness of the same scenario, each over the same experience.

This half names the members and checks their settings; a deployment drives each by itself, with a cursor, a queue, a cadence and
a head of its own. What one surface may learn while the other moves is the coupling rule (`reef_cli.learning.coupling`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from reef_cli.config.recipes import make_recipe
from reef_cli.core.errors import ConfigError
from reef_cli.core.types import Cadence, Inference, Report, Sample, Surface
from reef_cli.learning.contract import Acquisition, ProgramSpec, Recipe, RecipeSettings, Refusal, Signal, Target

OWN = -1
"""Stands in a setting of every recipe for: what each member says."""

PASSED_ON = ("batch_size", "max_staleness", "gate_every")


@dataclass(frozen=True, slots=True)
class CompositeSettings(RecipeSettings):
    """Settings of a composite. Those of its members stand in `members`, each beside its `recipe`."""

    batch_size: int = OWN
    """Given to members that name none; -1: each its own default."""

    max_staleness: int = OWN
    """Given to members that name none; -1: each its own default."""

    gate_every: int = OWN
    """Given to members that name none; -1: each its own default."""

    members: Sequence[Mapping[str, Any]] = (
        {"recipe": "recipes.sao.recipe:SAORecipe"},
        {"recipe": "recipes.harness_evolve.recipe:HarnessEvolveRecipe"},
    )
    """The recipes, each `{recipe: module:Class, ...its settings}`: one for the weights, one for the harness."""

    def __post_init__(self) -> None:
        made_of(self)


def made_of(settings: CompositeSettings) -> list[Recipe]:
    """The members with their settings, the one for the weights first. Raises `ConfigError`, `RecipeNotFound`."""
    shared = {name: value for name in PASSED_ON if (value := getattr(settings, name)) != OWN}
    found = [_member(member, shared, f"reef.members[{index}]") for index, member in enumerate(settings.members)]
    evolved = [recipe.surface for recipe in found]
    if sorted(evolved) != sorted((Surface.WEIGHTS, Surface.HARNESS)):
        raise ConfigError(
            f"a composite has a recipe for the weights and one for the harness, not for {', '.join(evolved) or 'nothing'}",
            why="a surface has one head, and one recipe moves it",
            hint="for one surface alone name its recipe in reef.recipe",
        )
    return sorted(found, key=lambda recipe: recipe.surface is not Surface.WEIGHTS)


def _member(member: Mapping[str, Any], shared: Mapping[str, Any], place: str) -> Recipe:
    path = member.get("recipe")
    if not isinstance(path, str):
        raise ConfigError(f"{place} names no recipe", hint="recipe: module:Class beside its settings; see: reef recipe list")
    given = {name: value for name, value in member.items() if name != "recipe"}
    made: Recipe = make_recipe(path, {**shared, **given}, place)
    if hasattr(made, "members"):
        raise ConfigError(f"{place}: {made.name} is a composite itself", hint="name its members here")
    return made


class CompositeRecipe:
    """A recipe for the weights and a recipe for the harness, side by side over one stream of experience."""

    name: ClassVar[str] = "composite"
    title: ClassVar[str] = "A recipe for the weights and one for the harness of a scenario, each by its own cadence"
    surface: ClassVar[Surface] = Surface.WEIGHTS
    cadence: ClassVar[Cadence] = Cadence.ROLLING
    settings_type: ClassVar[type[RecipeSettings]] = CompositeSettings
    signal: ClassVar[Signal] = Signal("as its members", "their sources")
    acquisition: ClassVar[Acquisition] = Acquisition.REACTIVE
    target: ClassVar[Target] = Target.BOTH

    def __init__(self, settings: CompositeSettings) -> None:
        self.settings = settings
        self._members = made_of(settings)

    def members(self) -> Sequence[Recipe]:
        """The recipe for the weights, then the one for the harness."""
        return self._members

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """What the first member makes of a report; a deployment asks each of them itself."""
        return self._members[0].admit(report, records, step_of)

    def program(self) -> ProgramSpec:
        """The trainer half of the member for the weights."""
        return self._members[0].program()
