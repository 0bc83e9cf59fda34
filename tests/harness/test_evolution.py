"""From proposal to candidate with a real agent's load test: what is refused, what is undone, what a cut job leaves."""

from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.clock import SystemClock
from reef_cli.core.ids import RecordId
from reef_cli.core.ports import TrainerProgress
from reef_cli.core.types import Candidate, Draft, Operation, Sample, Surface, TokenTrace
from reef_cli.harness import discovery
from reef_cli.harness import tree as trees
from reef_cli.harness.evolution import Evolution, Sources, wish_mark
from reef_cli.harness.merge import Mutation, parse_mutations
from reef_cli.harness.pool import LocalPool
from reef_cli.harness.proposing import Ask, Proposed, Window
from reef_cli.harness.service import HarnessService
from reef_cli.harness.tree import Tree
from reef_cli.harness.trials import Gateway, Setting, Trials, _prune, installing
from reef_cli.releases.base import upstream_artifact
from reef_cli.releases.service import ReleaseService

HOUSE = {"id": "house", "kind": "rules", "config": {"text": "Be brief."}}
USER = {"id": "user", "kind": "rules", "config": {"text": "Follow the house.", "uses": ["house"]}}
OTHER = {"id": "other", "kind": "command", "config": {"text": "Do it.", "description": "d"}}


class Scripted:
    """Proposes what it is told, and keeps what it was shown."""

    def __init__(self) -> None:
        self.next: list[Mutation] = []
        self.seen: list[Window] = []

    async def propose(self, window: Window, ask: Ask) -> Proposed:
        self.seen.append(window)
        return Proposed(tuple(self.next), "because")


