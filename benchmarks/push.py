"""New weights under eight clients that never pause: what a swap costs, and whether any token carries a wrong label.

Modes: `adapter` (a LoRA adapter that was served lately and is in the engine still is routed to), `adapter_load` (one that is
not there any more is loaded first, from disk: the releases go round so many adapters that none stays), `merged` (the adapter is
merged and all layers it touches are pushed through a process group), `full` (every weight is pushed). A real `reef serve` with
the embedded engine alternates between the releases every `--every` seconds for `--seconds`. Each release forces a token of its
own at every position (`markers.py`), so the tokens say which weights made them: every token of every answer must be the marker
of the release whose label it carries, also where an answer has tokens of two releases.

    python -m benchmarks.push --modes adapter adapter_load merged full
"""

import argparse
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.gate import machine
from benchmarks.markers import make_markers, merge_into
from reef_cli.config.paths import cache_at
from reef_cli.control.client import Client
from reef_cli.core.ids import ContentId
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.demo.server import Server
from reef_cli.engines.chat_format import ModelChat
from reef_cli.engines.models import ModelStore
from reef_cli.releases.service import ReleaseService
from reef_cli.supervisor.publisher import KEEP_LOADED
from reef_cli.weights.lora import write_lora

SCENARIO = "default"
CLIENTS = 8
BODY: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Name three animals."}],
    "temperature": 0,
    "max_tokens": 24,
    "ignore_eos": True,
    "stream": True,
}
ASKED = ("Name three animals.", "What is the capital of France?")
"""Conversations the markers are fitted on; the clients have the first."""
WORDS = (" one", " two")
ROUND = KEEP_LOADED + 4
"""More adapters than the server keeps in the engine, with those it serves and compares with."""
CONFIG = """
reef: {recipe: "recipes.sao.recipe:SAORecipe", batch_size: 100000, training_mode: manual}
engine: {kind: embedded, model: smollm2-135m-instruct}
"""
TRAINER = {
    "adapter": {},
    "adapter_load": {},
    "merged": {"trainer.push": "merged"},
    "full": {"trainer.method": "full", "trainer.push": "full"},
}


@dataclass
class Answer:
    """One streamed answer. `gaps` are the seconds between its chunks, the first from the request on."""

    text: str = ""
    receipt: str = ""
    release: str = ""
    started: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)


def ask(connection: http.client.HTTPConnection, headers: dict[str, str]) -> Answer:
    """One streamed chat completion; anything but a whole answer raises."""
    answer = Answer(started=time.perf_counter())
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {**headers, "content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {reply.read(500)!r}")
    answer.release = reply.headers.get("x-reef-release-id", "")
    last = answer.started
    ended = False
    for line in reply:
        if not line.startswith(b"data: "):
            continue
        now = time.perf_counter()
        answer.gaps.append(now - last)
        last = now
        if line.strip() == b"data: [DONE]":
            ended = True
            continue
        data = json.loads(line[6:])
        answer.receipt = (data.get("reef") or {}).get("agent_record_id", answer.receipt)
        for choice in data.get("choices", ()):
            answer.text += choice.get("delta", {}).get("content") or ""
    answer.ended = last
    if not ended:
        raise RuntimeError(f"the stream broke off after {answer.text!r}")
    return answer


