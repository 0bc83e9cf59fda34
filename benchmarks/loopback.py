"""What benchmarks of a server share: a stub provider, closed-loop clients, and a process's own CPU, memory and descriptors.

Everything is bare asyncio protocols on loopback sockets, so that little of what is measured is the measuring. Requests differ
from each other in every word, as users' do, and carry a serial number.
"""

import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

TOKEN = "benchmark-token"
CHUNKS = 200
GAP_S = 0.002
"""Between the chunks of a timed stream."""
_SERIAL = b"00000000"
_SENT = b'"content":"at '

# The provider


def whole_answer() -> bytes:
    message = {"role": "assistant", "content": "word " * 60}
    usage = {"prompt_tokens": 200, "completion_tokens": 60, "total_tokens": 260}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    body = orjson.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _frame(delta: dict[str, str], finish: str | None = None) -> bytes:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    payload = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return _chunked(b"data: " + orjson.dumps(payload) + b"\n\n")


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_STREAM_END = _frame({}, "stop") + _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Stub(asyncio.Protocol):
    """Answers a POST as soon as its body is whole: at once, as 200 writes, or as 200 writes 2 ms apart that say when."""

    answer = whole_answer()
    frames = tuple(_frame({"content": f"word{number} "}) for number in range(CHUNKS))

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.buffer = b""
        self.tasks: set[asyncio.Task[None]] = set()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, mark, body = self.buffer.partition(b"\r\n\r\n")
        if not mark or len(body) < _length(head):
            return
        self.buffer = b""
        if b'"stream":true' not in body and b'"stream": true' not in body:
            self.transport.write(self.answer)
            return
        work = self.timed() if b'"user":"timed"' in body or b'"user": "timed"' in body else self.quick()
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def quick(self) -> None:
        self.transport.write(_STREAM_HEAD)
        for frame in self.frames:
            self.transport.write(frame)
            await asyncio.sleep(0)
        self.transport.write(_STREAM_END)

    async def timed(self) -> None:
        self.transport.write(_STREAM_HEAD)
        for _ in range(CHUNKS):
            await asyncio.sleep(GAP_S)
            self.transport.write(_frame({"content": f"at {time.monotonic():.6f} "}))
        self.transport.write(_STREAM_END)


async def serve_stub() -> None:
    """Serve on a free port, which is printed."""
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# The clients


def _length(head: bytes) -> int:
    return int(head.lower().split(b"content-length:")[1].split(b"\r\n", 1)[0])


