"""Every adapter folder keeps the contract; what differs between agents is checked one by one."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from reef_cli.core.errors import AdapterNotFound, ConfigError, UnsupportedArtifact
from reef_cli.harness import contract, discovery, formats
from reef_cli.harness.adapter import load
from reef_cli.harness.render import admit, render
from reef_cli.harness.resources import shipped
from reef_cli.harness.scaffold import new_adapter
from reef_cli.harness.tree import Tree

THIRD = Path(__file__).parent / "fixtures" / "third-party"
FOLDERS = [*sorted(folder for folder in shipped("adapters").iterdir() if folder.is_dir()), THIRD]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_contract(folder: Path) -> None:
    assert contract.faults(load(folder)) == []


def test_shipped_adapters_are_all_here() -> None:
    assert set(discovery.adapters({})) == {"pi", "claude-code", "codex", "opencode", "mini-swe-agent", "native"}


def test_third_party_folder_on_a_path(tmp_path: Path) -> None:
    found = discovery.adapters({"REEF_ADAPTERS": str(THIRD)})
    assert found["third-party"].plan().version == "2.0.1"
    with pytest.raises(ConfigError, match="two adapters"):
        discovery.adapters({"REEF_ADAPTERS": f"{THIRD}:{THIRD}"})
    with pytest.raises(AdapterNotFound):
        discovery.adapter("nobody", {})
    with pytest.raises(ConfigError, match="pinned"):
        discovery.adapter("pi", {}).version("9.9")


def test_third_party_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> object:
            return lambda: str(THIRD)

    monkeypatch.setattr(discovery, "entry_points", lambda group: [Point()] if group == "reef.adapters" else [])
    assert "third-party" in discovery.adapters({})


def test_a_scaffolded_adapter_keeps_the_contract(tmp_path: Path) -> None:
    assert contract.faults(new_adapter("my-agent", tmp_path)) == []
    for bad in ("Bad Name", "my-agent"):
        with pytest.raises(ConfigError):
            new_adapter(bad, tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["my-agent"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ("colour: red", "unknown keys"),
        ("versions: [latest]", "exact versions"),
        ("dialect: morse", "dialect"),
        ("launch: {interactive: ['{program}'], headless: ['{program}']}", "prompt"),
        ("launch: {interactive: ['{program}', '{token}'], headless: ['{program}', '{prompt}']}", "process list"),
        ("install: {manager: curl, program: x}", "manager"),
        ("config: {dir: ../x, env: X}", "cannot hold"),
        ("files: {a: missing.ts}", "missing"),
        ("kinds: {dance: {}}", "unknown kinds"),
    ],
)
def test_bad_descriptors_say_what_is_wrong(edit: str, words: str, tmp_path: Path) -> None:
    raw = yaml.safe_load((THIRD / "adapter.yaml").read_text()) | yaml.safe_load(edit)
    (tmp_path / "adapter.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert words in f"{caught.value} {caught.value.why}"


def test_adapter_code_that_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter.yaml").write_text((THIRD / "adapter.yaml").read_text())
    (tmp_path / "adapter.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(ConfigError, match="does not load"):
        load(tmp_path)


COMMAND = {"id": "c", "kind": "command", "config": {"text": "First $1, second $2, all $ARGUMENTS"}}


def test_positional_arguments_are_counted_from_zero_where_the_agent_does() -> None:
    pi = render(discovery.adapter("pi"), Tree.of([COMMAND])).files["prompts/c.md"].data
    claude = render(discovery.adapter("claude-code"), Tree.of([COMMAND])).files["commands/c.md"].data
    assert b"First $1, second $2, all $ARGUMENTS" in pi and b"First $0, second $1, all $ARGUMENTS" in claude


def test_mcp_in_each_agent_s_own_shape() -> None:
    tree = Tree.of([{"id": "s", "kind": "mcp", "config": {"command": "srv", "args": ["-x"], "env": {"A": "$A"}}}])
    assert json.loads(render(discovery.adapter("pi"), tree).files["mcp.json"].data)["mcpServers"]["s"]["args"] == ["-x"]
    assert render(discovery.adapter("pi"), tree, "0.84.2").skipped[0].reason.startswith("pi takes mcp entries since 0.99")
    assert (
        tomllib.loads(render(discovery.adapter("codex"), tree).files["config.toml"].data.decode())["mcp_servers"]["s"][
            "command"
        ]
        == "srv"
    )
    assert json.loads(render(discovery.adapter("opencode"), tree).files["opencode.json"].data)["mcp"]["s"]["command"] == [
        "srv",
        "-x",
    ]
    claude = render(discovery.adapter("claude-code"), tree)
    assert claude.args == ["--mcp-config", "{config}/reef-mcp.json"]


def test_mini_swe_agent_gets_one_template_with_everything() -> None:
    tree = Tree.of(
        [
            {"id": "r", "kind": "rules", "config": {"text": "No {{ braces }} harmed."}},
            {"id": "s", "kind": "skill", "config": {"description": "d", "text": "Skill text"}},
        ]
    )
    out = render(discovery.adapter("mini-swe-agent"), tree)
    template = yaml.safe_load(out.files["reef.yaml"].data)["agent"]["system_template"]
    assert template.startswith("{% raw %}You are") and "No {{ braces }} harmed." in template and "Skill text" in template
    assert "reef-rules.md" not in out.files


@pytest.mark.parametrize(
    "config",
    [
        {"value": {"defaultProvider": "openai"}},
        {"target": "env", "value": {"LD_PRELOAD": "x"}},
        {"target": "env", "value": {"REEF_BASE_URL": "http://elsewhere"}},
        {"target": "env", "value": {"http_proxy": "http://elsewhere"}},
        {"target": "env", "value": {"PI_TELEMETRY": "1"}},
    ],
)
def test_a_tree_cannot_redirect_the_agent(config: dict[str, object]) -> None:
    with pytest.raises(UnsupportedArtifact, match=r"belongs|sets"):
        render(discovery.adapter("pi"), Tree.of([{"id": "c", "kind": "config", "config": config}]))


def test_admission_refuses_what_would_be_lost_but_not_other_agents_code() -> None:
    pi = discovery.adapter("pi")
    foreign = {"id": "x", "kind": "extension", "config": {"adapter": "opencode", "suffix": "js", "text": "x"}}
    assert admit(pi, Tree.of([foreign])).skipped[0].reason == "for another agent"
    for entry in (
        {"id": "a", "kind": "agent", "config": {"description": "d", "text": "t"}},
        {"id": "x", "kind": "extension", "config": {"adapter": "pi", "suffix": "rb", "text": "x"}},
        {"id": "reef-binding", "kind": "extension", "config": {"adapter": "pi", "suffix": "ts", "text": "x"}},
        {"id": "c", "kind": "config", "config": {"target": "nowhere", "value": {}}},
    ):
        with pytest.raises(UnsupportedArtifact, match="pi cannot take"):
            admit(pi, Tree.of([entry]))


def test_settings_merge_deeply_and_null_deletes() -> None:
    assert formats.merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": None, "e": {"f": None}}, "d": [2]}) == {
        "a": {"c": 2, "e": {}},
        "d": [2],
    }


def test_toml_reads_back() -> None:
    value = {
        "a": 1,
        "b": True,
        "s": 'q"\\\n\x7f🙂',
        "list": [1, "x", {"k": [2.5]}],
        "t": {"empty": {}, "odd key.x": {"v": "w"}},
    }
    assert tomllib.loads(formats.dump("toml", value).decode()) == value


SAMPLES = Path(__file__).parent / "fixtures" / "trajectories"


@pytest.mark.parametrize(
    ("name", "path"),
    [("pi", "sessions/x/a.jsonl"), ("claude-code", "projects/p/a.jsonl"), ("codex", "sessions/2026/rollout-a.jsonl")],
)
def test_trajectories_read_alike(name: str, path: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text((SAMPLES / f"{name}.jsonl").read_text())
    found = discovery.adapter(name).read_trajectory(tmp_path)
    assert [step.role for step in found.steps] == ["user", "assistant", "tool", "assistant"]
    assert found.steps[1].calls[0].arguments == {"command": "ls"} and found.steps[2].call_id == "c" and found.final == "bye"
