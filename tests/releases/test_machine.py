"""A state machine over two service instances on one repository: whatever the order and wherever one dies, the promises hold.

Weights and harness move past each other in it. The invariants of the design it defends: 3 (append-only, compare-and-swap), 6 (a
crash at any write leaves the last good state or the new one; compaction included), 7 (a held candidate changes nothing that is
served), 11 (there is always a way back).
"""

import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reef_cli.core import surfaces
from reef_cli.core.errors import AmbiguousSurface, ConflictError, HeadMoved, NotRestorable
from reef_cli.core.types import Draft, Operation, Release, Surface
from reef_cli.releases import Keep, ReleaseService
from reef_cli.releases.base import upstream_artifact
from reef_cli.releases.collect import kept_of
from reef_cli.releases.routing import EMPTY, HEAD, NO_POLICY, Policy
from tests.releases.conftest import write_safetensors

SIDE = st.integers(0, 1)
CONTENT = st.integers(0, 3)
SURFACE = st.sampled_from(surfaces.EVOLVING)
NOISE = random.Random(0).randbytes(110_000)
WRITES = (
    ("_git", "blobs"),
    ("_git", "tree"),
    ("_git", "commit"),
    ("_git", "move"),
    ("_objects", "stage"),
    ("_objects", "place"),
    ("_objects", "prepare_delta"),
    ("_objects", "swap"),
)


class Died(BaseException):
    """The process ended here."""


