"""YAML blocks are configurations that load; JSON blocks are JSON."""

import json
from pathlib import Path

import pytest

from reef_cli.config.load import load
from tests.docs.pages import Block, blocks, files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files the pages spell out."""
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_blocks_load(block: Block, folder: Path) -> None:
    if "recipes.liked" in block.text:
        pytest.skip("test_example_recipe loads it in a process of its own")
    file = folder / "serve.yaml"
    file.write_text(block.text, encoding="utf-8")
    loaded = load([], {"PROVIDER_KEY": "k", "REEF_TOKEN": "t"}, file)
    assert any(origin.startswith(str(file)) or "serve.yaml" in origin for origin in loaded.origins.values())


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_blocks_parse(block: Block) -> None:
    assert json.loads(block.text)
