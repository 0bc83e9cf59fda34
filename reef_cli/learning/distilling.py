"""What the server half of recipes that distil checks about their settings; the step itself is `trainer.distilling`."""

from collections.abc import Mapping
from typing import Any, Protocol

from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.errors import ConfigError


class Distillation(Protocol):
    """The settings these recipes share."""

    @property
    def policy_lr(self) -> float: ...

    @property
    def teacher_rate(self) -> float: ...

    @property
    def alpha(self) -> float: ...

    @property
    def top_k(self) -> int: ...

    @property
    def off_policy(self) -> Mapping[str, Any]: ...


def check_distillation(settings: Distillation, recipe: str) -> None:
    """Raises `ConfigError` for settings no distillation step can be made with."""
    wrong = [name for name in ("teacher_rate", "alpha") if not 0 <= getattr(settings, name) <= 1]
    wrong += [name for name, bad in (("policy_lr", not settings.policy_lr > 0), ("top_k", settings.top_k < 0)) if bad]
    if wrong:
        raise ConfigError(
            f"{recipe} cannot work with this {wrong[0]}: {getattr(settings, wrong[0])}", hint=f"see recipes/{recipe}/README.md"
        )
    if OffPolicy.of(settings.off_policy, kind="tis").kind in ("ppo", "gspo", "decoupled"):
        raise ConfigError(
            "a distillation loss has no clipped surrogate", hint="off_policy.kind: tis, dis, icepop, cispo or none"
        )
