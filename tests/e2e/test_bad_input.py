"""What is wrong is said in three lines with the right exit code, and nothing that was there before is lost."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import reef_cli
from reef_cli.core.errors import StorageError
from reef_cli.releases.service import ReleaseService
from tests.doubles.upstream import Upstream
from tests.e2e.server import SAO, Server, clean_environment, reef, serving, stopped, until


def fails(code: int, *words: str, **environment: str) -> str:
    """A `serve` that must end by itself; what it said: `error:`, and at most one line of why and one of what to do."""
    ended = reef("serve", "--reef.port", "0", *words, **environment)
    assert ended.returncode == code, ended.stdout + ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("reef: ")]
    assert lines[0].startswith("error: ") and len(lines) <= 3, ended.stderr
    assert all(line.startswith(("  why: ", "  fix: ")) for line in lines[1:]), ended.stderr
    return ended.stderr


def home_of(folder: Path) -> list[str]:
    return ["--reef.home", str(folder / "h")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("reef:\n  batch_sise: 4\n  recipe: recipes.sao.recipe:SAORecipe\n", ["batch_sise", "batch_size"]),
        ("engine:\n  modell: x\n", ["modell", "model"]),
        ("engin:\n  model: x\n", ["engin", "engine"]),
        ("reef: [1\n", ["serve.yaml"]),
        ("reef:\n  port: 1\n  port: 2\n", ["port", "2", "3"]),
        ("reef:\n  durability: perhaps\n", ["durability", "perhaps"]),
    ],
)
def test_configuration(tmp_path: Path, text: str, told: list[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    said = fails(2, "-c", str(file), *home_of(tmp_path))
    assert all(word in said for word in told), said
    assert not (tmp_path / "h" / "experience.db").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere.yaml" in fails(2, "-c", str(tmp_path / "nowhere.yaml"), *home_of(tmp_path))


def test_the_file_in_force_is_that_of_the_working_directory(double: Upstream, tmp_path: Path) -> None:
    """Where Reef is installed lies another file of the same name."""
    installed, here = tmp_path / "site", tmp_path / "here"
    installed.mkdir(), here.mkdir()
    for name in ("reef_cli", "recipes", "adapters", "templates"):
        (installed / name).symlink_to(Path(reef_cli.__file__).parents[1] / name)
    for folder in (installed, here):
        (folder / "x.yaml").write_text(f"reef:\n  default_scenario: from-{folder.name}\n")
    settings = {"engine.kind": "upstream", "engine.url": double.url}
    server = Server(tmp_path / "h", settings, config=Path("./x.yaml"), prefix=["env", "-C", str(here)])
    with stopped(server):
        server.start(PYTHONPATH=str(installed)).ready()
        assert [row["name"] for row in server.get("/reef/scenarios")["scenarios"]] == ["from-here"]
        server.stop()
        (here / "x.yaml").unlink()
        server.start(PYTHONPATH=str(installed))
        assert server.ended() == 2
        assert "error: no config file x.yaml" in server.output.read_text()


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    assert "recipes.nothing" in fails(3, "--reef.recipe", "recipes.nothing:Recipe", *home_of(tmp_path))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    said = fails(3, *home_of(tmp_path), "--engine.model", str(tmp_path / "no-model"), REEF_CACHE=str(tmp_path / "cache"))
    assert "no-model" in said


def test_a_port_that_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = fails(4, *home_of(tmp_path), "--engine.model", str(tiny_model), "--reef.port", port)
    assert port in said and str(os.getpid()) in said


LIMITED = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
"""Runs a command that cannot write files beyond a size: to it the disk is full. Python ignores SIGXFSZ, so writes fail."""


@pytest.fixture
def other_disk() -> Iterator[Path]:
    """A folder on another file system than the home's."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("needs a second file system")
    with tempfile.TemporaryDirectory(dir=memory, prefix="reef-test-") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_full_disk_while_publishing_loses_nothing(tiny_model: Path, tmp_path: Path, other_disk: Path) -> None:
    """A trained adapter cannot be stored: the job says so, the old head serves, and with room again the samples train.

    Large files lie on another disk, so that storing copies what the trainer wrote instead of linking it.
    """
    wide = {"trainer.rank": "768", "engine.max_lora_rank": "768"}
    with serving(tmp_path / "h", tiny_model, **SAO, **wide) as server:
        server.scored(2)
        until(lambda: server.ledger.settled() == 1, "the first step", 240)
        head = server.head()
        large = server.home / "releases.git" / "lfs"
        shutil.move(large, other_disk / "lfs")
        large.symlink_to(other_disk / "lfs")
        # The adapter has 3.6 MB; the database stays below the limit. Only the server is limited, not the trainer.
        unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))
        ids = server.scored(2)
        failed = until(lambda: [job for job in server.ledger.jobs() if job["state"] == "failed"], "the job's failure", 240)
        assert failed[0]["reason"].startswith(f"{StorageError.code}: "), failed
        assert server.head() == head == server.ask("still here").headers["x-reef-release-id"]
        assert not ReleaseService(server.home).verify("default")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, unlimited)
        until(lambda: set(server.ledger.samples().values()) == {"consumed"}, "the reports being trained", 240)
        until(lambda: server.head() != head, "their release")
        assert sorted(server.releases()[0]["evidence"]["consumed"]) == sorted(ids)


def test_a_store_without_room_leaves_nothing_behind(adapters: list[Path], tmp_path: Path) -> None:
    """The same at the release store itself: a typed error, and the home is as it was."""
    script = (
        "import sys; from pathlib import Path; from reef_cli.core.errors import StorageError\n"
        "from reef_cli.releases.service import ReleaseService\n"
        "try: ReleaseService(Path(sys.argv[1])).store(Path(sys.argv[2]), 'lora')\n"
        "except StorageError as error: print(error.code, error.message); sys.exit(error.exit_code)\n"
    )
    words = [sys.executable, "-c", LIMITED, "4096", sys.executable, "-c", script, str(tmp_path / "h"), str(adapters[0])]
    (tmp_path / "h").mkdir()
    ended = subprocess.run(words, capture_output=True, text=True, env=clean_environment(), check=False, timeout=60)
    assert ended.returncode == 1 and "storage" in ended.stdout, ended.stdout + ended.stderr
    left = [path for path in (tmp_path / "h").rglob("*") if path.is_file() and path.stat().st_size >= 4096]
    assert not left
    service = ReleaseService(tmp_path / "h")
    assert service.directory(service.store(adapters[0], "lora").content_id) is not None


@pytest.mark.slow
def test_a_trainer_out_of_memory_is_reported_and_serving_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    """The kernel ends what takes too much memory with SIGKILL, in the middle of a step."""
    with serving(tmp_path / "h", tiny_model, **SAO) as server:
        head = server.head()
        ids = server.scored(2)
        (pid,) = until(server.trainer_pids, "the trainer's start", every_s=0.02)
        os.kill(pid, signal.SIGKILL)
        failed = until(lambda: [job for job in server.ledger.jobs() if job["state"] == "failed"], "the failure")
        assert "killed by SIGKILL" in failed[0]["reason"], failed
        assert server.ask("meanwhile").headers["x-reef-release-id"] == head
        until(lambda: set(server.ledger.samples().values()) == {"consumed"}, "the reports being trained again", 240)
        assert sorted(server.releases()[0]["evidence"]["consumed"]) == sorted(ids)
