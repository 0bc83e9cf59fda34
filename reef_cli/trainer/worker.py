"""A trainer process: one rank. Started by `TrainerHandle`, never by hand.

    python -m reef_cli.trainer.worker --fd N | --meet FILE

Reads commands from the inherited socket `N`, or the connection that `FILE` leads to (`launcher`), obeys them one after the
other, and reports. A thread sends a sign of life at least every two seconds, so the server can tell slow from stuck; another
thread reads the socket, so the death of the server (end of file) ends this process at once, even in the middle of a step.
Everything printed goes to the log file the server opened.
"""

import argparse
import faulthandler
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ReefError
from reef_cli.trainer import launcher, protocol
from reef_cli.trainer.protocol import Channel, Done, Failed, Init, Message, Progress, Push, Ready, Score, Stop, Train

ORPHANED = 3
"""Exit code of a trainer whose server died."""


class Pulse:
    """The trainer's sign of life and the phase it is in."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._phase, self._done, self._total = "start", 0, 1
        self._moved = time.monotonic()
        threading.Thread(target=self._beat, daemon=True, name="pulse").start()

    def tick(self, phase: str, done: int, total: int) -> None:
        """The main thread has moved on."""
        self._phase, self._done, self._total = phase, done, total
        self._moved = time.monotonic()
        self._send()

    def _beat(self) -> None:
        while True:
            time.sleep(protocol.HEARTBEAT_S)
            # Nobody reads between calls; a quiet socket cannot fill up.
            if self._phase != "idle":
                self._send()

    def _send(self) -> None:
        idle = time.monotonic() - self._moved
        try:
            self._channel.send(Progress(self._phase, self._done, self._total, idle))
        except OSError:
            os._exit(ORPHANED)


class Inbox:
    """Commands as they arrive; end of file ends the process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="inbox").start()

    def next(self) -> Message:
        return self._queue.get()

    def _read(self) -> None:
        while True:
            message = self._channel.receive()
            if message is None:
                print("the server is gone; leaving", file=sys.stderr, flush=True)
                os._exit(ORPHANED)
            self._queue.put(message)


class Worker:
    """Obeys commands. Heavy imports happen here, after the first sign of life."""

    def __init__(self, init: Init, pulse: Pulse) -> None:
        pulse.tick("import", 0, 1)
        import torch

        from reef_cli.config.schema import TrainerSettings
        from reef_cli.trainer.learner import Learner
        from reef_cli.trainer.process import join_group
        from reef_cli.trainer.push import MIB, Pusher

        self._pulse = pulse
        self.rank = int(os.environ["RANK"])
        settings = TrainerSettings(**init.trainer)
        cuda = settings.device == "cuda"
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        pulse.tick("join", 0, 1)
        join_group(cuda)
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self._learner = Learner(
            Path(init.model_dir), init.program, init.program_settings, settings, init.seed, device, pulse.tick
        )
        self._pusher = Pusher(Path(init.model_dir), device, pulse.tick, settings.bucket_mb * MIB)
        self.facts = {"torch": torch.__version__, "device": str(device), "world_size": settings.world_size, "rank": self.rank}

    def obey(self, command: Message) -> Mapping[str, Any]:
        """The result of one command. Raises `ReefError` for anticipated failures."""
        match command:
            case Train():
                samples = [protocol.sample_from_json(sample) for sample in command.samples]
                base, checkpoint = _path(command.base_directory), _path(command.checkpoint)
                result = self._learner.train(
                    command.scenario, command.base_step, base, checkpoint, samples, Path(command.out), command.reference
                )
                if self._learner.settings.rests:
                    self._learner.rest()
                return result
            case Score():
                samples = [protocol.sample_from_json(sample) for sample in command.samples]
                return {"logprobs": self._learner.score(_path(command.directory), samples)}
            case Push():
                # The engine is pushed what lies on disk, so only rank 0 has anything to do.
                return self._pusher.push(command) if self.rank == 0 else {}
            case _:
                raise ReefError(f"The trainer does not know the command {type(command).__name__}")

    def close(self) -> None:
        self._pusher.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank of Reef's trainer; started by the server.")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--fd", type=int, help="an inherited socket")
    way.add_argument("--meet", type=Path, help="the file that says where the server waits")
    options = parser.parse_args()
    faulthandler.enable()
    if options.meet is None:
        sock = socket.socket(fileno=options.fd)
    else:
        os.environ.setdefault("LOCAL_SIZE", os.environ["WORLD_SIZE"])
        sock = launcher.connect(options.meet, int(os.environ["RANK"]))
    channel = Channel(sock)
    pulse, inbox = Pulse(channel), Inbox(channel)
    init = inbox.next()
    if not isinstance(init, Init):
        channel.send(Failed("The trainer's first command must be init", fatal=True))
        return 2
    try:
        worker = Worker(init, pulse)
    except Exception as error:  # process edge: whatever went wrong at start is told, not only logged
        channel.send(failure(error, fatal=True))
        return 1
    channel.send(Ready(os.getpid(), worker.facts))
    serve(worker, channel, inbox, pulse)
    worker.close()
    return 0


def serve(worker: Worker, channel: Channel, inbox: Inbox, pulse: Pulse) -> None:
    """Obey until told to stop."""
    while True:
        pulse.tick("idle", 0, 1)
        command = inbox.next()
        if isinstance(command, Stop):
            return
        pulse.tick(type(command).__name__.lower(), 0, 1)
        try:
            result = worker.obey(command)
        except Exception as error:  # process edge: a failed command is an answer; the process lives on
            channel.send(failure(error))
            continue
        if worker.rank == 0:
            channel.send(Done(result))


def failure(error: Exception, fatal: bool = False) -> Failed:
    """An exception as a message; out-of-memory errors get a hint that helps."""
    traceback.print_exception(error)
    if isinstance(error, ReefError):
        return Failed(error.message, error.why, error.hint, {"kind": type(error).__name__, **_plain(error.details)}, fatal)
    text = str(error).strip().splitlines()
    why = f"{type(error).__name__}: {text[0] if text else ''}"
    memory = isinstance(error, MemoryError) or "out of memory" in str(error).lower() or "can't allocate memory" in str(error)
    if memory:
        return Failed("The trainer ran out of memory", why, "lower trainer.micro_batch", {"kind": "OutOfMemory"}, fatal)
    return Failed("The trainer failed", why, "see the trainer's log", {"kind": type(error).__name__}, fatal)


def _plain(details: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, str | int | float | bool | None) else str(value) for key, value in details.items()}


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


if __name__ == "__main__":
    # Libraries' non-daemon threads must not keep a stopped trainer alive.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
