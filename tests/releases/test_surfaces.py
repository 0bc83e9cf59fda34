"""One head per surface in one chain: they move past each other, each by compare-and-swap, each with its own way back."""

import threading
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core import surfaces
from reef_cli.core.errors import AmbiguousSurface, ConflictError, HeadMoved, InvalidRequest
from reef_cli.core.types import Draft, Operation, Release, Surface
from reef_cli.releases import Keep, ReleaseService
from reef_cli.releases.base import upstream_artifact
from reef_cli.releases.manifest import encode
from tests.releases.conftest import Make

W, H = Surface.WEIGHTS, Surface.HARNESS


class Two:
    """A chain of a base model with releases of both surfaces."""

    def __init__(self, service: ReleaseService, tree: Make, adapter: Make) -> None:
        self.service, self._tree, self._adapter = service, tree, adapter
        self.creation = service.create("s", upstream_artifact("http://u", "m"))
        self._marks = 0

    def draft(self, surface: Surface, **facts: Any) -> Draft:
        self._marks += 1
        if surface is W:
            content = self.service.store(self._adapter(200_000, self._marks), "lora")
        else:
            content = self.service.store(self._tree({"AGENTS.md": f"{self._marks}\n"}), "harness")
        return Draft(content.content_id, content.kind, surface, Operation.TRAINING, "test", **facts)

    def publish(self, surface: Surface, **facts: Any) -> Release:
        return self.service.publish("s", self.draft(surface, **facts), self.head(surface).release_id)

    def head(self, surface: Surface) -> Release:
        found = self.service.head("s", surface)
        assert found is not None
        return found


@pytest.fixture
def two(service: ReleaseService, tree: Make, adapter: Make) -> Two:
    return Two(service, tree, adapter)


def test_each_release_moves_the_head_of_its_own_surface(two: Two) -> None:
    assert two.head(W) == two.head(H) == two.creation, "every surface starts at the creation release"
    w1, h2 = two.publish(W), two.publish(H)
    w3 = two.publish(W)
    assert (two.head(W), two.head(H)) == (w3, h2) and two.service.tip("s") == w3
    assert [release.step for release in two.service.list("s")] == [3, 2, 1, 0] and w3.parent_release_id == h2.release_id
    assert surfaces.lane(two.service.list("s"), W) == [w3, w1, two.creation]
    assert surfaces.heads(two.service.list("s")) == {W: w3, H: h2}
    assert two.service.verify("s") == []


def test_a_move_of_the_other_surface_is_no_conflict_and_one_of_the_same_is(two: Two) -> None:
    seen = two.head(W).release_id
    h1 = two.publish(H)
    w2 = two.service.publish("s", two.draft(W), seen)
    with pytest.raises(HeadMoved) as lost:
        two.service.publish("s", two.draft(W), seen)
    assert lost.value.details["head"] == w2.release_id
    with pytest.raises(HeadMoved, match="the harness of s is now at"):
        two.service.publish("s", two.draft(H), two.creation.release_id)
    assert two.head(H) == h1


def test_publishers_of_two_surfaces_do_not_disturb_each_other(two: Two) -> None:
    """Both append to one ref; whoever is second appends behind the other instead of losing."""
    drafts = {surface: [two.draft(surface) for _ in range(6)] for surface in (W, H)}
    sides = {surface: ReleaseService(two.service.home) for surface in (W, H)}
    faults: list[BaseException] = []

    def run(surface: Surface) -> None:
        try:
            head = two.creation.release_id
            for draft in drafts[surface]:
                head = sides[surface].publish("s", draft, head).release_id
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(surface,)) for surface in (W, H)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    listed = two.service.list("s")
    assert [release.step for release in listed] == list(range(12, -1, -1)) and two.service.verify("s") == []
    for surface in (W, H):
        assert [r.content_id for r in surfaces.lane(listed, surface)][:-1] == [d.content_id for d in reversed(drafts[surface])]


def test_a_fixed_release_id_keeps_its_name_behind_a_release_that_came_between(two: Two) -> None:
    """A job writes its release id down before it publishes; the step is where the release came to stand."""
    draft = two.draft(W, release_id="r1-0a1b2c3d")
    two.publish(H)
    release = two.service.publish("s", draft, two.creation.release_id)
    assert (release.release_id, release.step) == ("r1-0a1b2c3d", 2) and two.service.verify("s") == []


