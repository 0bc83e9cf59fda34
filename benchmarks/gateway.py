"""What the gateway costs per recorded request: CPU, latency and rate of pass-through, beside a plain aiohttp pass-through.

Run: `python -m benchmarks.gateway [--seconds 2] [--out benchmarks/results/gateway.json]`. Four processes on loopback: a stub
provider (bare asyncio protocol), the server under test, a plain aiohttp proxy that records nothing, and a load generator. Both
servers run in turn on the same core, the others on another. CPU is the server process's own, from `/proc/<pid>/stat`;
wall times on a shared machine wander, CPU does less. Figures are medians over the rounds.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

ROLES = ("reef", "plain", "stub")
TOKEN = "benchmark-token"
CHUNKS = 200
TICK = os.sysconf("SC_CLK_TCK")


def whole_answer() -> bytes:
    message = {"role": "assistant", "content": "word " * 60}
    usage = {"prompt_tokens": 200, "completion_tokens": 60, "total_tokens": 260}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    body = orjson.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def chunked(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


def stream_answer() -> list[bytes]:
    """200 deltas as separate writes, each one HTTP chunk."""
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    frames = [
        {**head, "choices": [{"index": 0, "delta": {"content": f"word{i} "}, "finish_reason": None}]} for i in range(CHUNKS)
    ]
    frames.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    out = [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"]
    out += [chunked(b"data: " + orjson.dumps(frame) + b"\n\n") for frame in frames]
    return [*out, chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"]


class Stub(asyncio.Protocol):
    """Answers a POST as soon as its body is whole."""

    answer = whole_answer()
    stream = stream_answer()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.buffer = b""
        self.tasks: set[asyncio.Task[None]] = set()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, mark, body = self.buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        self.buffer = b""
        if b'"stream":true' not in body:
            self.transport.write(self.answer)
            return
        task = asyncio.get_running_loop().create_task(self.run())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self) -> None:
        for part in self.stream:
            self.transport.write(part)
            await asyncio.sleep(0)


async def serve_stub(_: str) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def serve_plain(upstream: str) -> None:
    """The least an aiohttp proxy does: forward the body, forward the answer as it comes."""
    import aiohttp
    from aiohttp import web

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:

        async def proxy(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.post(upstream + request.path, data=raw, headers=headers) as answer:
                if answer.content_type == "application/json":
                    return web.Response(body=await answer.read(), content_type="application/json")
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", proxy)
        await listen(web.AppRunner(app, access_log=None))


async def serve_reef(upstream: str) -> None:
    """The real application over the real log; only the release is a fixed one."""
    import aiohttp
    from aiohttp import web

    from reef_cli.config.schema import ReefSettings
    from reef_cli.core.ids import ContentId, ReleaseId
    from reef_cli.core.types import Operation, Release, Surface
    from reef_cli.experience.log import ExperienceLog
    from reef_cli.gateway.app import build_app
    from reef_cli.gateway.auth import TokenBook
    from reef_cli.gateway.backends.upstream import UpstreamBackend
    from reef_cli.gateway.deps import Deps
    from reef_cli.telemetry.metrics import Metrics

    release = Release(
        ReleaseId("r0-00000000"),
        "bench",
        None,
        ContentId("sha256:0"),
        "base",
        Surface.WEIGHTS,
        Operation.CREATION,
        0,
        0.0,
        "bench",
    )

    class Fixed:
        async def resolve(self, scenario: str, pin: str | None, session: str | None) -> Release:
            return release

    with tempfile.TemporaryDirectory() as home:
        log = ExperienceLog.open(Path(home) / "experience.db")
        await log.scenarios.ensure("default", None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            facts: dict[str, Any] = {
                "releases": None,
                "publishing": Fixed(),
                "backend": UpstreamBackend(upstream, "openai", None, session),
            }
            tokens, metrics = TokenBook([TOKEN]), Metrics()
            deps = Deps(
                settings=ReefSettings(), engine_kind="upstream", model="m", log=log, tokens=tokens, metrics=metrics, **facts
            )
            try:
                await listen(web.AppRunner(build_app(deps), access_log=None))
            finally:
                log.close()


async def listen(runner: Any) -> None:
    from aiohttp import web

    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


class Load(asyncio.Protocol):
    """One connection that sends a request as soon as the last answer is whole; latencies in seconds."""

    def __init__(self, request: bytes, until: float) -> None:
        self.request = request
        self.until = until
        self.latencies: list[float] = []
        self.firsts: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.buffer = bytearray()
        self.started = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if not self.buffer:
            self.firsts.append(time.perf_counter() - self.started)
        self.buffer += data
        if not self.whole():
            return
        assert self.buffer.startswith(b"HTTP/1.1 200"), bytes(self.buffer[:500])
        self.latencies.append(time.perf_counter() - self.started)
        if time.perf_counter() < self.until:
            self.send()
        else:
            self.done.set_result(None)
            self.transport.close()

    def whole(self) -> bool:
        if self.buffer.endswith(b"0\r\n\r\n"):
            return True
        head, mark, _ = bytes(self.buffer[:4096]).partition(b"\r\n\r\n")
        lowered = head.lower()
        if not mark or b"content-length:" not in lowered:
            return False
        return len(self.buffer) - len(head) - 4 >= int(lowered.split(b"content-length:")[1].split(b"\r\n", 1)[0])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


async def load(port: int, body: bytes, connections: int, seconds: float) -> tuple[list[float], list[float]]:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    until = time.perf_counter() + seconds
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: Load(head.encode() + body, until), "127.0.0.1", port) for _ in range(connections)
    ]
    await asyncio.gather(*(one.done for _, one in made))
    return [x for _, one in made for x in one.latencies], [x for _, one in made for x in one.firsts]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def process(role: str, core: int, upstream: str = "") -> Iterator[tuple[int, int]]:
    """A server in its own process, pinned to a core: `(pid, port)`."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gateway", "--role", role, "--upstream", upstream], stdout=subprocess.PIPE
    )
    try:
        os.sched_setaffinity(child.pid, {core})
        assert child.stdout is not None
        yield child.pid, int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()


