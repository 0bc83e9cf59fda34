"""What the demo can show: per recipe its example folder, how long it learns, and how the scripted user reacts to answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reef_cli.core.errors import RecipeNotFound


@dataclass(frozen=True, slots=True)
class Preference:
    """What a user says after an answer who never reports: `thanks` when it was liked, `request` when it was not."""

    thanks: str
    request: str

    def reply(self, score: float) -> str:
        return self.thanks if score >= 1.0 else self.request


@dataclass(frozen=True, slots=True)
class Scene:
    """One demonstration. The example folder of `recipe` has `demo.yaml` and `suite.jsonl`.

    `steps` batches are learned from. The curve is the steps' mean reward, from `lowest` to 1, under the name `curve`.
    """

    recipe: str
    steps: int
    max_tokens: int
    temperature: float = 1.0
    says: Preference | None = None
    curve: str = "reward"
    lowest: float = 0.0

    @property
    def folder(self) -> Path:
        return example_folder(self.recipe)

    def share(self, reward: float) -> float:
        """A step's mean reward as a share of what is possible."""
        return (reward - self.lowest) / (1.0 - self.lowest)


SCENES: Mapping[str, Scene] = {
    "sao": Scene("sao", steps=12, max_tokens=24),
    "openclawrl": Scene(
        "openclawrl",
        steps=9,
        max_tokens=40,
        says=Preference("Thanks, that is just what I wanted.", "Please answer in one short sentence."),
        curve="acceptance",
        lowest=-1.0,
    ),
}
"""SmolLM2-135M-Instruct is clearly better after these steps (`recipes/<name>/README.md`)."""


def scene(recipe: str) -> Scene:
    """Raises `RecipeNotFound` for one that has no demonstration."""
    if recipe not in SCENES:
        raise RecipeNotFound(f"There is no demonstration of {recipe!r}.", hint=f"reef demo --recipe {' or '.join(SCENES)}")
    return SCENES[recipe]


def example_folder(recipe: str = "sao") -> Path:
    """A recipe's example, in a checkout and in an installed wheel alike."""
    import recipes

    for root in recipes.__path__:
        folder = Path(root) / recipe / "examples" / recipe
        if (folder / "demo.yaml").is_file():
            return folder
    raise RecipeNotFound(f"The example of {recipe} is missing.", hint="Reinstall Reef.")
