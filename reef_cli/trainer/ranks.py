"""The trainer's processes as the server sees them: start, messages, death with its cause, and a sure end.

Promises: every rank runs in its own session and dies with the server (its socket closes), exits are explained (code,
signal, memory, the log's last lines), and `kill` leaves nothing behind. Everything here is asyncio; nothing blocks the
loop.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from reef_cli.core.errors import TrainerError
from reef_cli.trainer import protocol
from reef_cli.trainer.launcher import Hosts, Meeting, command, environment, spawn
from reef_cli.trainer.process import rank_environment
from reef_cli.trainer.protocol import Message

TAIL_LINES = 15
_OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")


class Rank:
    """One process and the server's end of its socket. Frames are read by a task of their own, so waiting can be cancelled."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self.writer = writer
        self._inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._pump = asyncio.create_task(self._read(reader))

    async def send(self, message: Message) -> None:
        self.writer.write(protocol.encode(message))
        await self.writer.drain()

    async def receive(self) -> Message | None:
        """The next message; None when the process is gone, also when asked again."""
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
        return message

    async def close(self) -> None:
        """Close the socket and reap the process, which must be dying."""
        self.writer.close()
        await self.process.wait()
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = protocol.HEADER.unpack(await reader.readexactly(protocol.HEADER.size))
                self._inbox.put_nowait(protocol.decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError, TrainerError):
            # A frame that cannot be read is as final as the end of the socket.
            self._inbox.put_nowait(None)


class RankGroup:
    """All ranks of one trainer."""

    def __init__(self, ranks: list[Rank], log: Path) -> None:
        self.ranks = ranks
        self._log = log
        self._kills_before = _oom_kills()

    @classmethod
    async def start(cls, world_size: int, threads: int, cuda: bool, log: Path) -> "RankGroup":
        """Start the processes; they import and load on their own and say `Ready` later."""
        port = _free_port()
        group = cls([], log)
        with _open_log(log) as sink:
            for rank in range(world_size):
                env = rank_environment(os.environ, rank=rank, world_size=world_size, port=port, threads=threads, cuda=cuda)
                group.ranks.append(await _spawn(env, sink))
        return group

    @classmethod
    async def launch(
        cls, hosts: Hosts, threads: int, cuda: bool, log: Path, extra: Sequence[str], limit_s: float
    ) -> "RankGroup":
        """Have DeepSpeed's launcher start them on all hosts; one process here stands for all. Raises `TrainerError`."""
        group, port, place = cls([], log), _free_port(), log.with_name("trainer.meet")
        meeting = Meeting(place, hosts)
        await meeting.open()
        rank = rank_environment(os.environ, rank=0, world_size=hosts.world_size, port=port, threads=threads, cuda=cuda)
        env = environment(rank, log.with_name("trainer.env"))
        try:
            with _open_log(log) as sink:
                process = await spawn(command(hosts, place, port, extra), env, sink)
            try:
                came = await meeting.everybody(process, limit_s)
            except BaseException:
                _signal_session(process.pid, signal.SIGKILL)
                await process.wait()
                raise
        finally:
            await meeting.close()
        group.ranks = [Rank(process, reader, writer) for reader, writer in came]
        return group

    @property
    def pids(self) -> list[int]:
        return list(dict.fromkeys(rank.process.pid for rank in self.ranks))

    async def send(self, message: Message) -> None:
        """The same command to every rank. A dead rank is noticed when its answer is awaited, not here."""
        for rank in self.ranks:
            try:
                await rank.send(message)
            except (ConnectionError, RuntimeError):
                continue

    async def death(self, rank: Rank) -> TrainerError:
        """Why a rank that closed its socket is gone."""
        code = None
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                code = await rank.process.wait()
        tail = await asyncio.to_thread(log_tail, self._log)
        return describe_death(code, tail, _oom_kills() > self._kills_before)

    async def kill(self) -> None:
        """SIGKILL every rank's session and wait; also after they have ended."""
        for rank in self.ranks:
            _signal_session(rank.process.pid, signal.SIGKILL)
        await asyncio.gather(*(rank.close() for rank in self.ranks))

    async def stop(self, grace_s: float) -> None:
        """Ask them to leave; kill those that have not within `grace_s`."""
        await self.send(protocol.Stop())
        if grace_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.gather(*(rank.process.wait() for rank in self.ranks))
        await self.kill()


async def _spawn(env: dict[str, str], sink: IO[bytes]) -> Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "reef_cli.trainer.worker", "--fd", str(theirs.fileno()),
            env=env, pass_fds=(theirs.fileno(),), start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink,
        )  # fmt: skip
    reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
    return Rank(process, reader, writer)


def describe_death(code: int | None, tail: str, oom_killed: bool) -> TrainerError:
    """An exit as an error: what happened, why as far as known, what to do."""
    details: dict[str, Any] = {"exit_code": code, "log_tail": tail}
    if code is None:
        return TrainerError("The trainer closed its socket but does not end", hint="see the trainer's log", **details)
    if code >= 0:
        return TrainerError(
            f"The trainer exited with code {code}", why=_last_line(tail), hint="see the trainer's log", **details
        )
    name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
    if oom_killed and -code == signal.SIGKILL:
        why = "the kernel killed it because the memory limit was reached"
    elif -code == signal.SIGKILL:
        why = "something killed it; most often that is the system running out of memory"
    else:
        why = _last_line(tail)
    hint = "lower trainer.micro_batch or free memory" if -code == signal.SIGKILL else "see the trainer's log"
    return TrainerError(f"The trainer was killed by {name}", why=why, hint=hint, signal=name, **details)


def log_tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of the log file."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - 16_384))
            return "\n".join(handle.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _last_line(tail: str) -> str:
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _open_log(log: Path) -> IO[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return log.open("ab")


def _signal_session(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _oom_kills() -> int:
    """How many processes of this container the kernel has killed for memory; 0 where it does not say."""
    try:
        fields = dict(line.split() for line in _OOM_EVENTS.read_text().splitlines())
        return int(fields.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
