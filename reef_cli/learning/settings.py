"""What recipes check about their settings, in one shape: the first impossible one is named, with the page that explains it."""

from collections.abc import Collection

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.errors import ConfigError

SURROGATES = ("ppo", "gspo", "decoupled")
"""Kinds of the `off_policy` block that are a loss of their own rather than a weight on another."""


def check(
    settings: object,
    *,
    positive: Collection[str] = (),
    natural: Collection[str] = (),
    shares: Collection[str] = (),
    wrong: Collection[str] = (),
) -> None:
    """Raises `ConfigError` for the first setting that is not above 0 (`positive`), below 0 (`natural`), outside [0, 1]
    (`shares`), or found `wrong` by the recipe itself."""
    found = [name for name in positive if not getattr(settings, name) > 0]
    found += [name for name in natural if not getattr(settings, name) >= 0]
    found += [name for name in shares if not 0 <= getattr(settings, name) <= 1]
    found += wrong
    if found:
        recipe = folder(settings)
        raise ConfigError(
            f"{recipe} cannot work with this {found[0]}: {getattr(settings, found[0])}", hint=f"see recipes/{recipe}/README.md"
        )


def folder(settings: object) -> str:
    """The recipe's folder, from the module its settings are defined in: `grpo` for `recipes.grpo.recipe`."""
    return type(settings).__module__.removeprefix("recipes.").partition(".")[0]


def check_weighted(off: OffPolicy) -> None:
    """Raises `ConfigError` for a kind that cannot weigh a distillation loss."""
    if off.kind in SURROGATES:
        raise ConfigError(
            "a distillation loss has no clipped surrogate", hint="off_policy.kind: tis, dis, icepop, cispo or none"
        )