def prompt(size: int, stream: bool) -> bytes:
    words = " ".join(f"word{i}" for i in range(size // 6))[:size]
    return orjson.dumps(
        {"model": "m", "messages": [{"role": "user", "content": words}], **({"stream": True} if stream else {})}
    )


def measure(pid: int, port: int, body: bytes, connections: int, seconds: float) -> dict[str, float]:
    """One closed-loop round."""
    before = cpu_seconds(pid)
    started = time.perf_counter()
    latencies, firsts = asyncio.run(load(port, body, connections, seconds))
    wall = time.perf_counter() - started
    spent = cpu_seconds(pid) - before
    latencies.sort()
    return {
        "cpu_us_per_request": 1e6 * spent / len(latencies),
        "requests_per_s": len(latencies) / wall,
        "requests_per_cpu_s": len(latencies) / spent if spent else 0.0,
        "p50_ms": 1e3 * statistics.median(latencies),
        "p99_ms": 1e3 * latencies[int(len(latencies) * 0.99)],
        "first_byte_p50_ms": 1e3 * statistics.median(firsts),
        "requests": float(len(latencies)),
    }


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


CASES = [(f"{kb} KB, {c} connections", kb * 1024, False, c) for kb in (1, 100) for c in (1, 16)]
CASES += [(f"stream of {CHUNKS} chunks, {c} connections", 1024, True, c) for c in (1, 16)]


def run(seconds: float, rounds: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    server_core, other_core = cores[0], cores[-1]
    os.sched_setaffinity(0, {other_core})
    results: dict[str, Any] = {}
    with process("stub", other_core) as (_, stub_port):
        url = f"http://127.0.0.1:{stub_port}"
        with process("reef", server_core, url) as reef, process("plain", server_core, url) as plain:
            for name, size, stream, connections in CASES:
                body = prompt(size, stream)
                found: dict[str, list[dict[str, float]]] = {"reef": [], "plain": []}
                for _ in range(rounds):
                    for server, (pid, port) in (("reef", reef), ("plain", plain)):
                        measure(pid, port, body, connections, seconds / 5)
                        found[server].append(measure(pid, port, body, connections, seconds))
                results[name] = {server: median(values) for server, values in found.items()}
                if stream:
                    for values in results[name].values():
                        values["cpu_us_per_chunk"] = round(values["cpu_us_per_request"] / CHUNKS, 3)
                print(name, json.dumps(results[name]), file=sys.stderr)
            results["rss_mb"] = {"reef": round(rss_mb(reef[0]), 1), "plain": round(rss_mb(plain[0]), 1)}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--upstream", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        asyncio.run({"reef": serve_reef, "plain": serve_plain, "stub": serve_stub}[args.role](args.upstream))
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    result = {"commit": commit, "machine": machine, "load_before": os.getloadavg()[0], "cases": run(args.seconds, args.rounds)}
    text = json.dumps(result, indent=2) + "\n"
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
