"""Ranks started by DeepSpeed's own launcher: on one host, on two by a stand-in for pdsh, and what is refused."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reef_cli.core.errors import ConfigError, TrainerError
from reef_cli.trainer import launcher, protocol
from reef_cli.trainer.handle import TrainerHandle
from reef_cli.trainer.launcher import Hosts, Meeting
from tests.trainer.conftest import TOY, batch, release
from tests.trainer.test_handle import gone

Make = Callable[..., TrainerHandle]
PDSH = """#!/bin/bash
# Runs the command once per host, here, as pdsh runs it there: %n is the host's number.
while [ "$1" != -w ]; do shift; done
hosts=${2//,/ }; shift 2; n=0
for host in $hosts; do echo "on $host" >> "$PDSH_NOTES"; env -u OMP_NUM_THREADS bash -c "${*//%n/$n}" & n=$((n + 1)); done
wait
"""


def hostfile(folder: Path, text: str) -> str:
    (folder / "hosts").write_text(text)
    return str(folder / "hosts")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["localhost slots=2\n", "# two nodes\nlocalhost slots=1\n127.0.0.1 slots=1\n"])
async def test_launched_ranks_make_the_step_of_one(
    make_handle: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    notes = tmp_path / "notes"
    (tmp_path / "pdsh").write_text(PDSH)
    (tmp_path / "pdsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PDSH_NOTES", str(notes))
    plain = replace(TOY, precision="fp32")
    one = await make_handle(settings=plain).train("s", release(), None, None, batch(5), tmp_path / "1")
    handle = make_handle(settings=replace(plain, zero_stage=2, hostfile=hostfile(tmp_path, text)))
    two = await handle.train("s", release(), None, None, batch(5), tmp_path / "2")
    a, b = (load_file(str(c.directory / "adapter_model.safetensors")) for c in (one, two))
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0.02, atol=2e-4)
    assert two.metrics["trained_tokens"] == one.metrics["trained_tokens"]
    nodes = len(text.strip().splitlines()) - text.count("#")
    assert notes.exists() == (nodes > 1) and (nodes == 1 or len(notes.read_text().splitlines()) == nodes)
    again = await handle.train("s", release("lora", 1), two.directory, two.checkpoint, batch(5), tmp_path / "3")
    assert again.metrics["state"] == "resumed" and not list(tmp_path.glob("*.meet"))
    (pid,) = handle.pids
    await handle.stop()
    assert await gone([pid])


@pytest.mark.slow
async def test_a_launcher_that_cannot_start_says_so(make_handle: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = make_handle(
        settings=replace(TOY, hostfile=hostfile(tmp_path, "localhost slots=1\n"), launcher_args=("--nonsense",))
    )
    with pytest.raises(TrainerError, match="DeepSpeed's launcher ended with code 2") as caught:
        await handle.start()
    assert "log" in caught.value.hint and "--nonsense" in handle.log.read_text()


@pytest.mark.parametrize("text", ["", "# none\n", "a\n", "a slots=0\n", "a slots=1\na slots=2\n", "a slots=x\n"])
def test_a_hostfile_the_launcher_would_not_take_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.hostfile"):
        Hosts.read(Path(hostfile(tmp_path, text)))


def test_hosts_are_counted_and_told_from_here(tmp_path: Path) -> None:
    hosts = Hosts.read(Path(hostfile(tmp_path, "# nodes\nnode1 slots=4\n\nnode2 slots=2  # smaller\n")))
    assert (hosts.world_size, hosts.here, list(hosts.slots)) == (6, False, ["node1", "node2"])
    words = launcher.command(hosts, tmp_path / "m", 1234, ["--ssh_port=2222"])
    assert "--master_addr" not in words and "--ssh_port=2222" in words
    with pytest.raises(ConfigError, match="cannot be read"):
        Hosts.read(tmp_path / "none")


async def test_a_stranger_is_turned_away_and_the_file_is_private(tmp_path: Path) -> None:
    hosts = Hosts.read(Path(hostfile(tmp_path, "localhost slots=1\n")))
    meeting, place = Meeting(tmp_path / "m", hosts), tmp_path / "m"
    await meeting.open()
    assert place.stat().st_mode & 0o777 == 0o600
    known = place.read_text()
    place.write_text(known.replace('"token": "', '"token": "not '))
    stranger = await asyncio.to_thread(launcher.connect, place, 0)
    assert await asyncio.to_thread(stranger.recv, 1) == b""
    place.write_text(known)
    welcome = await asyncio.to_thread(launcher.connect, place, 0)
    process = await asyncio.create_subprocess_exec("sleep", "60")
    ((_, writer),) = await meeting.everybody(process, 10)
    writer.write(protocol.encode(protocol.Stop()))
    assert await asyncio.to_thread(protocol.Channel(welcome).receive) == protocol.Stop()
    process.kill()
    await process.wait()
    writer.close()
    await meeting.close()
    assert not place.exists()
