"""Training that cannot fit is refused before anything starts; training that may not fit is a warning."""

from dataclasses import replace
from pathlib import Path

import pytest

from reef_cli.config.schema import Settings, StorageSettings, TrainerSettings
from reef_cli.core.errors import ConfigError
from reef_cli.supervisor import room
from reef_cli.supervisor.room import room_for

CPU = Settings(trainer=TrainerSettings(device="cpu"))


def test_what_fits_says_what_it_takes(tiny_model: Path, tmp_path: Path) -> None:
    found = room_for(CPU, tiny_model, tmp_path / "not" / "made")
    assert found.warning is None
    assert "of the machine's memory per rank" in str(found)


def test_weights_that_exceed_the_machine_are_refused(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "machine_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="training cannot fit") as caught:
        room_for(CPU, tiny_model, tmp_path)
    assert "zero_stage 3" in (caught.value.hint or "")


def test_a_tight_machine_is_a_warning(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "machine_memory", lambda: 200 * 1024**2)
    assert "lower trainer.micro_batch" in (room_for(CPU, tiny_model, tmp_path).warning or "")


def test_many_checkpoints_on_a_full_disk_are_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    hoarder = replace(CPU, storage=StorageSettings(keep_checkpoints=10**9))
    assert "lower storage.keep_checkpoints" in (room_for(hoarder, tiny_model, tmp_path).warning or "")


def test_ranks_share_the_gpus_the_driver_shows(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA A, 81559'\necho 'NVIDIA B, 40000'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = Settings(trainer=TrainerSettings(world_size=4))
    found = room_for(settings, tiny_model, tmp_path)
    assert (found.place, found.memory) == ("GPU", 40000 * 1024**2 // 2)
