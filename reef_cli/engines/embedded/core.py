"""The engine's one torch thread: admission, steps, pauses, and commands between steps.

Everything that touches the model happens here; other threads hand in requests and functions and get futures back. A step runs
every decoding request plus at most `chunk` prompt tokens, so a long prompt never stalls the others for long. While paused,
requests wait inside the queue, in order, and none is lost. A failing step ends the requests in it and nothing else.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from reef_cli.engines.embedded.model import Model
from reef_cli.engines.embedded.request import Request
from reef_cli.engines.embedded.seats import Seats
from reef_cli.engines.embedded.steps import compute

Mode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], Any]
    future: "Future[Any]"
    alone: bool


class Core:
    """Owns the thread. `load` makes the model inside it; `version` labels the tokens made from now on."""

    def __init__(self, load: Callable[[], Model], version: str, max_running: int, chunk: int = 256) -> None:
        self._load = load
        self.version = version
        self._max_running = max_running
        self._chunk = chunk
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._closing = False
        self._epoch = 0
        self.paused: Mode | None = None
        self.steps = 0
        self.model: Model
        self._seats: Seats
        self._thread = threading.Thread(target=self._main, name="torch", daemon=True)
        self._started: Future[Model] = Future()

    def start(self) -> Model:
        """Load the model; blocks until it is there or raises what loading raised."""
        self._thread.start()
        return self._started.result()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(10)

    # From any thread

    def submit(self, request: Request) -> None:
        with self._wake:
            self._waiting.append(request)
            self._wake.notify()

    def call(self, run: Callable[[], T], alone: bool = False) -> "Future[T]":
        """Run a function between steps; `alone` first lets running requests end (admitting none), unless paused."""
        future: Future[T] = Future()
        with self._wake:
            self._commands.append(_Command(run, future, alone))
            self._wake.notify()
        return future

    def load_figures(self) -> dict[str, int]:
        """Queue lengths for status pages; a racy read on purpose."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "cached_tokens": self._seats.cached_tokens,
            "steps": self.steps,
        }

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    # Commands: run in the thread through `call`

    def pause(self, mode: Mode) -> None:
        if mode == "abort":
            self.abort(lambda _: True, "Aborted by pause_generation")
        elif mode == "retract":
            self._retract()
        self.paused = mode

    def _retract(self) -> None:
        with self._wake:
            for request in reversed(self._running):
                self._seats.discard(request)
                request.filled, request.retractions = 0, request.retractions + 1
                self._waiting.appendleft(request)
            self._running = []

    def resume(self) -> None:
        self.paused = None

    def requests(self) -> list[Request]:
        """Every request that has not ended."""
        with self._wake:
            return [*self._running, *self._waiting]

    def abort(self, chosen: Callable[[Request], bool], message: str) -> None:
        """End the chosen requests, waiting or running, with what they have."""
        for request in [each for each in self.requests() if chosen(each)]:
            request.abort(message)
            self._drop(request)

    def flush(self) -> bool:
        """Forget every held prefix; False, and nothing changes, while requests hold keys."""
        if self._running:
            return False
        self._seats.forget()
        self.model.slots.release()
        return True

    def weights_changed(self) -> None:
        """Keys made before and after a change never mix in a later request."""
        self._epoch += 1
        self._seats.forget()

    # The thread

    def _main(self) -> None:
        try:
            self.model = self._load()
            self._seats = Seats(self.model.slots.count, self.model.slots.copy)
        except BaseException as error:  # whatever stops the load belongs to the thread that asked for it
            self._started.set_exception(error)
            return
        self._started.set_result(self.model)
        while self._wait():
            self._obey()
            if self.paused is None:
                self._advance()

    def _wait(self) -> bool:
        with self._wake:
            while not (self._closing or self._commands or (self.paused is None and self.busy)):
                self._wake.wait()
            return not self._closing

    def _obey(self) -> None:
        """Run the commands that may run now, in order; one that must be alone holds back those behind it of its kind."""
        held: list[_Command] = []
        while self._commands:
            command = self._commands.popleft()
            if command.alone and (held or (self._running and self.paused is None)):
                held.append(command)
            elif command.future.set_running_or_notify_cancel():
                _settle(command)
        with self._wake:
            self._commands.extendleft(reversed(held))

    def _advance(self) -> None:
        if not any(command.alone for command in list(self._commands)):
            self._admit()
        if not self._running:
            return
        try:
            touched = compute(self.model, self._seats, self._running, self._chunk, self.version)
        except Exception as error:  # a broken step must cost its own requests only, whatever torch raised
            log.exception("step failed")
            touched = list(self._running)
            for request in touched:
                request.abort(f"engine error: {error}", 500)
                self._seats.discard(request)
        self.steps += 1
        self._publish(touched)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting[0]
            wish = request.wish
            number = wish.adapter.number if wish.adapter else 0
            limit = request.length - 1
            if wish.return_logprob and wish.logprob_start_len >= 0:
                limit = min(limit, wish.logprob_start_len)
            if self._seats.take(request, (number, self._epoch), limit) is None:
                return
            if not request.output_ids:
                request.cached_tokens = request.filled
            self._waiting.popleft()
            self._running.append(request)

    def _publish(self, touched: Sequence[Request]) -> None:
        for request in touched:
            if request.finish is not None:
                self._drop(request)
            else:
                request.report()

    def _drop(self, request: Request) -> None:
        self._seats.leave(request)
        if request in self._running:
            self._running.remove(request)
        else:
            with self._wake:
                self._waiting.remove(request)
        request.report()


def _settle(command: _Command) -> None:
    try:
        command.future.set_result(command.run())
    except Exception as error:  # handed to whoever waits on the future, of whatever kind it is
        command.future.set_exception(error)