class Prompts:
    """Requests of about `size` bytes without end; each is a client's whole write, head and body."""

    def __init__(self, size: int, *, stream: bool = False, timed: bool = False) -> None:
        generator = random.Random(size)
        words = [f"{word}{number}" for word in ("reef", "coral", "tide", "polyp", "lagoon", "atoll") for number in range(500)]
        self._serial = 0
        self._parts: list[tuple[bytes, bytes]] = []
        for _ in range(64 if size < 10_000 else 8):
            text = " ".join(generator.choices(words, k=size // 7))[:size]
            body: dict[str, Any] = {
                "model": "m",
                "user": "timed" if timed else "any",
                "messages": [{"role": "user", "content": f"{_SERIAL.decode()} {text}"}],
            }
            raw = orjson.dumps({**body, "stream": True} if stream else body)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
                f"x-reef-scenario: default\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            )
            before, _, after = raw.partition(_SERIAL)
            self._parts.append((head.encode() + before, after))

    def __next__(self) -> bytes:
        self._serial += 1
        before, after = self._parts[self._serial % len(self._parts)]
        return b"%b%08d%b" % (before, self._serial, after)


@dataclass
class Found:
    """What the clients of one round saw; times in seconds. `receipts` in the order they came."""

    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    merged: int = 0
    receipts: list[str] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection that sends a request as soon as the last answer is whole, or every `pace_s` when given."""

    def __init__(self, prompts: Prompts, until: float, found: Found, pace_s: float = 0.0) -> None:
        self.prompts = prompts
        self.until = until
        self.found = found
        self.pace_s = pace_s
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.buffer = bytearray()
        self.started = time.perf_counter()
        self.transport.write(next(self.prompts))

    def data_received(self, data: bytes) -> None:
        if not self.buffer:
            self.found.firsts.append(time.perf_counter() - self.started)
        if _SENT in data:
            self.timed(data)
        self.buffer += data
        if not self.whole():
            return
        assert self.buffer.startswith(b"HTTP/1.1 200"), bytes(self.buffer[:500])
        self.found.latencies.append(time.perf_counter() - self.started)
        self.note()
        if time.perf_counter() >= self.until:
            self.transport.close()
            self.done.set_result(None)
        elif self.pace_s:
            self.loop.call_later(max(0.0, self.pace_s - (time.perf_counter() - self.started)), self.send)
        else:
            self.send()

    def timed(self, data: bytes) -> None:
        """How long each frame of a timed stream took from the provider's write, and whether others came with it."""
        now = time.monotonic()
        times = [float(part.split(b" ", 1)[0]) for part in data.split(_SENT)[1:]]
        self.found.delays += [now - sent for sent in times]
        self.found.merged += len(times) - 1

    def note(self) -> None:
        head = bytes(self.buffer[:2048]).lower().partition(b"x-reef-agent-record-id: ")[2]
        if head:
            self.found.receipts.append(head.partition(b"\r\n")[0].decode())

    def whole(self) -> bool:
        if self.buffer.endswith(b"0\r\n\r\n"):
            return True
        head, mark, _ = bytes(self.buffer[:4096]).partition(b"\r\n\r\n")
        if not mark or b"content-length:" not in head.lower():
            return False
        return len(self.buffer) - len(head) - 4 >= _length(head)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


async def load(port: int, prompts: Prompts, connections: int, seconds: float, *, pace_s: float = 0.0) -> Found:
    """A closed loop over so many connections; a server that goes away ends it early."""
    found, until = Found(), time.perf_counter() + seconds
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: Client(prompts, until, found, pace_s), "127.0.0.1", port)
        for _ in range(connections)
    ]
    await asyncio.gather(*(client.done for _, client in made))
    return found


# The server


def cpu_seconds(pid: int) -> float:
    """User and system time of the process's threads; those that ended are left out, since only this clock counts finely."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def measure(pid: int, run: Coroutine[Any, Any, Found]) -> dict[str, float]:
    """One round of `run` against the process."""
    before, started = cpu_seconds(pid), time.perf_counter()
    found = asyncio.run(run)
    wall, spent = time.perf_counter() - started, cpu_seconds(pid) - before
    count = len(found.latencies)
    figures = {
        "cpu_us_per_request": 1e6 * spent / count,
        "requests_per_s": count / wall,
        "p50_ms": 1e3 * statistics.median(found.latencies),
        "p99_ms": 1e3 * quantile(found.latencies, 0.99),
        "first_byte_p50_ms": 1e3 * statistics.median(found.firsts),
        "requests": float(count),
    }
    if found.delays:
        figures |= {
            "chunk_delay_p50_ms": 1e3 * statistics.median(found.delays),
            "chunk_delay_p99_ms": 1e3 * quantile(found.delays, 0.99),
            "chunk_delay_max_ms": 1e3 * max(found.delays),
            "chunks_held_over_1_ms_percent": 100 * sum(delay > 1e-3 for delay in found.delays) / len(found.delays),
            "chunks_merged_percent": 100 * found.merged / len(found.delays),
        }
    return figures


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


@contextlib.contextmanager
def running(words: Sequence[str], core: int | None, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A child process on one core, ended at the end."""
    child = subprocess.Popen(words, text=True, **options)
    try:
        if core is not None:
            os.sched_setaffinity(child.pid, {core})
        yield child
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
        child.kill()
        child.wait()