class Load:
    """Eight closed-loop clients in threads."""

    def __init__(self, address: tuple[str, int], headers: dict[str, str]) -> None:
        self._address, self._headers = address, headers
        self._enough = threading.Event()
        self.answers: list[Answer] = []
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        while not self._enough.is_set():
            try:
                self.answers.append(ask(connection, self._headers))
            except Exception as error:  # counted: the benchmark says how many requests failed
                self.errors.append(repr(error))
                connection = http.client.HTTPConnection(*self._address, timeout=120)

    def stop(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(120)


@dataclass(frozen=True, slots=True)
class Weights:
    """What one release serves: a folder, its kind, and the token it forces."""

    folder: Path
    kind: str
    marker: int
    margin: float


def make_weights(root: Path, model: Path, mode: str) -> list[Weights]:
    """Two adapters, or checkpoints with an adapter merged in, that force one token each; `ROUND` of them to be loaded."""
    from transformers import AutoModelForCausalLM

    chat = ModelChat(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16").eval().requires_grad_(False)
    prompts = [chat.render([{"role": "user", "content": content}]) for content in ASKED]
    tokens = [chat.encode(word)[0] for word in WORDS]
    markers = make_markers(net, tokens, prompts, BODY["max_tokens"])
    made = []
    for number in range(ROUND if mode == "adapter_load" else len(markers)):
        marker, folder = markers[number % len(markers)], root / f"weights{number}"
        if mode == "full":
            merge_into(marker, model, folder)
        else:
            # Another name of its base is another content with the same matrices.
            write_lora(folder, replace(marker.lora, config=replace(marker.lora.config, base=f"{number}")))
        made.append(Weights(folder, "checkpoint" if mode == "full" else "lora", marker.token, marker.margin))
    return made


def publish(home: Path, folder: Path, kind: str) -> str:
    """A release at the head, as another process would publish it."""
    service = ReleaseService(home)
    head = service.head(SCENARIO)
    assert head is not None
    artifact = service.store(folder, kind)
    draft = Draft(ContentId(artifact.content_id), kind, Surface.WEIGHTS, Operation.TRAINING, "benchmark", gated=True)
    return str(service.publish(SCENARIO, draft, head.release_id).release_id)


def settle(client: Client, release: str) -> None:
    """Wait until the server answers with a release."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if _served(client) == release:
            return
        time.sleep(0.2)
    raise RuntimeError(f"{release} was not served")


def _served(client: Client) -> str:
    reply = client.request("POST", "/v1/chat/completions", {**BODY, "stream": False, "max_tokens": 1})
    return str(reply.headers.get("x-reef-release-id", ""))


def run(mode: str, seconds: float, every: float) -> dict[str, Any]:
    """One mode; a fresh home."""
    model = ModelStore(cache_at({})).resolve("smollm2-135m-instruct")
    with tempfile.TemporaryDirectory(prefix="reef-push-") as scratch:
        root = Path(scratch)
        (root / "serve.yaml").write_text(CONFIG)
        home = root / "home"
        home.mkdir(mode=0o700)
        server = Server(home, root / "serve.yaml", TRAINER[mode])
        try:
            client = server.wait_ready(300, lambda _: None)
            weights = make_weights(root, model, mode)
            size = sum(path.stat().st_size for path in weights[0].folder.glob("*.safetensors"))
            labels = Labels(ModelChat(model))
            return measure(mode, server, client, weights, labels, seconds, every) | {"file_bytes": size}
        finally:
            server.stop()


def measure(
    mode: str, server: Server, client: Client, weights: Sequence[Weights], labels: "Labels", seconds: float, every: float
) -> dict[str, Any]:
    releases = []
    parts = urlsplit(client.url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    headers = {"authorization": f"Bearer {(server.home / 'token').read_text().strip()}"}
    for each in weights:
        release = publish(server.home, each.folder, each.kind)
        settle(client, release)
        releases.append(release)
        labels.expect(client, release, each.marker)
    load = Load(address, headers)
    time.sleep(3)
    calm_from = len(load.answers)
    calm = time.perf_counter()
    swaps: list[tuple[float, float]] = []
    started = time.perf_counter()
    number = 0
    while time.perf_counter() - started < seconds:
        begun = time.perf_counter()
        client.request("POST", f"/reef/scenarios/{SCENARIO}/rollback", {"release_id": releases[number % len(releases)]})
        swaps.append((begun, time.perf_counter()))
        number += 1
        time.sleep(max(0.0, every - (time.perf_counter() - begun)))
    load.stop()
    answers = load.answers[calm_from:]
    labels.check(client, answers)
    gaps = sorted(gap for answer in answers for gap in answer.gaps[1:])
    near, away = waits(answers, swaps)
    firsts = sorted(answer.gaps[0] for answer in answers)
    spent = sorted(end - begin for begin, end in swaps)
    phases, paused = last_push(server), pauses(server, len(swaps))
    return {
        "mode": mode,
        "seconds": round(time.perf_counter() - calm, 1),
        "swaps": len(swaps),
        "swap_s": quantiles(spent),
        "paused_s": quantiles(paused),
        "push": phases,
        "answers": len(answers),
        "errors": len(load.errors),
        "error_samples": load.errors[:3],
        "mislabelled": len(labels.wrong),
        "mislabelled_samples": labels.wrong[:3],
        "markers": [
            {"word": word, "token": each.marker, "margin": each.margin} for word, each in zip(WORDS, weights, strict=False)
        ],
        "tokens_checked": labels.tokens,
        "answers_of_two_releases": labels.mixed,
        "chunk_gap_s": quantiles(gaps),
        "chunk_gap_at_swaps_s": quantiles(near),
        "chunk_gap_between_swaps_s": quantiles(away),
        "first_chunk_s": quantiles(firsts),
    }


class Labels:
    """Which token each release forces, and the answers whose tokens or text say something else."""

    def __init__(self, chat: ModelChat) -> None:
        self._chat = chat
        self._markers: dict[str, int] = {}
        self._contents: dict[str, str] = {}
        self.wrong: list[dict[str, Any]] = []
        self.mixed = 0
        self.tokens = 0

    def expect(self, client: Client, release: str, marker: int) -> None:
        """A release, and every later one of the same content, forces this token."""
        self._learn(client)
        self._markers[self._contents[release]] = marker

    def check(self, client: Client, answers: Sequence[Answer]) -> None:
        self._learn(client)
        for answer in answers:
            tokens = client.get(f"/reef/scenarios/{SCENARIO}/records/{answer.receipt}")["tokens"]
            due = self.due(tokens["spans"])
            self.tokens += len(tokens["output_ids"])
            self.mixed += len({span["version"] for span in tokens["spans"]}) > 1
            if due != tokens["output_ids"] or len(due) != BODY["max_tokens"] or answer.text != self._chat.decode(due):
                self.wrong.append({"receipt": answer.receipt, "due": due, "tokens": tokens, "text": answer.text})

    def due(self, spans: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of an answer, were its spans true; -1 where the version is none of ours."""
        found: list[int] = []
        for span in spans:
            content = self._contents.get(span["version"].rpartition("@")[2], "")
            found += [self._markers.get(content, -1)] * (span["end"] - span["start"])
        return found

    def _learn(self, client: Client) -> None:
        for row in client.get(f"/reef/scenarios/{SCENARIO}/releases", limit=1000)["releases"]:
            self._contents[row["release_id"]] = row["content_id"]


def waits(answers: Sequence[Answer], swaps: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Waits for the next chunk that fell into a swap, and those that did not: what the swaps themselves cost the clients."""
    near, away = [], []
    for answer in answers:
        at = answer.started + answer.gaps[0]
        for gap in answer.gaps[1:]:
            touched = any(begin < at + gap and at < end for begin, end in swaps)
            (near if touched else away).append(gap)
            at += gap
    return near, away


def last_push(server: Server) -> list[str]:
    """What the server logged of its pushes: phases, bytes."""
    lines = (server.home / "logs" / "reef.log").read_text().splitlines()
    return [json.loads(line)["message"] for line in lines if '"pushed ' in line][-2:]


def pauses(server: Server, last: int) -> list[float]:
    """How long the engine was paused in the last swaps, as the server logged it; nothing where it never is."""
    lines = (server.home / "logs" / "reef.log").read_text().splitlines()
    messages = [json.loads(line)["message"] for line in lines if '"paused for ' in line]
    return [float(message.split()[2]) for message in messages][-last:]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    at = sorted(values)
    return {
        "p50": round(statistics.median(at), 4),
        "p99": round(at[min(len(at) - 1, int(0.99 * len(at)))], 4),
        "max": round(at[-1], 4),
        "n": len(at),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", choices=sorted(TRAINER), default=list(TRAINER))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/push.json"))
    options = parser.parse_args()
    load, rows = round(os.getloadavg()[0], 2), []
    for mode in options.modes:
        rows.append(run(mode, options.seconds, options.every))
        print(json.dumps(rows[-1], indent=1))
    options.out.write_text(json.dumps({"machine": machine(), "load_before": load, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
