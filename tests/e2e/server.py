"""A real `reef serve` in a process of its own, for tests: free port, own home, always stopped, its words kept for failures."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from reef_cli.control.discovery import read_running
from tests.e2e.ledger import Ledger

LIMIT_S = 120.0
"""For whatever should happen soon, on a machine that does many other things."""

LIGHT = {"engine.threads": "1", "trainer.threads": "1", "trainer.rank": "4"}
SAO = {
    "reef.recipe": "recipes.sao.recipe:SAORecipe",
    "reef.batch_size": "2",
    "reef.critic_only_steps": "0",
    "reef.policy_lr": "3e-3",
    "reef.critic_width": "8",
    "reef.level_decay": "1",
    "reef.min_ess": "0",
    "reef.max_masked": "1",
    "reef.gate_every": "1000",
    "evaluation.max_kl": "1000",
    "evaluation.smoke_items": "0",
}
"""Every step of two samples trains the policy and is released at once. The critic starts at zero, so that two answers with the
same score still move the policy."""


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without settings of the developer's own Reef."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REEF_")}
    return kept | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"} | extra


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "reef_cli", *words]


def reef(*words: str, limit_s: float = LIMIT_S, **extra: str) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=limit_s, env=clean_environment(**extra), check=False
    )


def until(check: Callable[[], Any], what: str, limit_s: float = LIMIT_S, every_s: float = 0.05) -> Any:
    """Poll for a true value; the error names what never came."""
    deadline = time.monotonic() + limit_s
    while True:
        if found := check():
            return found
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s:g} s"
        time.sleep(every_s)


class Server:
    """One home and the process that serves it; may be started and ended several times."""

    def __init__(
        self, home: Path, settings: Mapping[str, str], *, config: Path | None = None, prefix: Sequence[str] = ()
    ) -> None:
        self.home = home
        self.settings = {"reef.home": str(home), "reef.port": "0", **LIGHT, **settings}
        self.config = config
        self.prefix = list(prefix)
        self.output = home.with_name(f"{home.name}.out")
        self.process: subprocess.Popen[bytes] | None = None
        self._clients: list[httpx.Client] = []

    # -- the process ---------------------------------------------------------------------------------------------------

    def start(self, **environment: str) -> "Server":
        """Start and return at once."""
        flags = [word for key, value in self.settings.items() for word in (f"--{key}", value)]
        named = ["-c", str(self.config)] if self.config else []
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [*self.prefix, *command("serve", *named, *flags)],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=clean_environment(**environment),
            )
        return self

    def ready(self, limit_s: float = LIMIT_S) -> "Server":
        """Wait until requests are served."""
        until(self.serves, "readiness", limit_s, every_s=0.25)
        return self

    def serves(self) -> bool:
        """Whether this start of the server takes requests."""
        assert self.process is not None and self.process.poll() is None, f"the server ended: {self.words()[-2000:]}"
        running = read_running(self.home / "run" / "serve.json")
        if running is None or running.pid != self.process.pid:
            return False
        try:
            return httpx.get(f"{running.url}/readyz", timeout=10, verify=False).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ended(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; the exit code."""
        assert self.process is not None
        return self.process.wait(limit_s)

    def kill(self) -> None:
        """`kill -9`, only the server itself; what it started must find its own end."""
        self.signal(signal.SIGKILL)
        self.ended()
        self.close_clients()

    def stop(self) -> int:
        """End it gently, else by force; the exit code."""
        self.close_clients()
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.ended(60)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()

    def words(self) -> str:
        """What it printed, and the ends of its logs."""
        logs = [self.output, *sorted((self.home / "logs").glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs if log.exists())

    # -- its API -------------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        running = read_running(self.home / "run" / "serve.json")
        assert running is not None
        return running.url

    @property
    def token(self) -> str:
        """The first of the token file."""
        return (self.home / "token").read_text().split()[0]

    @property
    def model(self) -> str:
        return self.settings["engine.model"]

    def client(self, **headers: str) -> httpx.Client:
        """A client of this start of the server, closed with it."""
        made = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.token}", **headers}, timeout=LIMIT_S, verify=False
        )
        self._clients.append(made)
        return made

    def get(self, path: str, **params: Any) -> Any:
        reply = self.client().get(path, params=params)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def status(self) -> Any:
        return self.get("/reef/status")

    def releases(self, scenario: str = "default") -> list[dict[str, Any]]:
        """Newest first."""
        return list(self.get(f"/reef/scenarios/{scenario}/releases")["releases"])

    def head(self, scenario: str = "default") -> str:
        """The release at the head of the weights."""
        heads = (row for row in self.releases(scenario) if row["current"] and row["surface"] == "weights")
        return next(str(row["release_id"]) for row in heads)

    def ask(self, text: str = "hello", **body: Any) -> httpx.Response:
        """One chat completion."""
        reply = self.client().post("/v1/chat/completions", json=self.body(text, **body))
        assert reply.status_code == 200, reply.text
        return reply

    def body(self, text: str, **extra: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": 12, **extra}

    def greedy(self, text: str = "the quick brown fox", **headers: str) -> str:
        """The answer without sampling: the same for the same weights."""
        client = self.client(**headers)
        reply = client.post("/v1/chat/completions", json=self.body(text, temperature=0, ignore_eos=True, max_tokens=24))
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def scored(self, count: int, text: str = "question") -> list[str]:
        """Ask and report `count` times with a reward of the answer's length; the ids of the reports."""
        ids = []
        client = self.client()
        for number in range(count):
            reply = client.post("/v1/chat/completions", json=self.body(f"{text} {number}"))
            assert reply.status_code == 200, reply.text
            answer = reply.json()["choices"][0]["message"]["content"] or ""
            body = {"score": min(1.0, len(answer) / 40), "references": [reply.headers["x-reef-agent-record-id"]]}
            stored = client.post("/reef/report", json=body)
            assert stored.status_code == 200, stored.text
            ids.append(stored.json()["agent_record_id"])
        return ids

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.home / "experience.db")

    def engine_pid(self) -> int:
        """The engine's process."""
        return self.engine_pids()[0]

    def engine_pids(self) -> list[int]:
        return [pid for pid, words in self.children().items() if "reef_cli.engines.embedded" in words]

    def trainer_pids(self) -> list[int]:
        return [pid for pid, words in self.children().items() if "reef_cli.trainer.worker" in words]

    def children(self) -> dict[int, str]:
        """The server's direct child processes and their command lines."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                if parent == self.pid:
                    found[int(stat.parent.name)] = (stat.parent / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found


@contextmanager
def serving(home: Path, model: Path, config: Path | None = None, **settings: str) -> Iterator[Server]:
    """A ready server over a model folder; settings by their dotted names (`**{"reef.batch_size": "4"}`)."""
    server = Server(home, {"engine.model": str(model), **settings}, config=config)
    with stopped(server):
        yield server.start().ready()


@contextmanager
def stopped(server: Server) -> Iterator[Server]:
    """End the server afterwards whatever happens; its words go to the test's output, which a failure shows."""
    try:
        yield server
    finally:
        server.stop()
        print(server.words())


def frames(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """The data objects of an event stream, without the terminator. Not `iter_lines`, which also splits at U+0085."""
    rest = b""
    for piece in reply.iter_raw():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line[6:])


def streamed(client: httpx.Client, body: Mapping[str, Any], path: str = "/v1/chat/completions") -> tuple[str, str, str]:
    """One streamed chat answer: its text, its receipt from the final frame, and the release in the header."""
    pieces, receipt = [], ""
    with client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for frame in frames(reply):
            assert "error" not in frame, frame
            receipt = frame.get("reef", {}).get("agent_record_id", receipt)
            pieces += [choice["delta"].get("content") or "" for choice in frame.get("choices", ())]
    return "".join(pieces), receipt, reply.headers["x-reef-release-id"]
