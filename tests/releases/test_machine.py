"""A state machine over two service instances on one repository: whatever the order and wherever one dies, the promises hold.

The invariants of the design it defends: 3 (append-only, compare-and-swap), 6 (a crash at any write leaves the last good state
or the new one; compaction included), 7 (a held candidate changes nothing that is served), 11 (there is always a way back).
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

from reef_cli.core.errors import ConflictError, HeadMoved, NotRestorable
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases import Keep, ReleaseService
from reef_cli.releases.collect import kept_of, previous_content
from reef_cli.releases.routing import EMPTY, HEAD, NO_POLICY, Policy
from tests.releases.conftest import write_safetensors

SIDE = st.integers(0, 1)
CONTENT = st.integers(0, 3)
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
        release = self.sides[0].create("s", self.sides[0].store(self.folders[0], "checkpoint"))
        self.chain = [release.release_id]
        for content in (1, 2, 3):
            self.publish(0, content)

    def draft(self, side: int, content: int) -> Draft:
        artifact = self.sides[side].store(self.folders[content], "checkpoint")
        return Draft(artifact.content_id, "checkpoint", Surface.WEIGHTS, Operation.TRAINING, "machine", gated=content == 3)

    @rule(side=SIDE, content=CONTENT)
    def publish(self, side: int, content: int) -> None:
        release = self.sides[side].publish("s", self.draft(side, content), self.chain[0])
        self.chain.insert(0, release.release_id)

    @rule(side=SIDE, content=CONTENT, age=st.integers(1, 5))
    def publish_stale(self, side: int, content: int, age: int) -> None:
        if age < len(self.chain):
            try:
                self.sides[side].publish("s", self.draft(side, content), self.chain[age])
            except HeadMoved as lost:
                assert lost.details["head"] == self.chain[0]
            else:
                raise AssertionError("a stale publisher won")

    @rule(side=SIDE, content=CONTENT)
    def hold(self, side: int, content: int) -> None:
        release = self.sides[side].hold("s", self.draft(side, content), None)
        self.held[release.release_id] = release.content_id

    @rule(side=SIDE, data=st.data())
    def promote(self, side: int, data: st.DataObject) -> None:
        if self.held:
            chosen = data.draw(st.sampled_from(sorted(self.held)))
            release = self.sides[side].promote("s", chosen, self.chain[0])
            assert release.content_id == self.held.pop(chosen)
            self.chain.insert(0, release.release_id)

    @rule(side=SIDE, data=st.data())
    def rollback(self, side: int, data: st.DataObject) -> None:
        target = data.draw(st.one_of(st.none(), st.sampled_from(self.chain)))
        try:
            release = self.sides[side].rollback("s", target)
        except (ConflictError, NotRestorable):
            assert target is None or not self.sides[side].get("s", target).restorable
        else:
            self.chain.insert(0, release.release_id)

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
        names = [*self.chain, *self.held]
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
        act=st.sampled_from(("publish", "hold", "promote", "rollback", "route", "compact")),
    )
    def die(self, side: int, at: int, after: bool, content: int, act: str) -> None:
        """One side dies somewhere in an action and starts anew; what it did is there wholly or not at all."""
        doom(self.sides[side], at, after)
        with suppress(Died, ConflictError):
            self.act(side, act, content)
        self.sides[side] = ReleaseService(self.home / "home")
        listed = self.sides[side].list("s")
        fresh = [release.release_id for release in listed if not release.pending]
        assert fresh in (self.chain, [fresh[0], *self.chain])
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

    def act(self, side: int, act: str, content: int) -> None:
        service = self.sides[side]
        if act in ("publish", "hold"):
            getattr(service, act)("s", self.draft(side, content), None)
        elif act == "promote" and self.held:
            service.promote("s", sorted(self.held)[0])
        elif act == "rollback":
            service.rollback("s")
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
            listed = [release for release in self.sides[0].list("s") if not release.pending]
            target = previous_content(listed)
            assert (target is None) == (len({release.content_id for release in listed}) == 1)
            assert target is None or target.restorable

    @invariant()
    def both_sides_tell_the_same_append_only_story(self) -> None:
        if self.chain:
            for service in self.sides:
                listed = service.list("s")
                assert [release.release_id for release in listed if not release.pending] == self.chain
                assert {release.release_id for release in listed if release.pending} == set(self.held)
                assert [release.step for release in listed if not release.pending] == list(range(len(self.chain)))[::-1]
                head = service.head("s")
                assert head is not None and head.release_id == self.chain[0] and head.restorable

    def teardown(self) -> None:
        problems = self.sides[0].verify("s") if self.chain else []
        for release in self.sides[0].list("s") if self.chain else ():
            folder = self.sides[0].directory(release.content_id) if release.restorable else None
            assert folder is None or any((folder / "model.safetensors").read_bytes() == known for known in self.bytes)
        shutil.rmtree(self.home)
        assert {problem.kind for problem in problems} <= {"dropped"}


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(
    max_examples=8, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