def test_a_rollback_moves_one_surface_and_leaves_the_other(two: Two) -> None:
    w1, h2, w3, h4 = two.publish(W), two.publish(H), two.publish(W), two.publish(H)
    back = two.service.rollback("s", surface=W)
    assert (back.surface, back.content_id, back.evidence["rolled_back_from"]) == (W, w1.content_id, w3.release_id)
    assert two.head(H) == h4
    harness = two.service.rollback("s", h2.release_id)
    assert harness.surface is H and harness.content_id == h2.content_id and two.head(W) == back
    seen = two.service.rollback("s", expected_head=harness.release_id)
    assert seen.surface is H and seen.content_id == h4.content_id, "the head that was seen says which surface"


def test_without_a_name_a_rollback_of_two_surfaces_is_refused(two: Two) -> None:
    assert surfaces.meant(two.service.list("s")) is W
    with pytest.raises(ConflictError, match="no earlier content"):
        two.service.rollback("s")
    h1 = two.publish(H)
    assert two.service.rollback("s").surface is H, "one surface moved, so it is meant"
    w3 = two.publish(W)
    before = two.service.list("s")
    for target in (None, two.creation.release_id):
        with pytest.raises(AmbiguousSurface) as refused:
            two.service.rollback("s", target)
        assert refused.value.details["heads"]["weights"] == w3.release_id
    with pytest.raises(InvalidRequest, match="surface harness"):
        two.service.rollback("s", h1.release_id, surface=W)
    with pytest.raises(InvalidRequest, match="chain of its own"):
        two.service.rollback("s", surface=Surface.ROUTING)
    with pytest.raises(HeadMoved):
        two.service.rollback("s", expected_head=two.creation.release_id, surface=W)
    assert two.service.list("s") == before


def test_the_creation_release_takes_a_harness_away_and_leaves_the_weights(two: Two) -> None:
    w1, _ = two.publish(W), two.publish(H)
    bare = two.service.rollback("s", two.creation.release_id, surface=H)
    assert (bare.surface, bare.kind) == (H, "base") and two.head(H) == bare and two.head(W) == w1


def test_a_held_candidate_is_promoted_to_its_own_head(two: Two) -> None:
    w1 = two.publish(W)
    held = two.service.hold("s", two.draft(H), two.creation.release_id)
    w2 = two.publish(W)
    with pytest.raises(HeadMoved):
        two.service.promote("s", held.release_id, expected_head=w1.release_id)
    promoted = two.service.promote("s", held.release_id, expected_head=two.creation.release_id)
    assert two.head(H) == promoted and two.head(W) == w2


def test_collection_keeps_the_newest_of_each_surface(two: Two) -> None:
    weights = [two.publish(W) for _ in range(3)]
    harness = [two.publish(H) for _ in range(6)]
    two.service.gc(dry_run=False, keep=Keep(latest=1, gated=False, grace_s=0.0))
    kept = [two.service.get("s", release.release_id).restorable for release in weights]
    assert kept == [False, True, True], "six newer harnesses push no weights out"
    assert two.service.rollback("s", surface=W).content_id == weights[1].content_id
    assert two.service.get("s", harness[-1].release_id).restorable


def test_both_heads_travel_with_their_chain(two: Two, tmp_path: Path) -> None:
    w1, h2, remote = two.publish(W), two.publish(H), ReleaseService(tmp_path / "remote")
    two.service.push(str(remote.repo))
    w3 = two.publish(W)
    away = ReleaseService(tmp_path / "away")
    away.fetch(str(remote.repo))
    assert (away.head("s", W), away.head("s", H)) == (w1, h2) and away.verify("s") == []
    two.service.push(str(remote.repo))
    away.fetch(str(remote.repo))
    assert (away.head("s", W), away.head("s", H)) == (w3, h2)


def test_a_home_of_one_head_reads_as_it_was_meant(service: ReleaseService, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there were two heads a harness was taken away by a release that says `weights`; it moved the harness's head."""
    h1 = two.publish(H)

    def as_then(release: Release, *rest: Any) -> bytes:
        from dataclasses import replace

        return encode(replace(release, surface=W), *rest)

    monkeypatch.setattr("reef_cli.releases.service.encode", as_then)
    service.rollback("s", two.creation.release_id)
    monkeypatch.undo()
    for reader in (service, ReleaseService(service.home)):
        reader._chains._entries.clear(), reader._chains._chains.clear()
        listed = reader.list("s")
        assert [release.surface for release in listed] == [H, H, W]
        assert surfaces.lane(listed, W) == [two.creation] and reader.head("s", H) == listed[0] and listed[1] == h1
    w3 = two.publish(W)
    back = service.rollback("s", two.creation.release_id, surface=W)
    assert back.evidence["rolled_back_from"] == w3.release_id and two.head(W) == back, "going back with weights moves weights"
