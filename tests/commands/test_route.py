"""`reef route` without a server: policies straight from the home's repository, and what the command says of them."""

import json
from pathlib import Path

import pytest

from reef_cli.commands.route import told
from reef_cli.commands.status import _row
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases import ReleaseService
from tests.commands.runner import Reef
from tests.releases.conftest import write_safetensors


@pytest.fixture
def releases(tmp_path: Path) -> list[str]:
    """A home with a head and a held release; no server runs. The ids, the head first."""
    root = tmp_path / ".reef"
    root.mkdir(mode=0o700)
    service = ReleaseService(root)
    for name in ("model", "files"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    facts = {"peft_type": "LORA", "base_model_name_or_path": "tiny", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "files" / "adapter_config.json").write_text(json.dumps(facts))
    write_safetensors(tmp_path / "files" / "adapter_model.safetensors", {"base_model.model.q_proj.lora_A.weight": b"1234"})
    head = service.create("default", service.base_artifact(tmp_path / "model"))
    artifact = service.store(tmp_path / "files", "lora")
    draft = Draft(artifact.content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, "test")
    return [head.release_id, service.hold("default", draft, head.release_id).release_id]


def test_offline_a_policy_is_set_shown_and_cleared(shell: Reef, releases: list[str]) -> None:
    head, held = releases
    plan = shell("route", "set", "--canary", held[:4], "--share", "0.25", "--dry-run")
    assert plan.out == f"would set the routing to head 0.75, {held} 0.25, judged on reports of default, over none\n"
    done = shell("route", "set", "--canary", held[:4], "--share", "0.25", "--shadow", head, "--json").json
    assert done["applied"] is True and done["release"]["operation"] == "route" and done["head"] == "none"
    view = shell("route", "show", "--json").json
    assert view["shares"] == {head: 0.75, held: 0.25} and view["shadow"] == head and view["policy"]["auto"]["alpha"] == 0.05
    stale = shell("route", "clear", "--expected-head", "none", "--json")
    assert stale.code == 4 and stale.json["error"]["details"]["head"] == done["release"]["release_id"]
    cleared = shell("route", "clear")
    assert "the head serves everything" in cleared.out and "next: reef route show" in cleared.err
    log = shell("route", "log").out.splitlines()
    assert [line.split("\t")[0] for line in log] == ["*", ""] and log[1].endswith("judged on reports")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("set",), 2),
        (("set", "--pin", "r0", "--canary", "r1"), 2),
        (("set", "--pin", "r9-00000000"), 3),
        (("show", "-s", "nobody"), 3),
        (("shadows",), 6),
    ],
)
def test_what_cannot_be_done_says_why(shell: Reef, releases: list[str], words: tuple[str, ...], code: int) -> None:
    done = shell("route", *words, "--json")
    assert done.code == code and done.json["error"]["message"]


def test_policies_in_words() -> None:
    shadow = {"shadow": {"release_id": "r2-b", "share": 1.0}}
    assert told({}) == "the head serves everything" and told({"pin": "r1-a", **shadow}) == "pin r1-a, shadow r2-b"
    assert _row({"name": "s", "head": "r3-c", "routing": {"pin": "r1-a"}})[2] == "r3-c (routed)"
    assert _row({"name": "s", "head": "r3-c", "routing": {}})[2] == "r3-c"
