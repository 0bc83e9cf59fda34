"""The same control call to several engines at once, beside a collective they must meet, with the engine named that failed."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from reef_cli.core.errors import EngineError
from reef_cli.trainer.http import EngineHttp

Engines = Sequence[EngineHttp]


def start_all(
    engines: Engines, path: str, body: Mapping[str, Any] | Sequence[Mapping[str, Any]], limit: float
) -> "list[Future[Any]]":
    """Begin a call to every engine, with one body for all or one for each."""
    bodies = [body] * len(engines) if isinstance(body, Mapping) else body
    return [_in_thread(_post(engine, path, each, limit)) for engine, each in zip(engines, bodies, strict=True)]


def ask_all(engines: Engines, path: str, body: Mapping[str, Any], limit: float) -> list[Any]:
    """Every engine's answer; raises the first failure after all have answered."""
    answers = start_all(engines, path, body, limit)
    faults = [fault for answer in answers if (fault := answer.exception(limit + 5)) is not None]
    if faults:
        raise faults[0]
    return [answer.result() for answer in answers]


def _post(engine: EngineHttp, path: str, body: Mapping[str, Any], limit: float) -> Callable[[], Any]:
    def call() -> Any:
        try:
            return engine.post(path, body, limit)
        except EngineError as error:
            error.details["engine"] = engine.url
            error.message = f"{error.message} ({engine.url})"
            raise

    return call


def _in_thread(call: Callable[[], Any]) -> "Future[Any]":
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="engine-call").start()
    return future
