"""The servers a gateway benchmark compares, each a process of its own on one core: Reef, a plain proxy, and reef-infra.

`reef` is the real `reef serve` with an upstream engine. The plain proxy is the least an aiohttp proxy does and records nothing.
reef-infra is installed from PyPI into a virtual environment that is kept for the next run.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.loopback import TOKEN, cpu_seconds, rss_mb, running

INFRA = "reef-infra==0.0.2"
_PATIENCE_S = 180.0
"""How long a server may take to start; much, since the machine may be busy."""
_INFRA_STACK = """
reef:
  recipe: recipe
  host: 127.0.0.1
  port: {port}
  token: {token}
  upstream_url: {url}
  upstream_model: m
  upstream_api: openai
  artifact_repository: {home}/artifacts.git
  artifact_work_dir: {home}/work
  artifact_cache_dir: {home}/cache
  agent_record_dir: {home}/records
services:
  - name: reef
    command: {python} -m reef.service
"""


class Unavailable(Exception):
    """The server cannot be measured here; the words say why."""


@dataclass(frozen=True)
class Server:
    """A server under test. `ready_s` is from its start to its first readiness, `start_cpu_s` what that took of CPU."""

    pid: int
    port: int
    ready_s: float
    start_cpu_s: float
    rss_at_start_mb: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def stub(core: int) -> Iterator[Server]:
    """The provider, which can be measured itself: what clients see when nothing stands between."""
    words = [sys.executable, "-c", "import asyncio; from benchmarks.loopback import serve_stub; asyncio.run(serve_stub())"]
    with running(words, core, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield Server(child.pid, int(child.stdout.readline()), 0.0, 0.0, rss_mb(child.pid))


@contextlib.contextmanager
def reef(url: str, core: int, durability: str = "process") -> Iterator[Server]:
    """`reef serve` over the provider, with a fresh home."""
    with tempfile.TemporaryDirectory() as home, _log() as log:
        started = time.perf_counter()
        words = [sys.executable, "-m", "reef_cli", "serve", "--reef.home", home, "--reef.port", "0"]
        words += ["--reef.durability", durability, "--engine.kind", "upstream", "--engine.url", url, "--engine.model", "m"]
        with running(words, core, stderr=log, env={**os.environ, "REEF_TOKEN": TOKEN}) as child:
            port = _port_in(log, child)
            yield _ready(child.pid, port, started, "/readyz")


@contextlib.contextmanager
def plain(url: str, core: int) -> Iterator[Server]:
    """The plain proxy."""
    started = time.perf_counter()
    with running([sys.executable, "-m", "benchmarks.plain_proxy", url], core, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield _ready(child.pid, int(child.stdout.readline()), started, "/readyz")


@contextlib.contextmanager
def raw(url: str, core: int) -> Iterator[Server]:
    """The relay of bytes; without a request of its own there is no readiness to wait for."""
    started = time.perf_counter()
    with running([sys.executable, "-m", "benchmarks.raw_relay", url], core, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        yield Server(child.pid, port, round(time.perf_counter() - started, 3), cpu_seconds(child.pid), rss_mb(child.pid))


@contextlib.contextmanager
def infra(url: str, core: int) -> Iterator[Server]:
    """reef-infra, recording each request with a full sync. Raises `Unavailable`."""
    python = _infra_python()
    with tempfile.TemporaryDirectory() as home, _log() as log:
        stack, port = Path(home) / "stack.yaml", _free_port()
        stack.write_text(_INFRA_STACK.format(port=port, token=TOKEN, url=url, home=home, python=python))
        started = time.perf_counter()
        words = [str(python.with_name("reef")), "serve", "-c", str(stack)]
        with running(words, core, stdout=log, stderr=log, cwd=home) as child:
            try:
                _wait(port, "/healthz", child)
                (service,) = _children(child.pid)
            except (Unavailable, ValueError) as error:
                raise Unavailable(f"{INFRA} did not start: {_text(log)[-500:]}") from error
            yield _ready(service, port, started, "/healthz")


def _infra_python() -> Path:
    """The interpreter of the environment with reef-infra, made on first use."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "reef" / "benchmarks" / INFRA
    python = folder / "bin" / "python"
    if not (folder / "bin" / "reef").exists():
        made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
        if made.returncode == 0:
            words = [str(python), "-m", "pip", "install", "--quiet", INFRA]
            made = subprocess.run(words, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise Unavailable(f"{INFRA} cannot be installed: {made.stderr.strip()[-500:]}")
    return python


def _log() -> "tempfile._TemporaryFileWrapper[str]":
    return tempfile.NamedTemporaryFile("w+", suffix=".log")


def _text(log: "tempfile._TemporaryFileWrapper[str]") -> str:
    return Path(log.name).read_text()


def _port_in(log: "tempfile._TemporaryFileWrapper[str]", child: "subprocess.Popen[str]") -> int:
    """The port in Reef's banner."""
    until = time.perf_counter() + _PATIENCE_S
    while time.perf_counter() < until and child.poll() is None:
        _, mark, rest = _text(log).partition(" at http://127.0.0.1:")
        if mark:
            return int(rest.split()[0])
        time.sleep(0.005)
    raise RuntimeError(f"reef serve did not start: {_text(log)}")


def _ready(pid: int, port: int, started: float, path: str) -> Server:
    _wait(port, path, None)
    return Server(pid, port, round(time.perf_counter() - started, 3), round(cpu_seconds(pid), 2), round(rss_mb(pid), 1))


def _wait(port: int, path: str, child: "subprocess.Popen[str] | None") -> None:
    until = time.perf_counter() + _PATIENCE_S
    while time.perf_counter() < until and (child is None or child.poll() is None):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                return
        except OSError:
            time.sleep(0.005)
    raise Unavailable(f"nothing answers at port {port}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
