"""Trees on the workbench: mutations restart only what depends on them and are undone exactly."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_cli.core.errors import ConflictError, UnsupportedArtifact
from reef_cli.harness.merge import Mutation, diff, mutations
from reef_cli.harness.tree import Entry, Tree
from reef_cli.harness.workbench import Workbench
from tests.harness.strategies import trees


def rule(name: str, text: str = "t", **more: object) -> Entry:
    return Entry(name, "rules", {"text": text, **more})


BASE = Tree.of([rule("a"), rule("b", uses=["a"]), rule("c")])


async def test_a_mutation_restarts_only_what_depends_on_it_and_is_undone() -> None:
    bench = Workbench()
    await bench.load(BASE)
    trial = await bench.mount([Mutation("update", "a", rule("a", "new"))])
    assert trial.touched == {"a", "b"} and bench.world.starts == {"a": 2, "b": 2, "c": 1}
    with pytest.raises(ConflictError):
        await bench.mount([])
    await trial.undo()
    assert bench.mounted() == BASE == bench.tree and bench.world.starts["c"] == 1
    with pytest.raises(ConflictError):
        trial.keep()
    kept = await bench.mount([Mutation("create", "d", rule("d"))])
    assert kept.keep() == bench.mounted() and kept.touched == {"d"}
    await bench.close_all()
    assert bench.world.present == {}


async def test_a_broken_entry_fails_alone_and_names_its_reason() -> None:
    def check(entry: Entry) -> None:
        if entry.text == "boom":
            raise ValueError("does not load")

    bench = Workbench(check)
    await bench.load(BASE)
    trial = await bench.mount([Mutation("update", "a", rule("a", "boom"))])
    assert bench.failures() == {"a": "ValueError: does not load", "b": "waits for a"}
    assert [entry.id for entry in bench.mounted()] == ["c"]
    await trial.undo()
    assert bench.failures() == {} and bench.mounted() == BASE


async def test_an_unsound_mutation_changes_nothing() -> None:
    bench = Workbench()
    await bench.load(BASE)
    with pytest.raises(UnsupportedArtifact):
        await bench.mount([Mutation("remove", "a")])
    assert bench.mounted() == BASE and bench.world.starts == {"a": 1, "b": 1, "c": 1}


@settings(max_examples=60, deadline=None)
@given(trees(), st.lists(st.tuples(trees(), st.booleans()), max_size=4))
def test_any_sequence_of_trials_equals_loading_the_final_tree(start: Tree, steps: list[tuple[Tree, bool]]) -> None:
    async def run() -> None:
        bench, fresh = Workbench(), Workbench()
        await bench.load(start)
        for target, keep in steps:
            before = bench.mounted()
            trial = await bench.mount(mutations(diff(bench.tree, target)))
            if keep:
                trial.keep()
            else:
                await trial.undo()
                assert bench.mounted() == before
        await fresh.load(bench.tree)
        assert bench.mounted() == fresh.mounted() and bench.world.present == fresh.world.present

    asyncio.run(run())
