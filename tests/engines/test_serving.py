"""Releases in a real engine: LoRA beside LoRA, full weights behind the gate, restart, and failures that change nothing."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from reef_cli.core.errors import EngineError, EngineUnavailable, InvalidRequest, PushTimeout, TrainerError, UnsupportedArtifact
from reef_cli.core.ids import ContentId, ReleaseId
from reef_cli.core.ports import GenerateRequest, Sampling
from reef_cli.core.types import Held, Operation, Release, Surface, TokenSpan
from reef_cli.engines.client import EngineClient
from reef_cli.engines.serving import LocalServing
from reef_cli.weights.contract import PARTIAL
from tests.engines.live import Live, ids_of

GREEDY = Sampling(max_new_tokens=10, temperature=0.0, ignore_eos=True)


def release(kind: str, step: int, scenario: str = "s") -> Release:
    surface = Surface.HARNESS if kind == "harness" else Surface.WEIGHTS
    return Release(
        ReleaseId(f"r{step}-00000000"),
        scenario,
        None,
        ContentId("sha256:0"),
        kind,
        surface,
        Operation.TRAINING,
        step,
        0.0,
        "test",
    )


def ask(of: Release | None, seed: int = 0, sampling: Sampling = GREEDY) -> GenerateRequest:
    return GenerateRequest(ids_of(20, seed), sampling, of)


@pytest.fixture
async def serving(own: Live, tiny: Path):
    client = EngineClient(own.url)
    yield LocalServing(client, model_dir=tiny, push_wait_s=20)
    await client.close()


async def test_lora_releases_stand_beside_each_other(serving: LocalServing, lora: Path, lora2: Path) -> None:
    base, first, second = release("base", 0), release("lora", 1), release("lora", 2)
    assert serving.servable(base) and not serving.servable(first)
    with pytest.raises(EngineUnavailable, match="not loaded"):
        await serving.generate(ask(first))
    await serving.load(first, lora)
    await serving.load(second, lora2)
    await serving.load(second, lora2)
    answers = [await serving.generate(ask(each)) for each in (None, base, first, second)]
    assert answers[0].output_ids == answers[1].output_ids
    assert len({answer.output_ids for answer in answers[1:]}) == 3
    assert answers[0].spans == (TokenSpan("base", 0, 10),) and answers[2].spans == (TokenSpan("s@r1-00000000", 0, 10),)
    deltas = [delta async for delta in serving.stream(ask(first))]
    assert deltas[-1].completion is not None and deltas[-1].completion.spans == answers[2].spans
    assert deltas[-1].completion.output_ids == answers[2].output_ids
    assert (await serving.info())["adapters"] == ["s@r1-00000000", "s@r2-00000000"]
    await serving.unload(first)
    assert not serving.servable(first) and await serving.client.adapters() == ["s@r2-00000000"]


async def test_harness_releases_serve_on_what_is_there(serving: LocalServing) -> None:
    harness = release("harness", 1)
    await serving.load(harness, None)
    assert serving.servable(harness) and (await serving.generate(ask(harness))).spans[0].version == "base"


async def test_full_weights_replace_and_base_comes_back(serving: LocalServing, other: Path) -> None:
    base, full = release("base", 0), release("checkpoint", 1)
    before = await serving.generate(ask(base))
    await serving.load(full, other)
    assert serving.servable(full) and not serving.servable(base)
    after = await serving.generate(ask(full))
    assert after.output_ids != before.output_ids and after.spans == (TokenSpan("s@r1-00000000", 0, 10),)
    await serving.load(base, None)
    assert (await serving.generate(ask(base))).output_ids == before.output_ids and not serving.servable(full)


async def test_weights_the_trainer_pushed_are_taken_as_loaded(serving: LocalServing, tmp_path: Path) -> None:
    await serving.client.set_version("s@r7-00000000")
    await serving.load(release("checkpoint", 7), tmp_path / "nothing-here")
    assert serving.servable(release("checkpoint", 7))


async def test_a_refused_load_leaves_what_was_served(serving: LocalServing, lora: Path, tmp_path: Path) -> None:
    before = await serving.generate(ask(None))
    with pytest.raises(EngineError):
        await serving.load(release("checkpoint", 1), tmp_path)
    with pytest.raises(EngineError):
        await serving.load(release("lora", 2), tmp_path)
    with pytest.raises(EngineError, match="no files"):
        await serving.load(release("lora", 3), None)
    assert (await serving.generate(ask(release("base", 0)))).output_ids == before.output_ids
    assert not serving.servable(release("checkpoint", 1)) and not serving.servable(release("lora", 2))


async def test_requests_wait_at_the_gate_and_go_on(serving: LocalServing) -> None:
    async with serving.closed():
        waiting = asyncio.ensure_future(serving.generate(ask(None)))
        await asyncio.sleep(0.3)
        assert not waiting.done() and (await serving.info())["pushing"]
    assert len((await waiting).output_ids) == 10


async def test_the_gate_opens_after_a_failure_and_gives_up_in_time(own: Live, tiny: Path) -> None:
    async with EngineClient(own.url) as client:
        serving = LocalServing(client, push_wait_s=0.2)
        with pytest.raises(RuntimeError):
            async with serving.closed():
                raise RuntimeError("push failed")
        assert (await serving.generate(ask(None))).output_ids
        async with serving.closed():
            started = time.monotonic()
            with pytest.raises(PushTimeout, match="temporarily"):
                await serving.generate(ask(None))
            with pytest.raises(PushTimeout):
                await anext(aiter(serving.stream(ask(None))))
            assert time.monotonic() - started < 3


async def test_no_request_fails_while_full_weights_change(serving: LocalServing, other: Path) -> None:
    base, full = release("base", 0), release("checkpoint", 1)
    stop = asyncio.Event()
    answers = []

    async def client(seed: int) -> None:
        while not stop.is_set():
            answers.append(
                await serving.generate(ask(None, seed, Sampling(max_new_tokens=40, temperature=0.0, ignore_eos=True)))
            )

    clients = [asyncio.ensure_future(client(seed)) for seed in range(6)]
    for each, folder in ((full, other), (base, None), (full, other)):
        await asyncio.sleep(0.2)
        await serving.load(each, folder)
    stop.set()
    await asyncio.gather(*clients)
    assert all(len(answer.output_ids) == 40 and answer.spans[-1].end == 40 for answer in answers)
    assert {span.version for answer in answers for span in answer.spans} == {"base", "s@r1-00000000"}


async def test_the_same_weights_as_another_release_get_another_label_and_no_pause(serving: LocalServing, other: Path) -> None:
    """A gate's release has the content of the step it judged."""
    step, gate, back = release("checkpoint", 1), release("checkpoint", 2), release("base", 0)
    await serving.load(step, other)
    slow = Sampling(max_new_tokens=200, temperature=0.0, ignore_eos=True)
    under_way = asyncio.ensure_future(serving.generate(ask(step, 1, slow)))
    await asyncio.sleep(0.05)
    async with serving.closed():  # whoever had to pause the engine would wait here
        async with asyncio.timeout(20):
            await serving.load(gate, other)
    assert (await serving.generate(ask(gate))).spans == (TokenSpan("s@r2-00000000", 0, 10),)
    assert {span.version for span in (await under_way).spans} <= {"s@r1-00000000", "s@r2-00000000"}
    assert not serving.servable(step) and serving.servable(gate)
    await serving.load(back, None)
    assert (await serving.generate(ask(back))).spans[0].version == "base"


