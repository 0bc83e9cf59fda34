"""The block `off_policy`: how a weights recipe treats the distance between the policy that sampled and the one that learns.

One block for all of them, as a mapping in `reef:` (`off_policy: {kind: tis, high: 2.0}`); the recipe checks it in the server
and hands it to its program as it is. What the kinds compute is in `reef_cli.trainer.losses.policy`.

| kind | what happens to the ratio r = p now / p sampled | low | high |
|---|---|---|---|
| `dis` | outside (low, high) the token does not train (direct double-sided importance sampling) | 0.7 | 6.0 |
| `icepop` | outside [low, high] the token does not train (masked importance sampling) | 0.5 | 2.0 |
| `tis` | cut at high (truncated importance sampling); low is off unless given | | 2.0 |
| `cispo` | clipped to [low, high]; every token keeps a gradient; low is off unless given | | 6.0 |
| `ppo` | the clipped surrogate; `dual_clip` bounds what a bad token may cost | 0.8 | 1.28 |
| `decoupled` | the clip is around the policy at the start of the step, staleness is weighted | 0.8 | 1.2 |
| `gspo` | one ratio per answer, the geometric mean of its tokens', in the clipped surrogate | 0.9997 | 1.0004 |
| `none` | r itself: unbiased, for batches of exactly one version | | |
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from reef_cli.core.errors import ConfigError

BOUNDS: Mapping[str, tuple[float | None, float | None]] = {
    "dis": (0.7, 6.0),
    "icepop": (0.5, 2.0),
    "tis": (None, 2.0),
    "cispo": (None, 6.0),
    "ppo": (0.8, 1.28),
    "decoupled": (0.8, 1.2),
    "gspo": (1 - 3e-4, 1 + 4e-4),
    "none": (None, None),
}
"""Default bounds of the ratio, by kind."""


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """The block's values. Bounds are of the ratio itself; None takes the kind's own."""

    kind: str = "dis"
    low: float | None = None
    high: float | None = None
    dual_clip: float | None = None
    """`ppo` only: a token with a negative advantage costs at most this many times |A|."""

    min_ess: float = 0.3
    """Smallest effective sample size, as a share of the tokens, for which the policy is updated."""

    max_masked: float = 0.5
    """Largest share of tokens without a gradient because of their ratio for which the policy is updated."""

    def __post_init__(self) -> None:
        if self.kind not in BOUNDS:
            raise _wrong("kind", self.kind, f"one of {', '.join(BOUNDS)}")
        low, high = self.bounds
        if low is not None and not 0 <= low < 1:
            raise _wrong("low", low, "at least 0 and below 1")
        if high is not None and not high > 1:
            raise _wrong("high", high, "above 1")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise _wrong("dual_clip", self.dual_clip, "above 1")
        for name in ("min_ess", "max_masked"):
            if getattr(self, name) < 0:
                raise _wrong(name, getattr(self, name), "at least 0")

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """`(low, high)`, with the kind's defaults filled in."""
        low, high = BOUNDS[self.kind]
        return (low if self.low is None else self.low), (high if self.high is None else self.high)

    @classmethod
    def of(cls, block: Mapping[str, Any], **defaults: Any) -> "OffPolicy":
        """The block over a recipe's own defaults. Raises `ConfigError` for unknown keys and impossible values."""
        known = [field.name for field in fields(cls)]
        for key in block:
            if key not in known:
                close = get_close_matches(str(key), known, 1)
                hint = f"did you mean {close[0]}?" if close else f"keys: {', '.join(known)}"
                raise ConfigError(f"off_policy has no key {key!r}", hint=hint)
        return cls(**{**_fitted(defaults), **_fitted(block)})


def _fitted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as floats; anything that is no number, text for `kind` excepted, is named."""
    for key, value in values.items():
        if key != "kind" and value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise _wrong(key, value, "a number")
    return {key: value if key == "kind" or value is None else float(value) for key, value in values.items()}


def _wrong(key: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"off_policy.{key} must be {wanted}, not {value!r}", hint="see docs/recipes.md")
