"""Ranks on several hosts, started by DeepSpeed's own launcher from a hostfile; they come back to the server over TCP.

The launcher's processes inherit no socket, so the server listens, writes address and a random token into a file that only this
user can read, and every rank reads it: the home must lie on a file system that all hosts see, as checkpoints need anyway. A
rank whose connection ends exits at once, on whatever host it is. Imports no torch.
"""

import asyncio
import hmac
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from reef_cli.core.errors import ConfigError, TrainerError
from reef_cli.trainer import protocol
from reef_cli.trainer.protocol import Hello

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LOCAL = ("localhost", "127.0.0.1", "::1")
_LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?")
_HERE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
_THERE = (
    "DS_ACCELERATOR",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "PYTHONUNBUFFERED",
)
"""What remote ranks need of the environment beside what the launcher brings itself (`NCCL*`, `PYTHON*`)."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """A hostfile: slots by host, in its order."""

    file: Path
    slots: Mapping[str, int]

    @property
    def world_size(self) -> int:
        return sum(self.slots.values())

    @property
    def here(self) -> bool:
        """Whether all of them are this machine."""
        return all(host in LOCAL for host in self.slots)

    @classmethod
    def read(cls, file: Path) -> "Hosts":
        """Raises `ConfigError` for what the launcher would not take."""
        try:
            lines = [line.strip() for line in file.expanduser().read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise ConfigError(f"trainer.hostfile {file} cannot be read", why=str(error), key="trainer.hostfile") from error
        slots: dict[str, int] = {}
        for line in lines:
            if not line or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None or match[1] in slots or int(match[2]) < 1:
                raise ConfigError(
                    f"trainer.hostfile {file} has the line {line!r}", hint="one `HOST slots=N` per host", key="trainer.hostfile"
                )
            slots[match[1]] = int(match[2])
        if not slots:
            raise ConfigError(
                f"trainer.hostfile {file} names no host", hint="one `HOST slots=N` per host", key="trainer.hostfile"
            )
        return cls(file.expanduser().absolute(), slots)


def command(hosts: Hosts, meeting: Path, port: int, extra: Sequence[str] = ()) -> list[str]:
    """DeepSpeed's launcher over the hosts, each rank a `reef_cli.trainer.worker`; `extra` are flags of the launcher's own."""
    place = ["--master_addr", "127.0.0.1", "--no_ssh_check"] if hosts.here else []
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hosts.file), *place, "--master_port", str(port)),
        *("--no_local_rank", *extra, "--module", "reef_cli.trainer.worker", "--meet", str(meeting)),
    ]


def environment(base: Mapping[str, str], file: Path) -> dict[str, str]:
    """The launcher's environment, from that of a rank; writes what remote ranks get of it into `file`."""
    env = {name: value for name, value in base.items() if name not in _HERE}
    file.write_text("".join(f"{name}={env[name]}\n" for name in _THERE if name in env), encoding="utf-8")
    return env | {"DS_ENV_FILE": str(file)}


class Meeting:
    """Where the ranks of one launch come to. Those that do not know its token are turned away."""

    def __init__(self, file: Path, hosts: Hosts) -> None:
        self._file, self._hosts = file, hosts
        self._token = secrets.token_hex(24)
        self._came: dict[int, Streams] = {}
        self._all = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        address = "127.0.0.1" if self._hosts.here else _address_towards(next(h for h in self._hosts.slots if h not in LOCAL))
        self._server = await asyncio.start_server(self._greet, address, 0, limit=1 << 20)
        port = self._server.sockets[0].getsockname()[1]
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"address": address, "port": port, "token": self._token}, file)

    async def everybody(self, process: asyncio.subprocess.Process, limit_s: float) -> list[Streams]:
        """The ranks' connections, in order. Raises `TrainerError` when the launcher ends, or they take too long."""
        ended, met = asyncio.create_task(process.wait()), asyncio.create_task(self._all.wait())
        try:
            await asyncio.wait({ended, met}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if met.done():
                return [self._came[rank] for rank in range(self._hosts.world_size)]
            missing = sorted(set(range(self._hosts.world_size)) - set(self._came))
            how = f"ended with code {process.returncode}" if ended.done() else f"brought no ranks {missing} in {limit_s:g} s"
            raise TrainerError(f"DeepSpeed's launcher {how}", hint="see the trainer's log")
        finally:
            for task in (ended, met):
                task.cancel()

    async def close(self) -> None:
        """Let nobody in any more; connections that came stay."""
        self._file.unlink(missing_ok=True)
        if self._server is not None:
            self._server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(20):
                (length,) = protocol.HEADER.unpack(await reader.readexactly(protocol.HEADER.size))
                hello = protocol.decode(await reader.readexactly(min(length, 1 << 16)))
        except (asyncio.IncompleteReadError, TimeoutError, ConnectionError, TrainerError):
            hello = None
        if not isinstance(hello, Hello) or not self._expected(hello):
            writer.close()
            return
        self._came[hello.rank] = (reader, writer)
        if len(self._came) == self._hosts.world_size:
            self._all.set()

    def _expected(self, hello: Hello) -> bool:
        known = hmac.compare_digest(hello.token.encode(), self._token.encode())
        return known and 0 <= hello.rank < self._hosts.world_size and hello.rank not in self._came


async def spawn(words: Sequence[str], env: Mapping[str, str], sink: IO[bytes]) -> asyncio.subprocess.Process:
    """The launcher, in a session of its own with all it starts here."""
    return await asyncio.create_subprocess_exec(
        *words,
        env=env,
        start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sink,
        stderr=sink,
    )


def connect(meeting: Path, rank: int) -> socket.socket:
    """A rank's connection to its server, for `--meet`. Raises `TrainerError`."""
    try:
        place = json.loads(meeting.read_text(encoding="utf-8"))
        sock = socket.create_connection((place["address"], place["port"]), timeout=30)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.sendall(protocol.encode(Hello(rank, place["token"])))
    except (OSError, ValueError, KeyError) as error:
        raise TrainerError(
            f"Rank {rank} does not reach its server",
            why=str(error),
            hint="the home must lie on a file system that all hosts see, and the server's address be reachable from them",
        ) from error
    return sock


def _address_towards(host: str) -> str:
    """This machine's address on the way to another host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; only picks a route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TrainerError(f"No route to {host} of trainer.hostfile", why=str(error)) from error
