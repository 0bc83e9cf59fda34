"""A state machine over two service instances on one repository: whatever the order, the chain's promises hold."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reef_cli.core.errors import ConflictError, HeadMoved, NotRestorable
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases import Keep, ReleaseService
from reef_cli.releases.collect import kept_of

SIDE = st.integers(0, 1)
CONTENT = st.integers(0, 3)


class ChainMachine(RuleBasedStateMachine):
    """Publishers with fresh and stale expectations, promotions, rollbacks and collections, against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="reef-machine-"))
        self.sides = [ReleaseService(self.home / "home"), ReleaseService(self.home / "home")]
        self.chain: list[str] = []
        self.held: dict[str, str] = {}
        self.kept: set[str] = set()

    @initialize()
    def create(self) -> None:
        self.folders = []
        for index in range(4):
            folder = self.home / f"tree{index}"
            folder.mkdir()
            (folder / "big.txt").write_bytes(bytes([index]) * 110_000)
            self.folders.append(folder)
        release = self.sides[0].create("s", self.sides[0].store(self.folders[0], "harness"))
        self.chain = [release.release_id]

    def draft(self, side: int, content: int) -> Draft:
        artifact = self.sides[side].store(self.folders[content], "harness")
        return Draft(artifact.content_id, "harness", Surface.HARNESS, Operation.TRAINING, "machine", gated=content == 1)

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
        shutil.rmtree(self.home)
        assert {problem.kind for problem in problems} <= {"dropped"}


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(
    max_examples=8, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
