"""Harbor task folders, played for real in the sandbox: right, wrong and cheating answers, and tasks that cannot be run here."""

from pathlib import Path

import pytest

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.errors import ConfigError, SuiteNotFound
from reef_cli.core.types import Outcome
from reef_cli.evaluation import Asker, Gate, Suite, run_suite
from reef_cli.evaluation.harbor import TURNS
from reef_cli.sandbox import bubblewrap

pytestmark = pytest.mark.skipif(bubblewrap.problem() is not None, reason=str(bubblewrap.problem()))
NEW, OLD = "r2-aaaaaaaa", "r1-bbbbbbbb"

TOML = """
schema_version = "1.1"
[task]
name = "acme/{name}"
[metadata]
difficulty = "easy"
tags = ["files"]
{metadata}
[verifier]
timeout_sec = 20.0
env = {{ WANTED = "hello" }}
[agent]
timeout_sec = 40.0
[environment]
memory_mb = 1024
"""
TEST = """#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/hello.txt)" = "$WANTED" ] && [ "$(cat data/seed.txt)" = "7" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
DOCKER = """FROM debian:13-slim
# what the agent finds
WORKDIR /app
ENV GREETING=hello
COPY data ./data
RUN mkdir -p out && \\
    echo ready > out/state
"""
GOOD = ["```bash\ncat out/state\n```", "Now I know.\n```bash\necho $GREETING > hello.txt\n```", "Done."]


@pytest.fixture
def task(tmp_path: Path):
    def make(name="hello", *, test=TEST, docker=DOCKER, solution="echo hello > hello.txt", metadata=""):
        folder = tmp_path / "tasks" / name
        files = {
            "task.toml": TOML.format(name=name, metadata=metadata),
            "instruction.md": f"Write hello to hello.txt ({name}).\n",
            "environment/Dockerfile": docker,
            "environment/data/seed.txt": "7\n",
            "tests/test.sh": test,
            **({"solution/solve.sh": solution} if solution else {}),
        }
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return make


class Player:
    """Answers turn by turn: `scripts[release]` is what it says first, second, and so on."""

    def __init__(self, scripts):
        self.scripts = scripts
        self.seen = []
        self.seeds = []

    async def answer(self, messages, sampling, release):
        from reef_cli.core.ports import Answer

        name = release.release_id
        turn = sum(message["role"] == "assistant" for message in messages)
        self.seen.append((name, turn, messages[-1]["content"]))
        self.seeds.append(sampling.seed)
        said = self.scripts[name]
        return Answer(said[min(turn, len(said) - 1)], 10, "stop", None, 50)


async def play(folder, scripts, release):
    player = Player({NEW: scripts})
    report = await run_suite(player, Suite.load(folder), [release(NEW)], asker=Asker(player, pauses_s=()))
    return report, player


async def test_a_task_is_played_to_its_end_and_scored_by_its_own_tests(task, release):
    report, player = await play(task().parent, GOOD, release)
    (row,) = report.rows
    assert (row.score, row.item) == (1.0, "hello") and "reward 1 after 3 turns" in row.reason
    assert (row.output_tokens, row.prompt_tokens) == (30, 150), "every turn is paid for"
    assert player.seen[1][2] == "exit status 0\nready\n" and len(set(player.seeds)) == 3
    assert report.spent["calls"] == 3


@pytest.mark.parametrize(
    "scripts",
    [
        ["I will not."],
        ["```bash\necho bye > hello.txt\n```", "Done."],
        ["```bash\nmkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt\n```", "Done."],
        ["```bash\necho '#!/bin/bash' > /tests/test.sh\n```", "Done."],
        ["```bash\nexit 3\n```"],
    ],
)
async def test_wrong_and_cheating_answers_get_nothing(task, release, scripts):
    report, player = await play(task(), scripts, release)
    assert [row.score for row in report.rows] == [0.0] and len(player.seen) <= TURNS
    assert report.missing == ()


async def test_a_reward_may_be_partial_and_json(task, release):
    test = """mkdir -p /logs/verifier; echo '{"reward": 0.25}' > /logs/verifier/reward.json"""
    report, _ = await play(task(test=test, solution=""), ["Done."], release)
    assert report.rows[0].score == 0.25


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"solution": "apt-get install hello"}, "its own solution gets reward 0"),
        ({"docker": "FROM x\nRUN false"}, "RUN false failed"),
        ({"docker": "FROM x\nCOPY gone ."}, "nothing to COPY"),
        ({"docker": "FROM x\nWORKDIR /etc/app"}, "it writes to /etc/app"),
        ({"test": "true", "solution": ""}, "the tests left no reward"),
        ({"test": "mkdir -p /logs/verifier; echo 7 > /logs/verifier/reward.txt", "solution": ""}, "left no reward"),
        ({"test": "ln -s /etc/passwd /logs/verifier/reward.txt", "solution": ""}, "left no reward"),
    ],
)
async def test_what_cannot_be_run_here_is_missing_not_failed(task, release, facts, why):
    task("works")
    folder = task("broken", **facts)
    report, _ = await play(folder.parent, GOOD, release)
    assert [row.item for row in report.rows] == ["works"]
    assert len(report.missing) == 1 and why in report.missing[0][2], report.missing


async def test_the_gate_compares_on_tasks(task, release):
    plain = {"solution": "", "docker": "FROM x\nCOPY data ./data"}
    folders = [task(f"t{number}", **plain) for number in range(10)]
    player = Player({NEW: ["```bash\necho hello > hello.txt\n```", "Done."], OLD: ["Done."]})
    suite = Suite.load(folders[0].parent)
    gate = Gate(player, suite, EvaluationSettings(concurrency=2), asker=Asker(player, pauses_s=()))
    verdict = await gate.gate("s", release(NEW), release(OLD))
    assert verdict.outcome is Outcome.SELECT and verdict.evidence["wins"] == verdict.evidence["pairs"]


def test_a_folder_of_tasks_is_a_suite(task):
    task("b", metadata='split = "development"\nmust_not_regress = true')
    folder = task("a").parent
    suite = Suite.load(folder)
    assert [(item.id, item.split, item.anchor, item.tags) for item in suite.items] == [
        ("a", "heldout", False, ("files",)),
        ("b", "development", True, ("files",)),
    ]
    assert suite.items[0].messages[0]["content"].startswith("Write hello")
    before = suite.digest
    (folder / "a" / "tests" / "test.sh").write_text("true")
    assert Suite.load(folder).digest != before, "the digest covers the tests too"


def test_what_is_no_task_is_named(task, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SuiteNotFound, match="no tasks"):
        Suite.load(tmp_path / "empty")
    for path, text in (
        ("task.toml", "= broken"),
        ("environment/Dockerfile", "FLY me"),
        ("environment/docker-compose.yaml", "x: 1"),
    ):
        folder = task("bad")
        (folder / path).write_text(text)
        with pytest.raises(ConfigError, match="bad"):
            Suite.load(folder)
        (folder / path).unlink()
    folder = task("bad", metadata='split = "training"')
    with pytest.raises(ConfigError, match="split"):
        Suite.load(folder)
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"tests/test\.sh"):
        Suite.load(folder)
