"""Trees: validation, canonical form, diff and merge."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.harness import merge as merging
from reef_cli.harness import tree as trees
from reef_cli.harness.files import TreeFile
from reef_cli.harness.paths import fault
from reef_cli.harness.tree import Entry, Tree
from tests.harness.strategies import trees as any_tree


def entry(kind: str, entry_id: str = "one", **config: object) -> dict[str, object]:
    return {"id": entry_id, "kind": kind, "config": config}


SOUND = [
    entry("rules", "house", text="Answer briefly.\r\nno final newline"),
    entry("system", "base", text="You are careful.", mode="replace"),
    entry(
        "skill",
        "make-pdf",
        description='Makes PDFs: use when "asked"',
        text="# Steps\n",
        files={"scripts/go.sh": {"text": "#!/bin/sh\n", "executable": True}},
    ),
    entry("command", "greet", text="Say hello to $ARGUMENTS"),
    entry("agent", "critic", description="Reviews", text="Be harsh."),
    entry("mcp", "search", command="search-server", args=["--stdio"], env={"KEY": "${SEARCH_KEY}"}),
    entry("extension", "notice", adapter="pi", suffix="ts", text="export default function (pi) {}\n", uses=["search"]),
    entry("config", "settings", format="toml", text="a = 1\n[b]\nc = true\n"),
]


@settings(max_examples=60, deadline=None)
@given(any_tree())
def test_canonical_files_round_trip(tree: Tree) -> None:
    files = trees.serialise(tree)
    assert trees.deserialise(files) == tree
    assert trees.serialise(trees.deserialise(files)) == files


def test_folder_round_trip_keeps_bytes_and_run_bits(tmp_path: Path) -> None:
    tree = Tree.of(SOUND)
    trees.write(tree, tmp_path / "t")
    again = trees.read(tmp_path / "t")
    assert again == tree
    assert again.get("house").text.endswith("\r\nno final newline")
    assert again.get("make-pdf").extra["scripts/go.sh"] == TreeFile(b"#!/bin/sh\n", True)
    assert again.get("settings").config["value"] == {"a": 1, "b": {"c": True}}


@pytest.mark.parametrize(
    "bad",
    [
        entry("rules"),
        entry("rules", text=" "),
        entry("rules", text="x", colour="red"),
        entry("rules", "Upper", text="x"),
        entry("rules", "a--b", text="x"),
        entry("rules", "-a", text="x"),
        entry("rules", "a" * 65, text="x"),
        entry("rules", "../x", text="x"),
        entry("novel", text="x"),
        entry("skill", text="x"),
        entry("skill", description="d" * 1025, text="x"),
        entry("skill", description="d", text="---\nname: other\n---\n"),
        entry("skill", description="d", text="x", files={"../x": "y"}),
        entry("skill", description="d", text="x", files={"/tmp/x": "y"}),
        entry("skill", description="d", text="x", files={"a": "y", "A": "z"}),
        entry("skill", description="d", text="x", files={"a": "y", "a/b": "z"}),
        entry("skill", description="d", text="x", files={"skill.MD": "y"}),
        entry("skill", description="d", text="x", files={"m.pkl": "y"}),
        entry("skill", description="d", text="x", files={"a.json": "{"}),
        entry("skill", description="d", text="x", files={"a.toml": "= 1"}),
        entry("skill", description="d", text="x", files={"a.yaml": "a: [1"}),
        entry("skill", description="d", text="x", files={"a": {"base64": "!"}}),
        entry("config", text="{", format="json"),
        entry("config", value=[1]),
        entry("config", value={"x": float("nan")}),
        entry("config", target="env", value={"A B": "x"}),
        entry("mcp", command="/usr/bin/x"),
        entry("mcp", command="x", args=["/etc/passwd"]),
        entry("mcp", command="x", url="http://localhost"),
        entry("extension", adapter="pi", text="x"),
        entry("rules", text="x", uses=["nobody"]),
        entry("rules", text="x", uses=["one"]),
        entry("rules", text="x", requires=[{"kind": "moon", "name": "full"}]),
        entry("rules", text="x", requires=[{"kind": "env", "name": "A"}] * 9),
        entry("rules", text="\ud800"),
    ],
    ids=lambda bad: str(bad)[:70],
)
def test_broken_entries_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UnsupportedArtifact):
        Tree.of([bad])


SECRET = "sk-" + "a1B2c3D4" * 4


@pytest.mark.parametrize(
    "config",
    [
        entry("rules", text=f"use {SECRET} for calls"),
        entry("config", value={"providers": {"x": {"apiKey": "plain-value"}}}),
        entry("mcp", command="x", env={"MY_TOKEN": "abcdef"}),
        entry("mcp", url="http://localhost", headers={"Authorization": "Bearer abcdefghijklmnopqrstuvwx"}),
        entry("skill", description="d", text="x", files={"k.txt": SECRET}),
    ],
)
def test_credentials_are_refused_and_never_repeated(config: dict[str, object]) -> None:
    with pytest.raises(UnsupportedArtifact) as caught:
        Tree.of([config])
    assert SECRET not in str(caught.value.payload()) and "plain-value" not in str(caught.value.payload())


def test_references_to_variables_are_allowed() -> None:
    Tree.of(
        [
            entry("mcp", command="x", env={"MY_TOKEN": "$MY_TOKEN"}),
            entry("mcp", "two", url="http://h", headers={"Authorization": "Bearer ${T}"}),
        ]
    )


def test_ids_are_unique_and_uses_have_no_circle() -> None:
    with pytest.raises(UnsupportedArtifact, match="two entries"):
        Tree.of([entry("rules", text="a"), entry("command", text="b")])
    with pytest.raises(UnsupportedArtifact, match="circle"):
        Tree.of([entry("rules", "a", text="a", uses=["b"]), entry("rules", "b", text="b", uses=["a"])])


def test_links_strangers_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "t"
    trees.write(Tree.of(SOUND), root)
    (root / "rules/house/extra.md").write_text("unseen")
    with pytest.raises(UnsupportedArtifact, match="no entry"):
        trees.read(root)
    (root / "rules/house/extra.md").unlink()
    (root / "link").symlink_to("/etc/passwd")
    with pytest.raises(UnsupportedArtifact, match="link"):
        trees.read(root)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedArtifact, match="not a harness tree"):
        trees.read(tmp_path / "empty")


def test_requirements_are_gathered_once() -> None:
    need = {"kind": "program", "name": "rg"}
    tree = Tree.of(
        [entry("rules", "a", text="a", requires=[need]), entry("rules", "b", text="b", requires=[{**need, "reason": "again"}])]
    )
    assert tree.requires == [{"kind": "program", "name": "rg", "reason": ""}]


@settings(max_examples=100, deadline=None)
@given(any_tree(), any_tree())
def test_diff_leads_from_one_tree_to_the_other(before: Tree, after: Tree) -> None:
    changes = merging.diff(before, after)
    result = merging.apply(before, merging.mutations(changes))
    assert {e.id: e for e in result} == {e.id: e for e in after}
    assert merging.diff(after, after) == []


@settings(max_examples=100, deadline=None)
@given(any_tree(), any_tree())
def test_merge_with_an_unchanged_side_is_the_other_side(base: Tree, ours: Tree) -> None:
    one, two = merging.merge(base, ours, base), merging.merge(base, base, ours)
    assert not one.conflicts and not two.conflicts
    assert {e.id: e for e in one.tree} == {e.id: e for e in two.tree} == {e.id: e for e in ours}


def test_merge_per_entry_and_per_key() -> None:
    base = Tree.of([entry("command", "c", text="t", description="d"), entry("rules", "r", text="r")])
    ours = Tree.of(
        [entry("command", "c", text="T", description="d"), entry("rules", "r", text="r"), entry("rules", "mine", text="m")]
    )
    theirs = Tree.of([entry("command", "c", text="t", description="D"), entry("rules", "theirs", text="x")])
    result = merging.merge(base, ours, theirs)
    assert result.conflicts == ()
    assert {e.id for e in result.tree} == {"c", "mine", "theirs"}
    assert result.tree.get("c").config == {"text": "T", "description": "D"}


def test_conflicts_are_named_and_ours_stays() -> None:
    base = Tree.of([entry("rules", "r", text="0"), entry("rules", "gone", text="0")])
    ours = Tree.of([entry("rules", "r", text="1")])
    theirs = Tree.of([entry("rules", "r", text="2"), entry("rules", "gone", text="2")])
    result = merging.merge(base, ours, theirs)
    assert {(c.id, c.key) for c in result.conflicts} == {("r", "text"), ("gone", "")}
    assert result.tree == ours


def test_mutations_are_checked() -> None:
    tree = Tree.of([entry("rules", "r", text="0")])
    for raw in (
        {"op": "create", "entry": entry("rules", "r", text="1")},
        {"op": "remove", "id": "x"},
        {"op": "update", "id": "r"},
        {"op": "jump"},
        "x",
    ):
        with pytest.raises(UnsupportedArtifact):
            merging.apply(tree, merging.parse_mutations(raw))
    changed = merging.apply(tree, merging.parse_mutations([{"op": "update", "entry": entry("rules", "r", text="1")}]))
    assert changed.entries == (Entry("r", "rules", {"text": "1"}),)


@pytest.mark.parametrize(
    "path",
    [
        "/a",
        "../a",
        "a/../b",
        "a//b",
        "",
        ".",
        "a\\b",
        "a\nb",
        "~/x",
        "C:/x",
        ".git/config",
        "a/.GIT/x",
        "con.txt",
        "x" * 300,
        "a ",
        'a"b',
    ],
)
def test_unsafe_paths(path: str) -> None:
    assert fault(path)


@given(st.text(max_size=30))
def test_safe_paths_stay_inside(path: str) -> None:
    if fault(path) is None:
        assert os.path.normpath(f"/place/{path}").startswith("/place/")
