"""Real engines for these tests, started by the product's own command lines: SGLang on the CPU, and the embedded one."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import orjson

from reef_cli.config.schema import EngineSettings
from reef_cli.engines import launch
from reef_cli.engines.client import EngineClient
from reef_cli.engines.process import Launch
from reef_cli.weights.group import free_port

VARIABLE = "REEF_TEST_SGLANG"
"""The interpreter of an environment with SGLang; without it the tests of this folder are not collected."""
LIMIT_S = 600.0
CPU: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "max_total_tokens": 8192,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
}
"""What SGLang 0.5.23 needs to be told on a machine without accelerator."""
CPU_LORA: Mapping[str, Any] = {**CPU, "lora_backend": "torch_native"}


def python() -> str:
    return os.environ[VARIABLE]


def settings(kind: str, model: Path, *, adapters: bool = True, **native: Any) -> EngineSettings:
    """`reef serve`'s settings for one engine of a test."""
    flags = {**(CPU_LORA if adapters else CPU), **native}
    return EngineSettings(
        kind=kind,  # type: ignore[arg-type]
        model=str(model),
        threads=1,
        max_running_requests=8,
        max_lora_rank=16,
        python=python() if kind == "sglang" else None,
        sglang=flags if kind == "sglang" else {},
        start_timeout_s=LIMIT_S,
    )


class Running:
    """One engine process with its keys."""

    def __init__(self, kind: str, made: Launch) -> None:
        self.kind, self.launch, self.url = kind, made, made.url
        self._log = made.log_path.open("ab")
        self.process = subprocess.Popen(
            made.command, stdout=self._log, stderr=self._log, env=os.environ | dict(made.env), start_new_session=True
        )

    def client(self) -> EngineClient:
        return EngineClient(self.url, self.launch.api_key, self.launch.admin_key)

    def wait(self) -> "Running":
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.words()
            try:
                if self.get("/model_info").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"{self.kind} did not start: {self.words()}")

    def words(self) -> str:
        return self.launch.log_path.read_text(errors="replace")[-3000:]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=_bearer(self.launch.api_key), timeout=LIMIT_S)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """A control call."""
        return httpx.post(self.url + path, json=body or {}, headers=_bearer(self.launch.admin_key), timeout=LIMIT_S)

    def reply(self, body: Mapping[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json=dict(body), headers=_bearer(self.launch.api_key), timeout=LIMIT_S)

    def generate(self, ids: list[int], path: str | None = None, rid: str | None = None, **sampling: Any) -> dict[str, Any]:
        """Greedy unless told otherwise."""
        reply = self.reply(asked(ids, path, rid, **sampling))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def under_way(self, ids: list[int], tokens: int = 3, rid: str | None = None, **sampling: Any) -> "Flight":
        """A request that has produced some tokens already."""
        return Flight(self, asked(ids, None, rid, **sampling) | {"stream": True}, tokens)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        self._log.close()


class Flight:
    """A streamed request in a thread; its chunks are joined whatever form they come in."""

    def __init__(self, engine: Running, body: Mapping[str, Any], tokens: int) -> None:
        self.last: dict[str, Any] = {}
        self._begun, self._tokens = threading.Event(), tokens
        self._thread = threading.Thread(target=self._run, args=(engine, body), daemon=True)
        self._thread.start()
        assert self._begun.wait(LIMIT_S), "the request made no tokens"

    def _run(self, engine: Running, body: Mapping[str, Any]) -> None:
        headers = _bearer(engine.launch.api_key)
        with (
            suppress(httpx.TransportError),  # an engine that ended answers no more, which `meta` tells
            httpx.stream("POST", f"{engine.url}/generate", json=dict(body), headers=headers, timeout=LIMIT_S) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    self.last = orjson.loads(line[6:])
                    if self.last["meta_info"]["completion_tokens"] >= self._tokens:
                        self._begun.set()
        self._begun.set()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def meta(self) -> dict[str, Any]:
        """Facts of the whole answer, once it is there."""
        self._thread.join(LIMIT_S)
        assert self.done and self.last["meta_info"]["finish_reason"], self.last
        return self.last["meta_info"]


def asked(ids: list[int], path: str | None = None, rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 16, **sampling}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    return body | ({"lora_path": path} if path else {}) | ({"rid": rid} if rid else {})


def scores(engine: Running, ids: list[int], path: str | None = None) -> list[float]:
    """Log-probs of the prompt's own tokens: what the weights think, whatever would be sampled."""
    reply = engine.reply(asked(ids, path, max_new_tokens=1) | {"logprob_start_len": 0})
    assert reply.status_code == 200, reply.text
    return [entry[0] for entry in reply.json()["meta_info"]["input_token_logprobs"][1:]]


def apart(one: list[float], two: list[float]) -> float:
    """Mean difference in nats."""
    return sum(abs(a - b) for a, b in zip(one, two, strict=True)) / len(one)


def facts(reply: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Token ids and their log-probs."""
    return list(reply["output_ids"]), [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


@contextmanager
def running(kind: str, model: Path, folder: Path, *, adapters: bool = True, **native: Any) -> Iterator[Running]:
    """A ready engine over a model folder."""
    chosen = settings(kind, model, adapters=adapters, **native)
    log = folder / f"{kind}.log"
    if kind == "embedded":
        made = launch.embedded(chosen, model, free_port(), log)
    else:
        whole = launch.Whole(changes=True)
        made = launch.sglang(chosen, model, free_port(), log, folder / "config.yaml", adapters=adapters, whole=whole)
    engine = Running(kind, made)
    try:
        yield engine.wait()
    finally:
        engine.stop()


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