class World:
    """A chain with a harness of three entries, and evolution over it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.releases = ReleaseService(home)
        self.releases.create("s", upstream_artifact("http://u", "m"))
        self.service = HarnessService(self.releases, page_secret=b"x" * 32)
        artifact = self.service.store(Tree.of([HOUSE, USER, OTHER]))
        head = self.releases.head("s")
        assert head is not None
        draft = Draft(artifact.content_id, "harness", Surface.HARNESS, Operation.TRAINING, "me")
        self.head = self.releases.publish("s", draft, head.release_id)
        gateway = Gateway(lambda: "", "m", lambda *_: "", lambda _: None)
        setting = Setting(discovery.adapter("native", {}), home / "agents", home / "episodes", unsafe=True)
        self.proposer = Scripted()
        self.told: list[Any] = []
        sources = Sources(self.service, lambda _: (), self.nobody, lambda *facts: self.told.append(facts))
        self.evolution = Evolution(self.proposer, sources, Trials(setting, gateway, LocalPool(1)), SystemClock())
        self.phases: list[str] = []

    async def nobody(self, *_: Any) -> str:
        raise AssertionError

    async def train(self, *mutations: dict[str, Any], **extras: Any) -> Candidate:
        self.proposer.next = parse_mutations(list(mutations)) if mutations else []
        given = {"kind": "failure", "score": 0.0, "feedback": "hm", "prompt": "p", "answer": "a", **extras}
        sample = Sample(RecordId("r"), (), TokenTrace((), (), (), (), ()), 0.0, (), 0, 1.0, given)
        out = self.home / f"out-{len(self.phases)}"

        def phase(progress: TrainerProgress) -> None:
            self.phases.append(progress.phase)

        return await self.evolution.train("s", self.head, None, None, [sample], out, phase)

    @property
    def bench(self) -> Any:
        return self.evolution._scenarios["s"].bench


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def update(entry: dict[str, Any], text: str) -> dict[str, Any]:
    return {"op": "update", "entry": {**entry, "config": {**entry["config"], "text": text}}}


async def test_a_candidate_is_the_mounted_tree_and_says_what_it_touched(world: World) -> None:
    made = await world.train(update(HOUSE, "Be very brief."))
    assert made.kind == "harness" and trees.read(made.directory).get("house").text == "Be very brief."  # type: ignore[union-attr]
    facts = made.metrics
    assert facts["touched"] == ["house", "user"] and facts["changed"] == "changed rules house (text)"
    assert facts["reward_mean"] == 0.0 and facts["reason"] == "because" and len(facts["mutations"]) == 1
    assert world.phases == ["proposing", "mounting", "load test"]
    (scenario, evidence) = world.told[0]
    assert scenario == "s" and evidence[0].feedback == "hm" and world.proposer.seen[0].tree == world.service.tree("s")
    await world.evolution.stop()


async def test_a_verdict_keeps_or_undoes_exactly(world: World) -> None:
    before = world.service.tree("s")
    await world.train(update(HOUSE, "Be very brief."))
    starts = dict(world.bench.world.starts)
    await world.evolution.conclude("s", kept=False)
    assert world.bench.mounted() == before and world.bench.world.starts["other"] == starts["other"] == 1
    made = await world.train({"op": "remove", "id": "other"})
    await world.evolution.conclude("s", kept=True)
    assert world.bench.mounted() == trees.read(made.directory)
    await world.evolution.conclude("s", kept=False)  # nothing is on trial: nothing happens
    assert world.bench.mounted() == trees.read(made.directory)
    await world.evolution.stop()


@pytest.mark.parametrize(
    ("mutations", "why"),
    [
        ([{"op": "create", "entry": {**OTHER, "id": "house"}}], "cannot create"),
        ([{"op": "remove", "id": "house"}], "uses"),
        ([{"op": "create", "entry": {"id": "c", "kind": "config", "config": {"value": {"max_turns": "x"}}}}], "does not start"),
        ([{"op": "create", "entry": {"id": "m", "kind": "mcp", "config": {"command": "x"}}}], "no place for"),
        ([update(HOUSE, "ok"), {"op": "create", "entry": {"id": "reef-x", "kind": "rules", "config": {"text": "t"}}}], "Reef"),
    ],
    ids=["exists", "needed", "load test", "no place", "second of two"],
)
async def test_what_is_unfit_is_refused_and_leaves_nothing(world: World, mutations: list[dict[str, Any]], why: str) -> None:
    made = await world.train(*mutations)
    assert (made.metrics["policy_updated"], made.metrics["outcome"]) == (False, "reject")
    assert why in made.metrics["reason"], made.metrics["reason"]
    assert world.bench.mounted() == world.service.tree("s") and world.bench.failures() == {}
    assert not (world.home / "episodes" / "roots").exists() or not list((world.home / "episodes" / "roots").iterdir())
    await world.evolution.stop()


async def test_no_proposal_is_no_verdict(world: World) -> None:
    made = await world.train()
    assert made.metrics == {
        "samples": 1,
        "reward_mean": 0.0,
        "reason": "no proposal: because",
        "mutations": [],
        "policy_updated": False,
    }


async def test_a_job_that_was_cut_short_leaves_no_trial_in_the_way(world: World) -> None:
    await world.train(update(HOUSE, "One."))
    made = await world.train(update(HOUSE, "Two."))
    tree = trees.read(made.directory)
    assert tree.get("house").text == "Two." and len(tree) == 3 and made.metrics["touched"] == ["house", "user"]  # type: ignore[union-attr]
    await world.evolution.stop()


async def test_an_edit_is_carried_over_and_an_unmarked_one_refused(world: World) -> None:
    mutations = [update(HOUSE, "Be kind.")]
    edit = {"kind": "proposal", "text": "kinder", "feedback": "kinder", "mutations": mutations, "base_release_id": None}
    forged = await world.train(**edit, mark="0" * 64)
    assert forged.metrics["outcome"] == "reject" and "routes" in forged.metrics["reason"]
    made = await world.train(**edit, mark=wish_mark(world.service, edit))
    assert made.metrics["reason"] == "kinder" and trees.read(made.directory).get("house").text == "Be kind."  # type: ignore[union-attr]
    assert world.proposer.seen == []
    stale = {**edit, "base_release_id": "r9-00000000"}
    gone = await world.train(**stale, mark=wish_mark(world.service, stale))
    assert gone.metrics["outcome"] == "reject" and "r9-00000000" in gone.metrics["reason"]
    await world.evolution.stop()


def test_installing_an_agent_sees_no_key_of_the_server() -> None:
    given = {
        "PATH": "/bin",
        "HOME": "/h",
        "npm_config_registry": "r",
        "HTTPS_PROXY": "p",
        "PROVIDER_KEY": "k",
        "REEF_TOKEN": "t",
    }
    assert set(installing(given)) == {"PATH", "HOME", "npm_config_registry", "HTTPS_PROXY"}


def test_kept_episodes_are_bounded(tmp_path: Path) -> None:
    for name in ("1-a", "2-b", "3-c"):
        (tmp_path / name).mkdir()
    _prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2-b", "3-c"]
    _prune(tmp_path / "nothing", 2)
