"""The wheel is whole: installed alone into an empty folder it runs, with its recipes, adapters and templates."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import reef_cli
from tests.e2e.server import clean_environment

ROOT = Path(reef_cli.__file__).parents[1]
PARTS = ("reef_cli", "recipes", "adapters", "templates", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder the wheel was installed into; built from a copy, so that the source tree stays as it is."""
    base = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        source, target = ROOT / part, base / "tree" / part
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(base), str(base / "tree"))
    (wheel,) = base.glob("reef_cli-*.whl")
    pip = ("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(base / "site"), str(wheel))
    run(sys.executable, *pip)
    return base / "site"


def run(*words: str, cwd: Path | None = None, **extra: str) -> str:
    ended = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=clean_environment(**extra), timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    reef = str(installed / "bin" / "reef")
    assert reef_cli.__version__ in run(reef, "--version", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "sao" in run(reef, "recipe", "list", cwd=tmp_path, PYTHONPATH=str(installed))


def test_the_installed_package_has_its_parts(installed: Path, tmp_path: Path) -> None:
    script = (
        "import reef_cli, recipes.sao.recipe as sao; from reef_cli.harness.discovery import *\n"
        "print(reef_cli.__file__); print(sao.__file__)\n"
    )
    paths = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert all(Path(path).is_relative_to(installed) for path in paths), paths
    shown = run(str(installed / "bin" / "reef"), "recipe", "show", "sao", "--json", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "max_staleness" in shown


@pytest.mark.parametrize("part", ["recipes", "adapters", "templates"])
def test_every_file_of_a_part_is_in_the_wheel(installed: Path, part: str) -> None:
    target = installed / part if part == "recipes" else installed / "reef_cli" / "_data" / part
    tracked = subprocess.run(["git", "ls-files", part], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [Path(name).relative_to(part) for name in tracked if (ROOT / name).exists()]
    assert files and not [str(file) for file in files if not (target / file).is_file()]
