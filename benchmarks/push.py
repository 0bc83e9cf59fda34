"""New weights under eight clients that never pause: what a swap costs, and whether any answer carries a wrong label.

Modes: `adapter` (a LoRA adapter is loaded and routed to), `merged` (the adapter is merged and all layers it touches are pushed
through a process group), `full` (every weight is pushed). A real `reef serve` with the embedded engine alternates between two
releases every `--every` seconds for `--seconds`. The engine answers a greedy request with the same tokens whatever runs beside
it, so the text each release must give is known beforehand: an answer made by one release alone must be that release's text.

    python -m benchmarks.push --modes adapter merged full
"""

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.gate import machine
from reef_cli.config.paths import cache_at
from reef_cli.control.client import Client
from reef_cli.core.ids import ContentId
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.demo.server import Server
from reef_cli.engines.models import ModelStore
from reef_cli.releases.service import ReleaseService

SCENARIO = "default"
CLIENTS = 8
BODY = {
    "model": "default",
    "messages": [{"role": "user", "content": "Name three animals."}],
    "temperature": 0,
    "max_tokens": 24,
    "ignore_eos": True,
    "stream": True,
}
CONFIG = """
reef: {recipe: "recipes.sao.recipe:SAORecipe", batch_size: 100000, training_mode: manual}
engine: {kind: embedded, model: smollm2-135m-instruct}
"""
TRAINER = {"adapter": {}, "merged": {"trainer.push": "merged"}, "full": {"trainer.method": "full", "trainer.push": "full"}}


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


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A random LoRA adapter of rank 16 that changes what the model says."""
    import torch
    from safetensors import safe_open

    from reef_cli.weights.lora import Lora, LoraConfig, write_lora

    targets = ("q_proj", "v_proj", "o_proj", "down_proj")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            for name in file.keys():  # noqa: SIM118  the file is no mapping
                module = name.removesuffix(".weight")
                if not module.endswith(targets):
                    continue
                rows, columns = file.get_slice(name).get_shape()
                a = torch.randn(16, columns, generator=generator) / columns**0.5
                tensors[module] = (a.bfloat16(), (torch.randn(rows, 16, generator=generator) * 0.02).bfloat16())
    write_lora(folder, Lora(LoraConfig(16, 32.0, targets), tensors))
    return folder


def make_checkpoint(folder: Path, model: Path, seed: int) -> Path:
    """The model with its last norm scaled at random: all weights travel, and it says something else."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(seed)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(str(path))
        for name, value in tensors.items():
            if name == "model.norm.weight":
                tensors[name] = value * (1 + 0.3 * torch.randn(value.shape, generator=generator)).to(value.dtype)
        save_file(tensors, str(path), metadata={"format": "pt"})
    return folder


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
            kind = "checkpoint" if mode == "full" else "lora"
            make = make_checkpoint if mode == "full" else make_adapter
            folders = [make(root / f"weights{seed}", model, seed) for seed in (1, 2)]
            size = sum(path.stat().st_size for path in folders[0].glob("*.safetensors"))
            return measure(mode, server, client, [(folder, kind) for folder in folders], seconds, every) | {"file_bytes": size}
        finally:
            server.stop()


def measure(
    mode: str, server: Server, client: Client, artifacts: Sequence[tuple[Path, str]], seconds: float, every: float
) -> dict[str, Any]:
    expected: dict[str, str] = {}  # text by content
    contents: dict[str, str] = {}  # content by release
    releases = []
    parts = urlsplit(client.url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    headers = {"authorization": f"Bearer {(server.home / 'token').read_text().strip()}"}
    for folder, kind in artifacts:
        release = publish(server.home, folder, kind)
        settle(client, release)
        releases.append(release)
        _learn_content(client, contents)
        expected[contents[release]] = ask(http.client.HTTPConnection(*address, timeout=120), headers).text
    if len(set(expected.values())) != len(artifacts):
        raise RuntimeError("the two releases say the same; nothing would be proved")
    load = Load(address, headers)
    time.sleep(3)
    calm_from = len(load.answers)
    calm = time.perf_counter()
    swaps: list[tuple[float, float]] = []
    started = time.perf_counter()
    number = 0
    while time.perf_counter() - started < seconds:
        begun = time.perf_counter()
        client.request("POST", f"/reef/scenarios/{SCENARIO}/rollback", {"release_id": releases[number % 2]})
        swaps.append((begun, time.perf_counter()))
        number += 1
        time.sleep(max(0.0, every - (time.perf_counter() - begun)))
    load.stop()
    _learn_content(client, contents)
    answers = load.answers[calm_from:]
    wrong, mixed = label_faults(client, answers, contents, expected)
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
        "mislabelled": len(wrong),
        "mislabelled_samples": wrong[:3],
        "texts_due": list(expected.values()),
        "answers_of_two_releases": mixed,
        "chunk_gap_s": quantiles(gaps),
        "chunk_gap_at_swaps_s": quantiles(near),
        "chunk_gap_between_swaps_s": quantiles(away),
        "first_chunk_s": quantiles(firsts),
    }


def label_faults(
    client: Client, answers: Sequence[Answer], contents: dict[str, str], expected: dict[str, str]
) -> tuple[list[dict[str, str]], int]:
    """Answers of one release whose text is not that release's, and how many have spans of two."""
    wrong: list[dict[str, str]] = []
    mixed = 0
    for answer in answers:
        record = client.get(f"/reef/scenarios/{SCENARIO}/records/{answer.receipt}")
        versions = {span["version"] for span in record["tokens"]["spans"]}
        if len(versions) > 1:
            mixed += 1
            continue
        (version,) = versions
        release = version.rpartition("@")[2]
        due = expected.get(contents.get(release, ""))
        if due != answer.text:
            wrong.append({"receipt": answer.receipt, "version": version, "due": str(due), "text": answer.text})
    return wrong, mixed


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


def _learn_content(client: Client, contents: dict[str, str]) -> None:
    for row in client.get(f"/reef/scenarios/{SCENARIO}/releases", limit=1000)["releases"]:
        contents[row["release_id"]] = row["content_id"]


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
    parser.add_argument("--modes", nargs="+", choices=sorted(TRAINER), default=["adapter", "merged", "full"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/push.json"))
    options = parser.parse_args()
    rows = []
    for mode in options.modes:
        rows.append(run(mode, options.seconds, options.every))
        print(json.dumps(rows[-1], indent=1))
    options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
