"""Routing policies: their rules, their choices, and their chain beside the main one."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_cli.core.errors import HeadMoved, InvalidRequest, NotRestorable, ReleaseNotFound, ReleaseNotServable
from reef_cli.core.ids import ReleaseId
from reef_cli.core.types import Operation, Surface
from reef_cli.releases import Keep, ReleaseService
from reef_cli.releases.base import upstream_artifact
from reef_cli.releases.routing import EMPTY, HEAD, NO_POLICY, Auto, Policy, parse, read

A, B = ReleaseId("r1-aaaaaaaa"), ReleaseId("r2-bbbbbbbb")
HALF = {HEAD: 0.5, A: 0.5}
AUTO = {"alpha": 0.01, "margin": 0.1, "low": -1, "high": 3}


# The document


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"pin": A},
        {"shares": {HEAD: 0.9, A: 0.1}, "auto": AUTO},
        {"shares": {A: 0.25, B: 0.75}, "shadow": {"release_id": A, "share": 0.5}},
    ],
)
def test_a_policy_comes_back_from_its_bytes(body):
    policy = parse(body)
    assert read(policy.text()) == policy and policy.wire() == body


def test_short_forms():
    assert parse({"shadow": A}) == Policy(shadow=A)
    assert parse({"shares": {HEAD: 1.0, A: 0.0}}).arms == (HEAD,)
    assert parse({"shares": HALF, "auto": True}, Auto(0.2)).auto == Auto(0.2)
    assert parse({"shares": HALF, "auto": False}).auto is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"share": {}}, "unknown field"),
        ({"shares": []}, "object"),
        ({"shares": {HEAD: 0.9, A: 0.2}}, "sum to 1"),
        ({"shares": {HEAD: True}}, "number"),
        ({"shares": {HEAD: float("nan")}}, "number"),
        ({"shares": {HEAD: 1.5, A: -0.5}}, "number"),
        ({"shares": HALF, "pin": A}, "either"),
        ({"pin": 7}, "must name a release"),
        ({"shadow": {"release_id": A, "rate": 1}}, "unknown field"),
        ({"shadow": {"release_id": A, "share": 2}}, "number"),
        ({"pin": A, "auto": True}, "only a canary"),
        ({"shares": {A: 0.5, B: 0.5}, "auto": True}, "only a canary"),
        ({"shares": HALF, "auto": {"alpha": 0.9}}, "alpha"),
        ({"shares": HALF, "auto": {"low": 2}}, "below"),
        ({"shares": HALF, "auto": {"speed": 2}}, "auto must"),
    ],
)
def test_a_malformed_policy_is_refused_in_words(body, words):
    with pytest.raises(InvalidRequest, match=words):
        parse(body)


def test_a_name_that_is_no_release_is_not_found():
    for body in ({"pin": "what"}, {"shares": {"what": 1}}, {"shadow": "what"}, {"pin": HEAD}):
        with pytest.raises(ReleaseNotFound):
            parse(body)


# Choices


@settings(max_examples=60, derandomize=True)
@given(small=st.floats(0.05, 0.5), more=st.floats(0.0, 0.4))
def test_shares_are_kept_and_a_growing_canary_keeps_its_sessions(small, more):
    sessions = [f"session {number}" for number in range(400)]
    few = Policy(shares={HEAD: 1 - small, A: small})
    many = Policy(shares={HEAD: 1 - small - more, A: small + more})
    chosen = {session for session in sessions if few.choose("s", session) == A}
    grown = {session for session in sessions if many.choose("s", session) == A}
    assert chosen <= grown
    for share, found in ((small, chosen), (small + more, grown)):
        assert abs(len(found) / 400 - share) < 5 * (share * (1 - share) / 400) ** 0.5
    assert [few.choose("s", session) for session in sessions] == [few.choose("s", session) for session in sessions]


def test_three_arms_and_other_scenarios_draw_apart():
    policy = Policy(shares={HEAD: 0.5, A: 0.2, B: 0.3})
    sessions = [str(number) for number in range(3000)]
    counted = Counter(policy.choose("s", session) for session in sessions)
    assert all(abs(counted[arm] / 3000 - share) < 0.04 for arm, share in policy.shares.items())
    assert any(policy.choose("s", session) != policy.choose("t", session) for session in sessions)


def test_a_pin_takes_everything_and_no_policy_leaves_the_head():
    assert Policy(pin=A).choose("s", "x") == A and EMPTY.choose("s", "x") == HEAD
    assert Policy(shares=HALF).canary == A and Policy(pin=A).canary is None and Policy(shares={A: 0.5, B: 0.5}).canary is None
    assert Policy(shares=HALF, shadow=B).named == {A, B}


def test_a_shadow_has_a_share_of_its_own():
    policy = Policy(shadow=A, shadow_share=0.3)
    found = sum(policy.shadows("s", str(number)) == A for number in range(2000))
    assert abs(found / 2000 - 0.3) < 0.05
    assert EMPTY.shadows("s", "x") is None and Policy(shadow=A).shadows("s", "x") == A


# The chain


def test_a_policy_has_a_head_of_its_own(service, adapter, draft):
    first = service.create("s", service.store(adapter(500, 1), "lora"))
    assert service.head("s", Surface.ROUTING) is None and service.policy(None) == EMPTY
    policy = Policy(shares={HEAD: 0.5, first.release_id: 0.5})
    routed = service.route("s", policy, NO_POLICY, "ann", evidence={"reason": "try"})
    assert service.head("s") == first and service.list("s") == [first], "the main chain stays as it was"
    assert service.head("s", Surface.ROUTING) == routed == service.get("s", routed.release_id)
    assert (routed.surface, routed.kind, routed.operation) == (Surface.ROUTING, "routing", Operation.ROUTE)
    assert (routed.step, routed.parent_release_id, routed.author) == (0, None, "ann")
    assert service.policy(routed) == policy
    cleared = service.route("s", EMPTY, routed.release_id)
    assert (cleared.step, cleared.parent_release_id) == (1, routed.release_id)
    assert service.list("s", Surface.ROUTING) == [cleared, routed] and service.policy(cleared) == EMPTY
    assert service.scenarios() == ["s"] and service.verify("s") == []
    with pytest.raises(InvalidRequest, match="chain of its own"):
        service.publish("s", replace(draft(service.artifact(routed.content_id)), surface=Surface.ROUTING), None)


def test_racing_policies_have_one_winner_and_unknown_releases_none(service, adapter, tree, draft):
    first = service.create("s", service.store(adapter(500, 1), "lora"))
    routed = service.route("s", Policy(pin=first.release_id), NO_POLICY)
    for stale in (NO_POLICY, "r7-00000000"):
        with pytest.raises(HeadMoved) as lost:
            service.route("s", EMPTY, stale)
        assert lost.value.details["head"] == routed.release_id
    with pytest.raises(ReleaseNotFound):
        service.route("s", Policy(pin=A))
    with pytest.raises(ReleaseNotFound):
        service.route("s", Policy(shadow=routed.release_id))
    harness = service.publish("s", draft(service.store(tree({"AGENTS.md": "brief"}), "harness")), None)
    for named in (Policy(pin=harness.release_id), Policy(shares={HEAD: 0.5, harness.release_id: 0.5})):
        with pytest.raises(ReleaseNotServable, match="answers no requests") as refused:
            service.route("s", named)
        assert "reef harness install" in refused.value.hint
    assert service.list("s", Surface.ROUTING) == [routed]


def test_the_collector_keeps_what_a_policy_names(service, adapter, draft):
    big = [service.store(adapter(200_000, mark), "lora") for mark in range(4)]
    service.create("s", upstream_artifact("http://u", "m"))
    chain = [service.publish("s", draft(content), None) for content in big[:3]]
    held = service.hold("s", draft(big[3]), None)
    keep = Keep(latest=1, gated=False, grace_s=0.0)
    service.publish("s", draft(big[2]), None)
    service.route("s", Policy(shares={HEAD: 0.5, chain[0].release_id: 0.5}, shadow=held.release_id))
    service.gc(dry_run=False, keep=keep)
    assert service.get("s", chain[0].release_id).restorable and service.get("s", held.release_id).restorable
    service.route("s", EMPTY)
    service.gc(dry_run=False, keep=keep)
    assert not service.get("s", chain[0].release_id).restorable, "nothing names it any more"
    with pytest.raises(NotRestorable):
        service.route("s", Policy(pin=chain[0].release_id))
    assert service.policy(service.list("s", Surface.ROUTING)[1]).named, "old policies stay readable"


def test_policies_travel_with_their_chain_and_are_archived_with_it(service, adapter, tmp_path):
    first = service.create("s", service.store(adapter(500, 1), "lora"))
    service.route("s", Policy(pin=first.release_id))
    remote = ReleaseService(tmp_path / "remote")
    service.push(str(remote.repo))
    routed = service.route("s", EMPTY)
    service.push(str(remote.repo))
    away = ReleaseService(tmp_path / "away")
    away.fetch(str(remote.repo))
    assert away.head("s", Surface.ROUTING) == routed and away.policy(routed) == EMPTY and away.verify("s") == []
    service.archive("s")
    assert service.scenarios() == [] and service.list("s", Surface.ROUTING) == []
    service.create("s", service.store(adapter(500, 2), "lora"))
    assert service.head("s", Surface.ROUTING) is None
