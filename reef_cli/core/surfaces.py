"""One head per surface in one chain: which releases stood at a surface's head, and which surface a move without a name means.

A chain is one append-only sequence, so every release has its place in time; each moves the head of the surface it names and no
other. Every surface starts at the creation release: the base model, with nothing around it. Pure; chains come newest first.
"""

from collections.abc import Iterable, Iterator, Sequence

from reef_cli.core.errors import AmbiguousSurface, InvalidRequest
from reef_cli.core.types import Operation, Release, Surface

EVOLVING = (Surface.WEIGHTS, Surface.HARNESS)
"""The surfaces that share a scenario's main chain. Routing policies have a chain of their own: a policy replaces nobody."""


def lane(chain: Sequence[Release], surface: Surface) -> list[Release]:
    """The releases that stood at a surface's head, newest first, the creation release last. Held ones are left out."""
    return list(_lane(chain, surface))


def _lane(chain: Iterable[Release], surface: Surface) -> Iterator[Release]:
    return (r for r in chain if not r.pending and (r.surface is surface or r.operation is Operation.CREATION))


def head(chain: Sequence[Release], surface: Surface) -> Release | None:
    """The release at a surface's head; the creation release before the surface has one of its own, None without a chain."""
    return next(_lane(chain, surface), None)


def moved(chain: Sequence[Release]) -> list[Surface]:
    """The surfaces that have releases of their own; weights alone for a chain of nothing but its creation."""
    own = {release.surface for release in chain if not release.pending and release.operation is not Operation.CREATION}
    return [surface for surface in EVOLVING if surface in own] or [Surface.WEIGHTS]


def heads(chain: Sequence[Release]) -> dict[Surface, Release]:
    """The heads of a chain: of weights always, of the harness once there is one."""
    wanted = dict.fromkeys((Surface.WEIGHTS, *moved(chain)))
    return {surface: found for surface in wanted if (found := head(chain, surface)) is not None}


def previous_content(chain: Sequence[Release]) -> Release | None:
    """Where a rollback goes by default: the nearest earlier release of a lane whose content differs from its head's."""
    return next((release for release in chain[1:] if release.content_id != chain[0].content_id), None)


def meant(
    chain: Sequence[Release], surface: Surface | None = None, target: Release | None = None, expected: str | None = None
) -> Surface:
    """The surface a rollback moves: the one named, else its target's, else that of the head expected, else the only one.

    `AmbiguousSurface` when that leaves several, `InvalidRequest` for a name that does not go with the target.
    """
    own = None if target is None or target.operation is Operation.CREATION else target.surface
    if surface is not None:
        if surface not in EVOLVING:
            raise InvalidRequest(f"the surface {surface} has a chain of its own", hint="see: reef route log", param="surface")
        if target is not None and own not in (None, surface):
            raise InvalidRequest(
                f"{target.release_id} is a release of the surface {own}, not of {surface}", hint="leave the surface out"
            )
        return surface
    seen = next((release for release in chain if release.release_id == expected), None)
    if own is None and seen is not None and seen.operation is not Operation.CREATION:
        own = seen.surface
    choice = [own] if own is not None else moved(chain)
    if len(choice) > 1:
        ends = {name: release.release_id for name, release in heads(chain).items()}
        raise AmbiguousSurface(
            "this chain has releases of weights and of a harness; say which of them is meant",
            why=", ".join(f"{name} is at {ends[name]}" for name in choice),
            hint="name the surface: --surface weights, or --surface harness",
            heads={str(name): ends[name] for name in choice},
        )
    return choice[0]
