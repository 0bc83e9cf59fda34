"""The routing policy: which releases answer which share of a scenario's traffic. A document, its rules, and pure choices.

A policy is an artifact of kind `routing` with one file, `policy.json`. It names releases, or `head` for whatever the chain's
head is at the time. Choices depend on the policy and the session alone: the same session gets the same release for as long
as the policy stands, and a canary whose share grows keeps the sessions it has. Does not know what is loaded or served.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from reef_cli.core.errors import InvalidRequest, ReleaseNotFound, ReleaseNotServable, StorageError
from reef_cli.core.ids import ReleaseId, release_step
from reef_cli.core.types import Release

FILE = "policy.json"
HEAD = "head"
"""Stands in a policy for the release at the chain's head."""

NO_POLICY = "none"
"""What a caller expects who saw that no policy was ever set."""

_FIELDS = ("pin", "shares", "shadow", "auto")
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Auto:
    """How a canary is judged on live reports: chance of a wrong promotion (and of a wrong return) `alpha`; it goes back when it
    is worse than the others by more than `margin` of the score's range `[low, high]`, to which scores are clipped."""

    alpha: float = 0.05
    margin: float = 0.0
    low: float = 0.0
    high: float = 1.0

    def scaled(self, score: float) -> float:
        """A score as a reward in [0, 1]."""
        return (min(max(score, self.low), self.high) - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Policy:
    """Who answers. Empty: the head. `shares` sum to 1; `shadow` answers `shadow_share` of the traffic once more, unseen."""

    pin: ReleaseId | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    shadow: ReleaseId | None = None
    shadow_share: float = 1.0
    auto: Auto | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        """Who may answer a request, releases before the head."""
        if self.pin is not None:
            return (self.pin,)
        return tuple(sorted(self.shares, key=lambda name: (name == HEAD, name))) or (HEAD,)

    @property
    def canary(self) -> ReleaseId | None:
        """The release that is tried beside the head, when there is exactly one."""
        return ReleaseId(self.arms[0]) if len(self.arms) == 2 and self.arms[1] == HEAD else None

    @property
    def named(self) -> frozenset[ReleaseId]:
        """Every release the policy needs."""
        return frozenset(ReleaseId(name) for name in (*self.arms, self.shadow) if name not in (HEAD, None))

    def choose(self, scenario: str, session: str) -> str:
        """The release that answers a session, or `head`."""
        arms = self.arms
        if len(arms) == 1:
            return arms[0]
        point, edge = _fraction("share", scenario, *(arm for arm in arms if arm != HEAD), session), 0.0
        for arm in arms[:-1]:
            edge += self.shares[arm]
            if point < edge:
                return arm
        return arms[-1]

    def shadows(self, scenario: str, session: str) -> ReleaseId | None:
        """The release that answers this session's requests once more, unseen by the client; None for no one."""
        if self.shadow is None or _fraction("shadow", scenario, self.shadow, session) >= self.shadow_share:
            return None
        return self.shadow

    def wire(self) -> dict[str, Any]:
        """The policy as JSON; `parse` gives it back."""
        auto = None
        if self.auto is not None:
            auto = {"alpha": self.auto.alpha, "margin": self.auto.margin, "low": self.auto.low, "high": self.auto.high}
        shadow = None if self.shadow is None else {"release_id": self.shadow, "share": self.shadow_share}
        shares = dict(sorted(self.shares.items())) or None
        facts = {"pin": self.pin, "shares": shares, "shadow": shadow, "auto": auto}
        return {name: value for name, value in facts.items() if value is not None}

    def text(self) -> bytes:
        """`policy.json`; equal policies have equal bytes."""
        return json.dumps(self.wire(), indent=1, sort_keys=True).encode() + b"\n"


EMPTY = Policy()


def _fraction(*parts: str) -> float:
    """A point in [0, 1) that looks random and is always the same."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / float(1 << 64)


def parse(body: Mapping[str, Any], defaults: Auto | None = None) -> Policy:
    """A policy from JSON; `auto: true` takes `defaults`. `InvalidRequest` says what is wrong, `ReleaseNotFound` names no id."""
    for name in body:
        if name not in _FIELDS:
            raise InvalidRequest(f"unknown field {name[:64]!r}", hint=f"fields are: {', '.join(_FIELDS)}", param=name[:64])
    shares = _shares(body.get("shares"))
    pin = None if body.get("pin") is None else _release(body["pin"], "pin")
    if shares and pin is not None:
        raise InvalidRequest("a routing policy has either shares or a pin")
    shadow, share = _shadow(body.get("shadow"))
    policy = Policy(pin, shares, shadow, share, _auto(body.get("auto"), defaults or Auto()))
    if policy.auto is not None and policy.canary is None:
        raise InvalidRequest("only a canary can be judged", hint='shares of "head" and one release', param="auto")
    return policy


def no_answers(release: Release) -> ReleaseNotServable:
    """Why a policy cannot name a harness."""
    return ReleaseNotServable(
        f"{release.release_id} is a harness, which answers no requests",
        why="a policy says whose answers clients get; which harness works around them is chosen where an agent installs it",
        hint=f"reef harness install --release {release.release_id}; for all agents: reef rollback {release.release_id}",
    )


def read(data: bytes) -> Policy:
    """A stored policy. `StorageError` when it is none."""
    try:
        return parse(orjson.loads(data))
    except (ValueError, ReleaseNotFound, AttributeError) as error:
        raise StorageError("a stored routing policy is unreadable", why=str(error), hint="run `reef release verify`") from error


def _shares(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest("shares must be an object of release: share", param="shares")
    shares = {
        name if name == HEAD else _release(name, "shares"): _number(share, "every share", 0, 1) for name, share in value.items()
    }
    if shares and abs(math.fsum(shares.values()) - 1) > _TOLERANCE:
        raise InvalidRequest("the shares must sum to 1", param="shares")
    return {name: share for name, share in shares.items() if share > 0}


def _shadow(value: Any) -> tuple[ReleaseId | None, float]:
    if value is None:
        return None, 1.0
    if isinstance(value, Mapping):
        if unknown := [name for name in value if name not in ("release_id", "share")]:
            raise InvalidRequest(f"unknown field {unknown[0][:64]!r} in shadow", hint="fields are: release_id, share")
        return _release(value.get("release_id"), "shadow"), _number(value.get("share", 1.0), "the shadow's share", 0, 1)
    return _release(value, "shadow"), 1.0


def _auto(value: Any, defaults: Auto) -> Auto | None:
    if value is None or value is False:
        return None
    if value is True:
        return defaults
    if not isinstance(value, Mapping) or any(name not in ("alpha", "margin", "low", "high") for name in value):
        raise InvalidRequest("auto must be true, false, or an object of alpha, margin, low, high", param="auto")
    auto = Auto(
        _number(value.get("alpha", defaults.alpha), "alpha", 1e-9, 0.5),
        _number(value.get("margin", defaults.margin), "margin", 0, 1),
        _number(value.get("low", defaults.low), "low", -1e9, 1e9),
        _number(value.get("high", defaults.high), "high", -1e9, 1e9),
    )
    if auto.low >= auto.high:
        raise InvalidRequest("low must be below high", param="auto")
    return auto


def _number(value: Any, what: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidRequest(f"{what} must be a number from {least:g} to {most:g}")
    return float(value)


def _release(value: Any, name: str) -> ReleaseId:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must name a release", param=name)
    if release_step(value) is None:
        raise ReleaseNotFound(f"there is no release {value[:64]!r}", hint="list them: reef release list")
    return ReleaseId(value)