def doom(service: ReleaseService, at: int, after: bool) -> None:
    """Let the service die at its write number `at`, before or just after it reaches the disk."""
    left = [at]

    def dying(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and not after:
                raise Died
            done = write(*arguments)
            if left[0] < 0:
                raise Died
            return done

        return wrapper

    for part, name in WRITES:
        setattr(getattr(service, part), name, dying(getattr(getattr(service, part), name)))


class ChainMachine(RuleBasedStateMachine):
    """Publishers with fresh and stale expectations, promotions, rollbacks and collections, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="reef-machine-"))
        self.sides = [ReleaseService(self.home / "home"), ReleaseService(self.home / "home")]
        self.chain: list[str] = []
        self.surface: dict[str, Surface] = {}
        self.held: dict[str, str] = {}
        self.policies: list[tuple[str, Policy]] = []

    @initialize()
    def create(self) -> None:
        self.folders = []
        for index in range(4):
            folder = self.home / f"tree{index}"
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            # Four checkpoints a step apart each, so that compaction has something to do.
            write_safetensors(folder / "model.safetensors", {"w": NOISE[:-8] + bytes(8 - index) + bytes([1]) * index})
            self.folders.append(folder)
        self.bytes = {(folder / "model.safetensors").read_bytes() for folder in self.folders}
        self.trees = [self.home / f"harness{index}" for index in range(4)]
        for index, folder in enumerate(self.trees):
            folder.mkdir()
            (folder / "AGENTS.md").write_text(f"harness {index}")
        release = self.sides[0].create("s", upstream_artifact("http://u", "m"))
        self.chain = [release.release_id]
        for content in range(4):
            self.publish(0, content, Surface.WEIGHTS)

    def draft(self, side: int, content: int, surface: Surface = Surface.WEIGHTS) -> Draft:
        kind, folders = ("checkpoint", self.folders) if surface is Surface.WEIGHTS else ("harness", self.trees)
        artifact = self.sides[side].store(folders[content], kind)
        return Draft(artifact.content_id, kind, surface, Operation.TRAINING, "machine", gated=content == 3)

    def lane(self, surface: Surface) -> list[str]:
        """What stood at a surface's head, newest first; the creation release last."""
        return [name for name in self.chain[:-1] if self.surface[name] is surface] + self.chain[-1:]

    def appended(self, release: Release, surface: Surface) -> None:
        assert release.surface is surface and release.parent_release_id == self.chain[0]
        self.surface[release.release_id] = surface
        self.chain.insert(0, release.release_id)

    @rule(side=SIDE, content=CONTENT, surface=SURFACE)
    def publish(self, side: int, content: int, surface: Surface) -> None:
        release = self.sides[side].publish("s", self.draft(side, content, surface), self.lane(surface)[0])
        self.appended(release, surface)

    @rule(side=SIDE, content=CONTENT, age=st.integers(1, 5), surface=SURFACE)
    def publish_stale(self, side: int, content: int, age: int, surface: Surface) -> None:
        lane = self.lane(surface)
        if age < len(lane):
            try:
                self.sides[side].publish("s", self.draft(side, content, surface), lane[age])
            except HeadMoved as lost:
                assert lost.details["head"] == lane[0]
            else:
                raise AssertionError("a stale publisher won")

    @rule(side=SIDE, content=CONTENT, surface=SURFACE)
    def publish_after_the_other_surface_moved(self, side: int, content: int, surface: Surface) -> None:
        """The other side read the chain before; a move of the other surface in between costs it nothing."""
        stale = self.sides[1 - side]._chains.read("s")
        other = next(name for name in surfaces.EVOLVING if name is not surface)
        self.publish(side, content, other)
        self.appended(self.sides[1 - side]._append(stale, self.draft(1 - side, content, surface)), surface)

    @rule(side=SIDE, content=CONTENT, surface=SURFACE)
    def hold(self, side: int, content: int, surface: Surface) -> None:
        release = self.sides[side].hold("s", self.draft(side, content, surface), None)
        self.held[release.release_id] = release.content_id
        self.surface[release.release_id] = surface

    @rule(side=SIDE, data=st.data())
    def promote(self, side: int, data: st.DataObject) -> None:
        if self.held:
            chosen = data.draw(st.sampled_from(list(self.held)))  # in order of age: ids are random
            release = self.sides[side].promote("s", chosen, self.lane(self.surface[chosen])[0])
            assert release.content_id == self.held.pop(chosen)
            self.appended(release, self.surface[chosen])

    @rule(side=SIDE, data=st.data(), surface=SURFACE)
    def rollback(self, side: int, data: st.DataObject, surface: Surface) -> None:
        target = data.draw(st.one_of(st.none(), st.sampled_from(self.lane(surface))))
        try:
            release = self.sides[side].rollback("s", target, surface=surface)
        except (ConflictError, NotRestorable):
            assert target is None or not self.sides[side].get("s", target).restorable
        else:
            self.appended(release, surface)

    @rule(side=SIDE, named=st.booleans())
    def rollback_without_a_surface(self, side: int, named: bool) -> None:
        target = self.chain[-1] if named else None
        own = surfaces.moved(self.sides[side].list("s"))
        try:
            release = self.sides[side].rollback("s", target)
        except AmbiguousSurface as refused:
            assert len(own) == 2
            assert refused.details["heads"] == {str(surface): self.lane(surface)[0] for surface in own}
        except ConflictError:
            assert len(own) == 1
        else:
            assert len(own) == 1
            self.appended(release, own[0])

    @rule(side=SIDE, latest=st.one_of(st.none(), st.integers(1, 2)), gated=st.booleans(), dry=st.booleans())
    def collect(self, side: int, latest: int | None, gated: bool, dry: bool) -> None:
        service = self.sides[side]
        keep = Keep(latest, gated, grace_s=0.0)
        wanted = kept_of(service._chains.read("s"), keep)
        before = {release.release_id for release in service.list("s") if release.restorable}
        report = service.gc(dry_run=dry, keep=keep)
        after = {release.release_id for release in service.list("s") if release.restorable}
        assert all(r.restorable for r in service.list("s") if r.content_id in wanted and r.release_id in before)
        assert after == before if dry else {identifier for _, identifier in report.releases} == before - after

    @rule(side=SIDE)
    def compact(self, side: int) -> None:
        before = {release.release_id for release in self.sides[side].list("s") if release.restorable}
        self.sides[side].compact(idle_s=0.0)
        assert {release.release_id for release in self.sides[side].list("s") if release.restorable} == before

    @rule(side=SIDE, arm=st.integers(0, 20), shape=st.sampled_from(("pin", "canary", "shadow", "clear")))
    def route(self, side: int, arm: int, shape: str) -> None:
        policy = self.policy(arm, shape)
        gone = not all(self.sides[side].get("s", name).restorable for name in policy.named)
        try:
            release = self.sides[side].route("s", policy, self.policies[0][0] if self.policies else NO_POLICY)
        except NotRestorable:
            assert gone
        else:
            assert not gone
            self.policies.insert(0, (release.release_id, policy))

    def policy(self, arm: int, shape: str) -> Policy:
        names = [name for name in (*self.chain, *self.held) if self.surface.get(name) is not Surface.HARNESS]
        name = names[arm % len(names)]
        made = {"pin": Policy(pin=name), "canary": Policy(shares={HEAD: 0.5, name: 0.5}), "shadow": Policy(shadow=name)}  # type: ignore[arg-type]
        return made.get(shape, EMPTY)

    @rule(side=SIDE, age=st.integers(1, 3))
    def route_stale(self, side: int, age: int) -> None:
        seen = [name for name, _ in self.policies] + [NO_POLICY]
        if age < len(seen):
            try:
                self.sides[side].route("s", EMPTY, seen[age])
            except HeadMoved as lost:
                assert lost.details["head"] == self.policies[0][0]
            else:
                raise AssertionError("a stale policy won")

    @rule(
        side=SIDE,
        at=st.integers(0, 9),
        after=st.booleans(),
        content=CONTENT,
        surface=SURFACE,
        act=st.sampled_from(("publish", "hold", "promote", "rollback", "route", "compact")),
    )
    def die(self, side: int, at: int, after: bool, content: int, surface: Surface, act: str) -> None:
        """One side dies somewhere in an action and starts anew; what it did is there wholly or not at all."""
        doom(self.sides[side], at, after)
        with suppress(Died, ConflictError):
            self.act(side, act, content, surface)
        self.sides[side] = ReleaseService(self.home / "home")
        listed = self.sides[side].list("s")
        fresh = [release.release_id for release in listed if not release.pending]
        assert fresh in (self.chain, [fresh[0], *self.chain])
        self.surface |= {release.release_id: release.surface for release in listed}
        assert {name: content for name, content in self.held.items() if name not in self.pending(listed)}.keys() <= {
            release.source_release_id for release in listed[:5] if release.operation is Operation.PROMOTE
        }
        self.chain = fresh
        self.held = {release.release_id: release.content_id for release in listed if release.pending}
        policies = [release.release_id for release in self.sides[side].list("s", Surface.ROUTING)]
        known = dict(self.policies)
        assert policies[-len(known) :] == list(known) if known else len(policies) <= 1
        self.policies = [
            (n, known[n] if n in known else self.sides[side].policy(self.sides[side].get("s", n))) for n in policies
        ]

    def act(self, side: int, act: str, content: int, surface: Surface) -> None:
        service = self.sides[side]
        if act in ("publish", "hold"):
            getattr(service, act)("s", self.draft(side, content, surface), None)
        elif act == "promote" and self.held:
            service.promote("s", next(iter(self.held)))
        elif act == "rollback":
            service.rollback("s", surface=surface)
        elif act == "compact":
            service.compact(idle_s=0.0)
        elif act == "route":
            service.route("s", self.policy(content, "canary"))

    @staticmethod
    def pending(listed: list[Any]) -> set[str]:
        return {release.release_id for release in listed if release.pending}

    @invariant()
    def policies_move_beside_the_chain_and_keep_what_they_name(self) -> None:
        for service in self.sides if self.chain else ():
            assert [release.release_id for release in service.list("s", Surface.ROUTING)] == [name for name, _ in self.policies]
            head = service.head("s", Surface.ROUTING)
            assert service.policy(head) == (self.policies[0][1] if self.policies else EMPTY)
            assert all(service.standing("s", name).restorable for name in service.policy(head).named)

    @invariant()
    def there_is_always_a_way_back(self) -> None:
        if self.chain:
            for surface in surfaces.EVOLVING:
                lane = surfaces.lane(self.sides[0].list("s"), surface)
                target = surfaces.previous_content(lane)
                assert (target is None) == (len({release.content_id for release in lane}) == 1)
                assert target is None or target.restorable

    @invariant()
    def both_sides_tell_the_same_append_only_story(self) -> None:
        if self.chain:
            for service in self.sides:
                listed = service.list("s")
                assert [release.release_id for release in listed if not release.pending] == self.chain
                assert {release.release_id for release in listed if release.pending} == set(self.held)
                assert [release.step for release in listed if not release.pending] == list(range(len(self.chain)))[::-1]
                tip = service.tip("s")
                assert tip is not None and tip.release_id == self.chain[0]
                for surface in surfaces.EVOLVING:
                    head = service.head("s", surface)
                    assert head is not None and head.release_id == self.lane(surface)[0] and head.restorable

    def teardown(self) -> None:
        problems = self.sides[0].verify("s") if self.chain else []
        for release in self.sides[0].list("s") if self.chain else ():
            restorable = release.restorable and release.kind == "checkpoint"
            folder = self.sides[0].directory(release.content_id) if restorable else None
            assert folder is None or any((folder / "model.safetensors").read_bytes() == known for known in self.bytes)
        shutil.rmtree(self.home)
        assert {problem.kind for problem in problems} <= {"dropped"}


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(
    max_examples=8, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
