"""Release commands: through a server, straight from the repository, racing, dry, asked and refused."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases.service import ReleaseService
from tests.commands.runner import Reef, shell_at
from tests.control.fake_reef import FakeReef
from tests.learning.world import write_adapter


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


SIDE = {"score": 1.0, "reason": "has 'yes'"}
VERDICT = {
    "reason": "shown better at error rate 0.05: 9 wins, 1 losses, 30 ties on 40 items",
    "suite": {"name": "made.jsonl", "split": "heldout", "items": 60},
    "pairs": 40, "wins": 9, "losses": 1, "ties": 30, "missing": 2,
    "candidate_mean": 0.7, "current_mean": 0.5, "difference": 0.2, "interval": {"low": 0.05, "high": 0.35},
    "guards": {"flags": ["length 10 -> 40 tokens"]},
    "cost": {"calls": 82, "prompt_tokens": 800, "output_tokens": 400, "money": 0.1},
    "samples": [{"id": "q7", "question": "Really?", "candidate": {**SIDE, "text": "yes, \x1b[2Jof course"},
                 "current": {**SIDE, "score": 0.0, "text": "no\nnever"}}],
}  # fmt: skip


BY_A_JOB = {
    "metrics": {"policy_loss": 0.123456, "lag_histogram": {"0": 8}},
    "verdict": {"outcome": "select", "evidence": {name: value for name, value in VERDICT.items() if name != "reason"}},
    "reason": VERDICT["reason"],
    "recipe": "sao",
    "consumed": ["a", "b"],
}
"""Evidence as `learning.runner` writes it."""


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
        (files / "prompt.md").write_text(f"be brief\nprompt {number}\n")
        (files / "data.bin").write_bytes(bytes([0, number]) * 200_000)
        artifact = service.store(files, "harness")
        evidence = BY_A_JOB if hold else {"reason": f"try {number}"}
        draft = Draft(artifact.content_id, "harness", Surface.HARNESS, Operation.TRAINING, "test", evidence)
        if hold:
            service.hold("default", draft, head.release_id)
        else:
            head = service.publish("default", draft, head.release_id)
    return root


def test_offline_the_chain_is_read_from_the_repository(shell: Reef, home: Path) -> None:
    rows = shell("release", "list", "--json").json["releases"]
    assert [row["pending"] for row in rows] == [True, True, False, False]
    assert [(row["surface"], row["release_id"]) for row in rows if row["current"]] == [
        ("harness", rows[2]["release_id"]),
        ("weights", rows[3]["release_id"]),
    ]
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
    assert [file["path"] for file in files] == ["data.bin", "prompt.md"]
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


def test_of_two_surfaces_the_one_meant_is_named(shell: Reef, home: Path, tmp_path: Path) -> None:
    service = ReleaseService(home)
    write_adapter(tmp_path / "adapter", 1)
    adapter = service.store(tmp_path / "adapter", "lora")
    draft = Draft(adapter.content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, "test")
    weights = service.publish("default", draft, None)
    rows = {row["release_id"]: row for row in shell("release", "list", "--json").json["releases"]}
    (harness,) = [name for name, row in rows.items() if row["current"] and row["surface"] == "harness"]
    refused = shell("rollback", "--yes", "--json")
    assert refused.code == 2 and refused.json["error"]["code"] == "ambiguous_surface"
    assert refused.json["error"]["details"]["heads"] == {"weights": weights.release_id, "harness": harness}
    plan = shell("rollback", "--surface", "weights", "--dry-run", "--json").json
    assert (plan["surface"], plan["head"], plan["release_id"][:3]) == ("weights", weights.release_id, "r0-")
    done = shell("rollback", "--surface", "weights", "--yes", "--json").json["release"]
    assert (done["surface"], done["kind"]) == ("weights", "base")
    assert shell("rollback", harness, "--surface", "weights", "--yes").code == 2
    again = shell("rollback", weights.release_id, "--yes", "--json").json
    assert (again["head"], again["release"]["content_id"]) == (done["release_id"], weights.content_id)
    bare = shell("rollback", plan["release_id"], "--expected-head", harness, "--yes", "--json").json
    assert (bare["surface"], bare["release"]["kind"]) == ("harness", "base"), "the head that was seen says which"
    assert shell("release", "verify").out == "default: sound\n"


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


def test_a_diff_reads_like_a_diff(shell: Reef, home: Path) -> None:
    rows = shell("release", "list", "--json").json["releases"]
    lines = shell("release", "diff", rows[2]["release_id"], rows[0]["release_id"]).out.splitlines()
    assert lines[0] == "2 files differ"
    assert lines[1].startswith("changed data.bin (390.6 KiB -> 390.6 KiB, sha256 ") and " -> " in lines[1][40:]
    assert lines[3:] == ["--- a/prompt.md", "+++ b/prompt.md", "@@ -1,2 +1,2 @@", " be brief", "-prompt 1", "+prompt 3"]
    assert shell("release", "diff", rows[0]["release_id"], rows[0]["release_id"]).out == "the contents are the same\n"


def test_a_review_shows_all_there_is_to_decide_by(shell: Reef, home: Path) -> None:
    done = shell("release", "review")
    assert done.code == 0 and "\x1b" not in done.out
    for line in (
        "verdict\tshown better at error rate 0.05: 9 wins, 1 losses, 30 ties on 40 items",
        "suite\tmade.jsonl, heldout, 40 of 60 items",
        "score\t0.700 against 0.500",
        "difference\t0.200 [0.050, 0.350]",
        "missing\t2",
        "warning\tlength 10 -> 40 tokens",
        "cost\t82 calls, 1200 tokens, 0.100 money",
        "q7: Really?",
        "  current, score 0.000:",
        "    yes, of course",
        "learned from\t2 reports",
        "policy_loss\t0.1235",
        "lag_histogram\t0: 8",
        "-prompt 1",
        "+prompt 2",
    ):
        assert line in done.out.splitlines(), line
    rows = shell("release", "list", "--json").json["releases"]
    shown = shell("release", "show", rows[0]["release_id"]).out
    assert "{" not in shown and "pending\tyes" in shown and "difference\t0.200 [0.050, 0.350]" in shown
    assert f"reef release promote {rows[1]['release_id']}" in done.err, "the oldest first"
    found = shell("release", "review", "--json").json["pending"]
    assert [row["release_id"] for row in found] == [rows[1]["release_id"], rows[0]["release_id"]]
    assert found[0]["head"] == rows[2]["release_id"] and len(found[0]["changes"]["files"]) == 2


def on_a_terminal(shell: Reef, answers: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """`script` gives the command a terminal."""
    import shutil

    if shutil.which("script") is None:
        pytest.skip("no script(1) here")
    command = " ".join([sys.executable, "-m", "reef_cli", *words])
    environment = {**shell.env, "TERM": "xterm", "COLUMNS": "100"}
    return subprocess.run(
        ["script", "-qec", command, "/dev/null"], input=answers, cwd=shell.cwd, env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_a_review_on_a_terminal_asks_and_does_it(shell: Reef, home: Path) -> None:
    rows = shell("release", "list", "--json").json["releases"]
    newer, older, head = rows[0], rows[1], rows[2]
    assert on_a_terminal(shell, "q\n", "release", "review").returncode == 0
    assert shell("release", "list", "--json").json["releases"] == rows
    done = on_a_terminal(shell, "x\np\nd\n", "release", "review")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("[p]romote, [d]ismiss, [s]kip, [q]uit") == 3, "an answer that is none is asked again"
    assert "no " in done.stdout and "| yes, of course" in done.stdout, "answers stand side by side"
    after = shell("release", "list", "--json").json["releases"]
    assert after[0]["source_release_id"] == older["release_id"] and after[0]["parent_release_id"] == head["release_id"]
    assert newer["release_id"] not in [row["release_id"] for row in after] and not any(row["pending"] for row in after)
    shown = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("would follow")]
    assert shown == [head["release_id"], after[0]["release_id"]], "the second is compared with the head the first one made"


def test_texts_beside_each_other() -> None:
    from reef_cli.commands.evidence import beside

    lines = beside(["left", "right"], ["one two three", "a\n\nb"], 8)
    assert lines == ["left     | right", "----     | -----", "one two  | a", "three    |", "         | b"]


def test_chains_travel_to_a_repository_and_back(shell: Reef, home: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote.git"
    subprocess.run(["git", "init", "-q", "--bare", str(remote)], check=True)
    assert shell("release", "push", str(remote)).out == "sent default: 3 large files, 1.1 MiB\n"
    assert shell("release", "push", str(remote), "--json").json["objects"] == 0
    before = shell("release", "list", "--json").json["releases"]
    chain = [row["release_id"] for row in before if not row["pending"]]
    assert shell("rollback", chain[-1], "--yes").code == 0
    assert shell("release", "fetch", str(remote), "-s", "default").code == 0, "what is ahead stays"
    assert shell("release", "list", "--json").json["releases"][2]["operation"] == "rollback"
    other = shell_at(tmp_path, REEF_HOME=str(tmp_path / "other"))
    assert other("release", "fetch", str(remote)).out == "fetched default: 3 large files, 1.1 MiB\n"
    assert [row["release_id"] for row in other("release", "list", "--json").json["releases"] if not row["pending"]] == chain
    assert shell("release", "push", str(tmp_path / "nowhere.git")).code == 6