async def test_a_restarted_engine_is_filled_again(tiny: Path, other: Path, lora: Path, tmp_path: Path) -> None:
    engine = Live(tiny, tmp_path / "log", "--skip-invariance-check").wait()
    client = EngineClient(engine.url)
    serving = LocalServing(client, model_dir=tiny)
    try:
        await serving.load(release("checkpoint", 1), other)
        await serving.load(release("lora", 2), lora)
        before = [await serving.generate(ask(each)) for each in (release("checkpoint", 1), release("lora", 2))]
        engine.process.kill()
        engine.process.wait()
        port = engine.port
        engine = Live(tiny, tmp_path / "log2", "--skip-invariance-check", "--port", str(port))
        engine.url = client.base_url
        engine.wait()
        await serving.restore()
        after = [await serving.generate(ask(each)) for each in (release("checkpoint", 1), release("lora", 2))]
        assert [(a.output_ids, a.logprobs) for a in after] == [(b.output_ids, b.logprobs) for b in before]
    finally:
        await client.close()
        engine.stop()


async def test_a_restore_loads_the_rest_when_one_is_gone(
    serving: LocalServing, lora: Path, lora2: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(lora, copied)
    await serving.load(release("lora", 1), copied)
    await serving.load(release("lora", 2), lora2)
    for name in await serving.client.adapters():
        await serving.client.unload_lora(name)
    shutil.rmtree(copied)
    with pytest.raises(EngineError):
        await serving.restore()
    assert serving.servable(release("lora", 2)) and not serving.servable(release("lora", 1))


async def test_the_room_for_answers_is_the_context_left(serving: LocalServing) -> None:
    open_end = Sampling(max_new_tokens=None, temperature=0.0, ignore_eos=True)
    done = await serving.generate(GenerateRequest(ids_of(480), open_end))
    assert done.finish == "length" and len(done.output_ids) == 512 - 480 - 1
    capped = await serving.generate(
        GenerateRequest(ids_of(500), Sampling(max_new_tokens=4000, temperature=0.0, ignore_eos=True))
    )
    assert len(capped.output_ids) == 11


async def test_tokens_the_model_does_not_have_never_reach_the_engine(live: Live) -> None:
    async with EngineClient(live.url) as client:
        serving = LocalServing(client, context_length=512, vocabulary=400)
        for ids, bias in (([5, 400], {}), ([-1], {}), ([5], {400: 1.0})):
            sampling = Sampling(max_new_tokens=1, temperature=0.0, logit_bias=bias)
            with pytest.raises(InvalidRequest, match="none of the model's 400"):
                await serving.generate(GenerateRequest(ids, sampling))
        assert (await serving.generate(GenerateRequest([399], Sampling(max_new_tokens=1)))).output_ids


async def test_an_adapter_the_engine_would_not_survive_is_refused_before_it_is_sent(live: Live, lora: Path) -> None:
    def refuse(folder: Path) -> None:
        raise UnsupportedArtifact(f"{folder.name} does not fit")

    async with EngineClient(live.url) as client:
        serving = LocalServing(client, check=refuse)
        with pytest.raises(UnsupportedArtifact, match="does not fit"):
            await serving.load(release("lora", 1), lora)
        assert await client.adapters() == [] and not serving.servable(release("lora", 1))


async def test_an_engine_that_ran_before_keeps_its_own_name_for_its_weights(live: Live, tiny: Path) -> None:
    async with EngineClient(live.url) as client:
        await client.set_version("default")
        await client.pause("retract")
        await client.begin_update()
        serving = LocalServing(client, model_dir=tiny)
        await serving.take_over()
        base = release("base", 0)
        assert serving.version_of(base) == "default" and serving.servable(base)
        await serving.load(base, None)
        assert (await serving.generate(ask(base))).spans[0].version == "default"
        await client.set_version("s@r1-00000000")
        other = LocalServing(client, model_dir=tiny)
        await other.take_over()
        assert other.version_of(base) == "base"
        await other.load(base, None)
        assert (await client.model_info())["weight_version"] == "base"


async def test_what_a_push_left_that_was_cut_off_is_no_release(live: Live, tiny: Path, other: Path) -> None:
    """The server died while weights changed: paused, a session open, half the weights there, and the label says so."""
    async with EngineClient(live.url) as client:
        before = await client.checksum()
        await client.pause("retract")
        await client.update_from_disk(other, PARTIAL)
        await client.begin_update()
        serving = LocalServing(client, model_dir=tiny)
        await serving.take_over()
        assert (await client.model_info())["weight_version"] == "base" and await client.checksum() == before
        assert (await serving.generate(ask(release("base", 0)))).spans[0].version == "base"


async def test_memory_is_lent_and_taken_back_with_requests_waiting(live: Live, tiny: Path) -> None:
    async with EngineClient(live.url) as client:
        serving = LocalServing(client, model_dir=tiny)
        running = asyncio.create_task(serving.generate(ask(release("base", 0))))
        async with serving.lent():
            waiting = asyncio.create_task(serving.generate(ask(release("base", 0))))
            await asyncio.sleep(0.2)
            assert not waiting.done() and (await serving.info())["pushing"]
        assert (await running).output_ids == (await waiting).output_ids


class Breaking:
    """A push that changes the engine's weights and breaks before they are labelled."""

    def __init__(self, client: EngineClient, folder: Path, error: Exception) -> None:
        self.client, self.folder, self.error = client, folder, error
        self.calls = 0

    async def __call__(self, directory: Path, label: str, held: Held | None) -> None:
        self.calls += 1
        await self.client.begin_update()  # left open, as a trainer that dies leaves it
        await self.client.update_from_disk(self.folder, "base")
        raise self.error


@pytest.mark.parametrize("error", [TrainerError("it died"), EngineError("lost", dirty=True)])
async def test_a_push_that_breaks_half_way_leaves_the_old_weights(own: Live, tiny: Path, other: Path, error: Exception) -> None:
    async with EngineClient(own.url) as client:
        push = Breaking(client, other, error)
        serving = LocalServing(client, model_dir=tiny, push=push)
        before = await serving.generate(ask(release("base", 0)))
        with pytest.raises(type(error)):
            await serving.load(release("checkpoint", 1), other)
        after = await serving.generate(ask(release("base", 0)))
        assert (after.output_ids, after.logprobs, after.spans) == (before.output_ids, before.logprobs, before.spans)
        assert push.calls == 1 and not serving.servable(release("checkpoint", 1))


async def test_an_engine_that_cannot_be_healed_is_restarted_or_serves_nobody(
    own: Live, tiny: Path, other: Path, tmp_path: Path
) -> None:
    revived: list[bool] = []

    async def revive() -> None:
        revived.append(True)

    async with EngineClient(own.url) as client:
        for how in (revive, None):
            serving = LocalServing(
                client, model_dir=tmp_path, push=Breaking(client, other, TrainerError("it died")), revive=how
            )
            with pytest.raises(EngineError if how is None else TrainerError):
                await serving.load(release("checkpoint", 1), other)
            await client.resume()
        assert revived == [True]
        with pytest.raises(EngineUnavailable, match="mixture"):
            await serving.generate(ask(None))


async def test_releases_come_and_go_under_eight_streaming_clients(live: Live, lora: Path, lora2: Path) -> None:
    """Each release is loaded, clients move to it, the one before is unloaded at once; nobody sees an error."""
    async with EngineClient(live.url) as client:
        serving = LocalServing(client)
        train = [release("lora", step) for step in range(6)]
        current = train[0]
        await serving.load(current, lora)
        stop, answers = asyncio.Event(), []

        async def attend(seed: int) -> None:
            while not stop.is_set():
                served = current
                deltas = [delta async for delta in serving.stream(ask(served, seed))]
                assert deltas[-1].completion is not None
                answers.append((seed, served.step, deltas[-1].completion))

        clients = [asyncio.ensure_future(attend(seed)) for seed in range(8)]
        for step in range(1, 6):
            await asyncio.sleep(0.2)
            before, after = current, train[step]
            await serving.load(after, lora2 if step % 2 else lora)
            current = after
            await serving.unload(before)
        stop.set()
        await asyncio.gather(*clients)
        await serving.unload(current)
        assert await client.adapters() == []
    assert {step for _, step, _ in answers} >= {0, 1, 2, 3, 4}
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for seed, step, done in answers:
        assert done.spans == (TokenSpan(f"s@r{step}-00000000", 0, 10),)
        found.setdefault((seed, step % 2), set()).add(done.output_ids)
    assert all(len(ids) == 1 for ids in found.values())


async def test_an_adapter_loaded_again_while_it_leaves_stays(live: Live, lora: Path) -> None:
    async with EngineClient(live.url) as client:
        serving, one = LocalServing(client), release("lora", 1)
        await serving.load(one, lora)
        stream = serving.stream(ask(one, sampling=Sampling(max_new_tokens=300, temperature=0.0, ignore_eos=True)))
        await anext(stream)
        leaving = asyncio.ensure_future(serving.unload(one))
        await asyncio.sleep(0)
        assert not serving.servable(one) and not leaving.done()
        await serving.load(one, lora)
        assert [delta async for delta in stream][-1].completion is not None
        await leaving
        assert serving.servable(one) and (await serving.generate(ask(one))).output_ids
        await serving.unload(one)
        assert await client.adapters() == []


async def test_a_return_to_an_adapter_that_is_still_there_loads_nothing(live: Live, lora: Path, lora2: Path) -> None:
    async with EngineClient(live.url) as client:
        serving = LocalServing(client)
        one, two, back = (release("lora", step) for step in (1, 2, 3))
        await serving.load(one, lora)
        await serving.load(two, lora2)
        await serving.load(back, lora)
        assert sorted(await client.adapters()) == ["s@r1-00000000", "s@r2-00000000"], "the third needs none of its own"
        first, again = await serving.generate(ask(one)), await serving.generate(ask(back))
        assert again.output_ids == first.output_ids != (await serving.generate(ask(two))).output_ids
        assert {span.version for span in again.spans} == {"s@r3-00000000"}, "each answer says which release gave it"
        assert serving.servable(one) and serving.servable(back)
        assert (await serving.info())["adapters"] == ["s@r1-00000000", "s@r2-00000000", "s@r3-00000000"]
        await serving.unload(one)
        assert not serving.servable(one) and (await serving.generate(ask(back))).output_ids == first.output_ids
        # Under its first name it is there still, though no release of that name is.
        await serving.load(one, lora)
        assert serving.servable(one) and len(await client.adapters()) == 2
        long = Sampling(max_new_tokens=300, temperature=0.0, ignore_eos=True)
        stream = serving.stream(ask(back, sampling=long))
        await anext(stream)
        leaving = [asyncio.ensure_future(serving.unload(each)) for each in (back, one)]
        assert [delta async for delta in stream][-1].completion is not None
        await asyncio.gather(*leaving)
        await serving.unload(two)
        assert await client.adapters() == []


async def test_releases_that_share_an_adapter_share_it_again_after_a_restart(serving: LocalServing, lora: Path) -> None:
    one, back = release("lora", 1), release("lora", 2)
    await serving.load(one, lora)
    await serving.load(back, lora)
    await serving.unload(one)
    for name in await serving.client.adapters():
        await serving.client.unload_lora(name)
    await serving.restore()
    assert await serving.client.adapters() == ["s@r2-00000000"] and (await serving.generate(ask(back))).output_ids
    await serving.unload(back)
    assert await serving.client.adapters() == []
