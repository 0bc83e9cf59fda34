"""The harness service over the real release chain."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import (
    AdapterNotFound,
    ConfigError,
    InvalidRequest,
    ProposalConflict,
    ReleaseNotFound,
    UnsupportedArtifact,
)
from reef_cli.core.types import Draft, Operation, Release, Surface
from reef_cli.harness import discovery, install
from reef_cli.harness.service import HarnessService
from reef_cli.harness.tree import Tree, serialise
from reef_cli.releases.service import ReleaseService
from tests.harness.test_install import shell


def rule(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "kind": "rules", "config": {"text": text, **more}}


@pytest.fixture
def chain(tmp_path: Path) -> ReleaseService:
    return ReleaseService(tmp_path / "reef", lfs="never")


@pytest.fixture
def service(chain: ReleaseService) -> HarnessService:
    return HarnessService(
        chain, page_secret=b"k" * 32, model=lambda scenario: f"model-of-{scenario}", adapters=lambda: discovery.adapters({})
    )


def publish(
    chain: ReleaseService,
    service: HarnessService,
    *entries: Mapping[str, Any],
    held: bool = False,
    evidence: Mapping[str, Any] | None = None,
) -> Release:
    artifact = service.store(Tree.of(entries))
    head = chain.head("s", Surface.HARNESS)
    if head is None:
        return chain.create("s", artifact)
    draft = Draft(artifact.content_id, "harness", Surface.HARNESS, Operation.TRAINING, "test", evidence or {})
    return chain.hold("s", draft, head.release_id) if held else chain.publish("s", draft, head.release_id)


def test_trees_survive_the_store_with_run_bits(chain: ReleaseService, service: HarnessService) -> None:
    skill = {
        "id": "go",
        "kind": "skill",
        "config": {"description": "d", "text": "t\r\n", "files": {"run.sh": {"text": "x", "executable": True}}},
    }
    publish(chain, service, skill)
    fresh = HarnessService(chain, page_secret=b"k" * 32)
    assert fresh.tree("s") == Tree.of([skill])
    assert fresh.tree("s").get("go").extra["run.sh"].executable


def test_manifest_order_and_held_releases(chain: ReleaseService, service: HarnessService) -> None:
    assert service.manifest("s")["release_id"] is None and service.manifest("s")["entries"] == []
    first = publish(chain, service, rule("a", "one"))
    second = publish(chain, service, rule("a", "two"), rule("b", "new"))
    held = publish(chain, service, rule("a", "three"), held=True)
    found = service.manifest("s")
    assert found["release_id"] == second.release_id and found["changed"] == "changed rules a (text); added rules b"
    rows = service.releases("s")
    assert [row["release_id"] for row in rows][:2] == [first.release_id, second.release_id] and rows[0]["step"] < rows[1][
        "step"
    ]
    assert [row["current"] for row in rows if row["pending"]] == [False] and rows[1]["current"]
    assert service.manifest("s", first.release_id)["entries"] == [rule("a", "one")]
    assert service.payload("s", "native", "http://h:1")["release_id"] == second.release_id
    assert service.manifest("s", held.release_id)["entries"] == [rule("a", "three")]
    with pytest.raises(ReleaseNotFound):
        service.manifest("s", "r9-00000000")
    assert [item["op"] for item in service.diff("s", first.release_id, second.release_id)] == ["update", "create"]


def test_a_manifest_is_also_the_canonical_folder_by_path(chain: ReleaseService, service: HarnessService) -> None:
    assert (service.manifest("s")["artifact_version"], list(service.manifest("s")["files"])) == ("", ["tree.json"])
    files = {"a.sh": {"text": "x\r\n", "executable": True}, "b.bin": {"base64": "//8="}}
    skill = {"id": "go", "kind": "skill", "config": {"description": "d", "text": "How.", "files": files}}
    made = publish(chain, service, skill)
    found = service.manifest("s")
    written = {path: file.data for path, file in serialise(Tree.of([skill])).items()}
    assert found["artifact_version"] == made.release_id == service.releases("s")[-1]["artifact_version"]
    assert found["binary_files"] == ["skill/go/files/b.bin"]
    assert {path: text.encode() for path, text in found["files"].items()} | {"skill/go/files/b.bin": b"\xff\xff"} == written


def test_the_page_escapes_everything_and_needs_its_key(chain: ReleaseService, service: HarnessService) -> None:
    publish(chain, service, rule("a", "calm"))
    nasty = '<script>alert(1)</script> @BODY@ & "q"'
    release = publish(chain, service, rule("a", nasty), evidence={"reason": nasty, "wins": 3})
    text = service.page("s", release.step)
    assert "<script" not in text and "&lt;script&gt;" in text and "@BODY@" in text.replace("&#64;", "@")
    assert "http-equiv" in text and text.count("</html>") == 1 and "src=" not in text and "wins" in text
    key = service.page_key("s")
    assert (
        service.opens_page("s", key)
        and not service.opens_page("t", key)
        and not service.opens_page("s", "")
        and not service.opens_page("s", "ü")
    )
    assert key in service.releases("s")[0]["page"]
    with pytest.raises(ReleaseNotFound):
        service.page("s", 99)


def test_install_script_end_to_end(
    chain: ReleaseService, service: HarnessService, env: dict[str, str], home: Path, gateway: Any
) -> None:
    plain = publish(chain, service, rule("a", "plain"))
    publish(chain, service, rule("a", "needy", requires=[{"kind": "env", "name": "FOO"}]))
    done = shell(service.install_script("s", "native", gateway.url), env)
    assert done.returncode == 3 and f"release {plain.release_id} needs nothing" in done.stderr
    done = shell(service.install_script("s", "native", gateway.url, plain.release_id), env)
    assert done.returncode == 0 and plain.release_id in done.stderr
    spec = service.payload("s", "native", "https://reef.example/base/")
    assert spec["gateway"] == "https://reef.example/base" and spec["model"] == "model-of-s"
    for bad in ("javascript:x", "http://h/'x", "http:// h", ""):
        with pytest.raises(InvalidRequest):
            service.payload("s", "native", bad)
    with pytest.raises(AdapterNotFound):
        service.payload("s", "nobody", gateway.url)
    with pytest.raises(ConfigError):
        service.payload("s", "pi@0.1", gateway.url)


def test_adapters_are_listed(service: HarnessService) -> None:
    rows = {row["name"]: row for row in service.adapters()}
    assert (
        rows["pi"]["versions"] == ["1.6.0", "0.84.2"]
        and rows["codex"]["dialect"] == "responses"
        and "extension" not in rows["codex"]["kinds"]
    )


def test_proposals_are_admitted_carried_over_or_refused(chain: ReleaseService, service: HarnessService) -> None:
    old = publish(chain, service, rule("a", "one"), rule("b", "one"))
    new = publish(chain, service, rule("a", "two"), rule("b", "one"))
    proposal = service.propose("s", {"op": "update", "entry": rule("b", "better")}, old.release_id, "because")
    assert [entry.text for entry in proposal.tree] == ["two", "better"] and proposal.onto == new.release_id
    assert proposal.wire()["changed"] == "changed rules b (text)"
    with pytest.raises(ProposalConflict) as caught:
        service.propose("s", {"op": "update", "entry": rule("a", "mine")}, old.release_id)
    assert caught.value.details["head"] == new.release_id and caught.value.status == 409
    for bad, error in (
        ([], InvalidRequest),
        ([{"op": "remove", "id": "a"}] * 51, InvalidRequest),
        ({"op": "update", "entry": rule("a", "two")}, InvalidRequest),
        ({"op": "create", "entry": rule("c", "key sk-" + "a1" * 20)}, UnsupportedArtifact),
        (
            {
                "op": "create",
                "entry": {"id": "c", "kind": "skill", "config": {"description": "d", "text": "t", "files": {"../x": "y"}}},
            },
            UnsupportedArtifact,
        ),
    ):
        with pytest.raises(error):
            service.propose("s", bad)
    assert service.current("s").release_id == new.release_id


def test_pull_edit_compare_propose(chain: ReleaseService, service: HarnessService, tmp_path: Path) -> None:
    publish(chain, service, rule("a", "one"))
    entries = service.manifest("s")["entries"]
    install.pull(entries, tmp_path / "t")
    assert install.compare(entries, tmp_path / "t") == []
    (tmp_path / "t/rules/a/text.md").write_text("two")
    (edit,) = install.compare(entries, tmp_path / "t")
    assert service.propose("s", edit.wire()).tree.get("a").text == "two"
    with pytest.raises(UnsupportedArtifact):
        install.pull(entries, tmp_path / "t")
