"""Files and recipes for the tests of configuration."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RECIPE = '''
from dataclasses import dataclass
from typing import Literal

from reef_cli.learning.contract import RecipeSettings


@dataclass(frozen=True, slots=True)
class ToySettings(RecipeSettings):
    """Settings of a toy."""

    lr: float = 1e-3
    """Step size."""

    flavour: Literal["sweet", "sour"] = "sweet"
    """Taste of the loss."""

    def __post_init__(self) -> None:
        if self.lr > 1:
            raise ValueError("lr must be at most 1")


class ToyRecipe:
    """Learns nothing, slowly."""

    name = "toy"
    title = "A toy"
    settings_type = ToySettings

    def __init__(self, settings):
        self.settings = settings
'''


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write `serve.yaml` in the working folder; returns its relative path, as a person would type it."""
    monkeypatch.chdir(tmp_path)

    def put(text: str) -> Path:
        (tmp_path / "serve.yaml").write_text(text, encoding="utf-8")
        return Path("serve.yaml")

    return put


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with modules of its own, found as a person's recipes are; forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    (tmp_path / "toykit.py").write_text(RECIPE, encoding="utf-8")
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith(("toykit", "brokenkit", "heavykit", "needykit")):
            del sys.modules[name]
