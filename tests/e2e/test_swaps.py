"""Weights change under eight clients that never pause: LoRA releases through the service, whole weights in the engine.

No request may fail because of a change, and no answer may mix weights without its token spans saying where.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.ids import ContentId, ReleaseId
from reef_cli.core.ports import GenerateRequest, Sampling
from reef_cli.core.types import Draft, Held, Operation, Release, Surface
from reef_cli.engines.client import EngineClient
from reef_cli.engines.serving import LocalServing
from reef_cli.learning.contract import ProgramSpec
from reef_cli.releases.service import ReleaseService
from reef_cli.trainer.handle import TrainerHandle
from tests.e2e.server import LIMIT_S, Server, serving, streamed, until
from tests.engines.live import Live

pytestmark = pytest.mark.slow
CLIENTS = 8
PROMPT = "the quick brown fox"
FIXED = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "h", tiny_model) as running:
        yield running


@contextmanager
def clients(server: Server) -> Iterator[list[tuple[str, str, str]]]:
    """Eight clients, each streaming one answer after the other; yields the growing list of (text, receipt, release)."""
    answers: list[tuple[str, str, str]] = []
    failures: list[BaseException] = []
    enough = threading.Event()
    url, headers, body = server.url, {"Authorization": f"Bearer {server.token}"}, server.body(PROMPT, **FIXED)

    def work() -> None:
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=LIMIT_S) as client:
                while not enough.is_set():
                    answers.append(streamed(client, body))
        except BaseException as error:  # shown by the test: a thread's own exception would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        enough.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert not failures, failures


def publish(home: Path, folder: Path) -> str:
    """A LoRA release at the head, as another process would publish it."""
    service = ReleaseService(home)
    head = service.head("default")
    assert head is not None
    artifact = service.store(folder, "lora")
    draft = Draft(ContentId(artifact.content_id), "lora", Surface.WEIGHTS, Operation.TRAINING, "test")
    return str(service.publish("default", draft, head.release_id).release_id)


def grown(answers: list[Any], by: int = CLIENTS) -> None:
    """Wait until the clients got some more answers."""
    wanted = len(answers) + by
    until(lambda: len(answers) >= wanted, f"{by} more answers", every_s=0.02)


def test_lora_releases_swap_under_streaming_clients(server: Server, adapters: list[Path]) -> None:
    client = server.client()
    first = server.head()
    with clients(server) as answers:
        grown(answers)
        releases = [first]
        for folder in adapters[:2]:  # published by another process, followed by the server
            releases.append(publish(server.home, folder))
            until(lambda: server.ask("x").headers["x-reef-release-id"] == releases[-1], "the server following the head")
            grown(answers)
        for body in ({"release_id": first}, {}, {"release_id": releases[1]}):  # moved through the API
            moved = client.post("/reef/scenarios/default/rollback", json=body)
            assert moved.status_code == 200, moved.text
            releases.append(moved.json()["release_id"])
            grown(answers)
    seen = {release for _, _, release in answers}
    assert seen == set(releases), "every release answered, and nothing else did"

    expected = {release: server.greedy(PROMPT, **{"x-reef-release-id": release}) for release in seen}
    assert len(set(expected.values())) == 3, "base and two adapters speak differently"
    for text, receipt, release in answers:
        record = server.get(f"/reef/scenarios/default/records/{receipt}")
        versions = {span["version"] for span in record["tokens"]["spans"]}
        kind = "base" if expected[release] == expected[first] else f"default@{release}"
        assert record["release_id"] == release and versions == {kind}, (release, versions)
        assert record["complete"] is True and text == expected[release]


class Load:
    """Eight closed-loop clients of `LocalServing`; keeps each completion."""

    def __init__(self, serving_: LocalServing, ids: list[int]) -> None:
        self._serving, self._ids = serving_, ids
        self.done: list[Any] = []
        self._enough = False
        self._tasks = [asyncio.create_task(self._work()) for _ in range(CLIENTS)]

    async def _work(self) -> None:
        while not self._enough:
            request = GenerateRequest(
                input_ids=self._ids, sampling=Sampling(temperature=0.0, max_new_tokens=48, ignore_eos=True)
            )
            async for delta in self._serving.stream(request):
                if delta.completion:
                    self.done.append(delta.completion)

    async def grown(self, by: int = 3 * CLIENTS) -> None:
        """Wait for answers that began and ended since: those in flight come first."""
        wanted = len(self.done) + by
        await asyncio.to_thread(until, lambda: len(self.done) >= wanted or any(t.done() for t in self._tasks), "answers")

    async def end(self) -> None:
        self._enough = True
        await asyncio.gather(*self._tasks)


def whole_release(step: int, kind: str) -> Release:
    """A release of all weights; the trainer merges LoRA ones into the base before it sends them."""
    id_ = ReleaseId(f"r{step}-00000000")
    return Release(id_, "default", None, ContentId("sha256:0"), kind, Surface.WEIGHTS, Operation.TRAINING, step, 0.0, "test")


async def test_whole_weights_are_pushed_under_streaming_clients(tiny_model: Path, adapters: list[Path], tmp_path: Path) -> None:
    """A trainer process pushes merged and base weights into an engine process while eight clients stream."""
    live = Live(tiny_model, tmp_path / "engine.log", "--incremental-streaming-output").wait()
    client = EngineClient(live.url)
    settings = TrainerSettings(rank=4, alpha=16.0, device="cpu", threads=1, target_modules=TARGETS)
    trainer = TrainerHandle(settings, tiny_model, ProgramSpec("recipes.sao.program:SAOProgram", PROGRAM), tmp_path / "t.log")
    pushes: list[str] = []

    async def push(directory: Path, label: str, held: Held | None) -> Any:
        pushes.append(label)
        return await trainer.push("default", directory, label, live.url, held=held)

    try:
        serving_ = LocalServing(client, context_length=512, model_dir=tiny_model, push=push)
        load = Load(serving_, list(range(20, 30)))
        await load.grown()
        versions = ["base"]
        for number, folder in enumerate((adapters[0], tiny_model, adapters[1], tiny_model), 1):
            release = whole_release(number, "checkpoint" if folder is tiny_model else "lora")
            versions.append(serving_.version_of(release))
            await serving_.load(release, folder)
            await load.grown()
        await load.end()
    finally:
        await trainer.stop()
        await client.close()
        live.stop()
    assert pushes == versions[1:], "every change went through the trainer's process group"

    whole: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    crossing = 0
    for completion in load.done:
        spans = completion.spans
        assert [spans[0].start, spans[-1].end] == [0, 48] and completion.finish == "length"
        assert all(a.end == b.start and a.version != b.version for a, b in pairwise(spans))
        order = [versions.index(span.version) for span in spans]
        assert order == sorted(order), "weights only ever moved forward"
        crossing += len(spans) > 1
        if len(spans) == 1:
            whole[spans[0].version].add(completion.output_ids)
    assert set(whole) == set(versions), "every version gave whole answers"
    assert all(len(texts) == 1 for texts in whole.values()), "an unmarked mixture would be a second answer"
    assert whole["base"] == whole[versions[2]] == whole[versions[4]]
    assert len({text for texts in whole.values() for text in texts}) == 3
    assert crossing, "some answers were in flight when the weights changed"


TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
PROGRAM = {
    "policy_lr": 1e-3,
    "critic_lr": 1e-3,
    "eps_low": 0.3,
    "eps_high": 5.0,
    "critic_steps": 1,
    "critic_only_steps": 0,
    "critic_width": 8,
    "level_decay": 0.5,
    "alpha_lambda": 1.5,
    "gamma": 1.0,
    "use_critic": True,
    "use_mask": True,
    "min_ess": 0.0,
    "max_masked": 1.0,
}
