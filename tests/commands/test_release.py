"""Release commands: through a server, straight from the repository, racing, dry, asked and refused."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases.service import ReleaseService
from tests.commands.runner import Reef
from tests.control.fake_reef import FakeReef


def test_list_marks_head_and_held(reef: Reef) -> None:
    done = reef("release", "list")
    assert [line.split("\t")[:2] for line in done.out.splitlines()] == [
        ["?", "r3-dddddddd"], ["*", "r2-cccccccc"], ["", "r1-bbbbbbbb"], ["", "r0-aaaaaaaa"],
    ]  # fmt: skip
    assert "reef release promote r3-dddddddd" in done.err
    assert len(reef("release", "list", "--all", "-n", "1", "--json").json["releases"]) == 2
    assert "0.9 against 0.6" in reef("release", "review").out
    assert reef("release", "show", "r1").out.startswith("release_id\tr1-bbbbbbbb")
    assert reef("release", "log").out.count("release r") == 4


def test_promote_sends_the_head_it_saw(reef: Reef, server: FakeReef) -> None:
    done = reef("release", "promote", "r3", "--json")
    assert done.json["applied"] is True
    assert done.json["release"]["release_id"] == "r3-eeeeeeee"
    body = server.asked("POST", "/reef/scenarios/default/promote")[0][1]
    assert body == {"release_id": "r3-dddddddd", "expected_head": "r2-cccccccc"}


def test_dry_run_changes_nothing(reef: Reef, server: FakeReef) -> None:
    assert reef("rollback", "--dry-run").out == "would rollback default from r2-cccccccc to the content of r1-bbbbbbbb\n"
    assert reef("release", "promote", "r3", "--dry-run", "--json").json["applied"] is False
    assert not [request for request in server.requests if request[0] == "POST"]


def test_rollback_alias_goes_to_the_previous_content(reef: Reef, server: FakeReef) -> None:
    assert reef("rollback", "--yes").out == "default serves r3-eeeeeeee\n"
    assert server.asked("POST", "/reef/scenarios/default/rollback")[0][1]["release_id"] == "r1-bbbbbbbb"


def test_a_head_that_moved_is_4_and_named(reef: Reef) -> None:
    done = reef("release", "promote", "r3", "--expected-head", "r1-bbbbbbbb", "--json")
    assert done.code == 4
    assert done.json["error"]["code"] == "head_moved"
    assert done.json["error"]["details"]["head"] == "r2-cccccccc"
    assert "r2-cccccccc" in done.json["error"]["message"]


def test_ambiguous_and_unknown_releases(reef: Reef) -> None:
    assert reef("release", "show", "r").code == 4
    done = reef("release", "show", "r9")
    assert done.code == 3
    assert "reef release list" in done.err


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose chain has r0, r1 at the head, and two held candidates; no server runs."""
    root = tmp_path / ".reef"
    root.mkdir(mode=0o700)
    service = ReleaseService(root)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    head = service.create("default", service.base_artifact(model))
    for number, hold in ((1, False), (2, True), (3, True)):
        files = tmp_path / f"files{number}"
        files.mkdir()
        (files / "prompt.md").write_text(f"prompt {number}")
        artifact = service.store(files, "harness")
        draft = Draft(artifact.content_id, "harness", Surface.HARNESS, Operation.TRAINING, "test", {"reason": f"try {number}"})
        if hold:
            service.hold("default", draft, head.release_id)
        else:
            head = service.publish("default", draft, head.release_id)
    return root


def test_offline_the_chain_is_read_from_the_repository(shell: Reef, home: Path) -> None:
    rows = shell("release", "list", "--json").json["releases"]
    assert [row["pending"] for row in rows] == [True, True, False, False]
    assert [row["release_id"] for row in rows if row["current"]] == [rows[2]["release_id"]]
    assert set(rows[0]) >= {
        "release_id",
        "parent_release_id",
        "content_id",
        "surface",
        "operation",
        "step",
        "recorded_at",
        "evidence",
    }
    assert shell("release", "verify").out == "default: sound\n"
    assert shell("release", "verify", "--json").json["ok"] is True
    files = shell("release", "diff", rows[0]["release_id"], "--json").json["files"]
    assert [file["path"] for file in files] == ["prompt.md"]
    assert shell("release", "list", "-s", "nobody").code == 3


def test_offline_promote_and_rollback_make_new_releases(shell: Reef, home: Path) -> None:
    rows = shell("release", "list", "--json").json["releases"]
    held, head = rows[0], rows[2]
    promoted = shell("release", "promote", held["release_id"], "--yes", "--json").json
    assert promoted["release"]["operation"] == "promote"
    assert promoted["release"]["content_id"] == held["content_id"]
    back = shell("rollback", "--json").json["release"]
    assert back["operation"] == "rollback"
    assert back["content_id"] == head["content_id"]
    assert shell("release", "gc", "--dry-run", "--json").json["dry_run"] is True
    assert shell("release", "gc").code == 2  # deletes, and there is no terminal to ask on


def test_two_promotes_racing_one_wins_the_other_exits_4_naming_the_head(shell: Reef, home: Path) -> None:
    rows = shell("release", "list", "--json").json["releases"]
    head = rows[2]["release_id"]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(shell, "release", "promote", row["release_id"], "--expected-head", head, "--json") for row in rows[:2]
        ]
        done = sorted((run.result() for run in runs), key=lambda run: run.code)
    assert [run.code for run in done] == [0, 4], [run.out for run in done]
    winner = done[0].json["release"]["release_id"]
    assert winner in done[1].json["error"]["message"]
    assert done[1].json["error"]["details"]["head"] == winner


def test_looking_at_an_empty_home_makes_nothing(shell: Reef, tmp_path: Path) -> None:
    assert shell("release", "list").code == 3
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_promote_asks_and_no_means_no(reef: Reef, server: FakeReef) -> None:
    """`script` gives the command a terminal."""
    import shutil

    if shutil.which("script") is None:
        pytest.skip("no script(1) here")
    command = f"{sys.executable} -m reef_cli release promote r3"
    for answer, code, posts in (("n", 130, 0), ("y", 0, 1)):
        done = subprocess.run(
            ["script", "-qec", command, "/dev/null"],
            input=f"{answer}\n",
            cwd=reef.cwd,
            env={**reef.env, "TERM": "xterm"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert "from r2-cccccccc to the content of r3-dddddddd?" in done.stdout
        assert done.returncode == code, done.stdout
        assert len(server.asked("POST", "/reef/scenarios/default/promote")) == posts
