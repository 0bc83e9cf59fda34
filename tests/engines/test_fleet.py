"""Several real engines behind one client: conversations stay, loads are shared, control calls reach all or none."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from reef_cli.core.errors import EngineError, EngineUnavailable
from reef_cli.core.ports import Sampling
from reef_cli.engines.client import EngineClient
from reef_cli.engines.fleet import Fleet
from reef_cli.engines.serving import LocalServing
from tests.engines.live import Live, ids_of
from tests.engines.test_serving import ask, release

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def lives(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Live]]:
    folder = tmp_path_factory.mktemp("fleet")
    engines = [Live(tiny, folder / f"log{number}", "--skip-invariance-check") for number in range(2)]
    yield [engine.wait() for engine in engines]
    for engine in engines:
        engine.stop()


@pytest.fixture
async def fleet(lives: list[Live]) -> AsyncIterator[Fleet]:
    made = Fleet([EngineClient(engine.url) for engine in lives])
    for member in made.members:
        await member.flush(10)
    yield made
    await made.close()


async def cached(fleet: Fleet, ids: list[int]) -> int:
    return (await fleet.generate(ids, GREEDY, max_new_tokens=2)).cached_tokens


async def test_a_conversation_stays_where_its_prefix_is_and_new_ones_go_round(fleet: Fleet) -> None:
    talks = [ids_of(60, seed) for seed in range(4)]
    for talk in talks:
        assert await cached(fleet, talk) == 0
    assert [fleet._choose(talk) for talk in talks] == [0, 1, 0, 1]
    for talk in talks:
        assert await cached(fleet, talk + ids_of(30, 9)) >= 56, "the next turn begins with the last one"


async def test_load_is_shared_and_streams_are_whole(fleet: Fleet) -> None:
    same = ids_of(40, 3)
    streams = [fleet.stream(same, GREEDY, max_new_tokens=60) for _ in range(12)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    assert sorted(fleet._busy.values()) == [5, 7], "a conversation moves where its engine is much busier"
    ends = await asyncio.gather(*(rest(stream) for stream in streams))
    assert len({end.output_ids for end in ends}) == 1 and set(fleet._busy.values()) == {0}


async def rest(stream):
    return [delta async for delta in stream][-1].completion


async def test_an_engine_that_is_away_gets_no_requests(lives: list[Live]) -> None:
    clients = [EngineClient(lives[0].url), EngineClient("http://127.0.0.1:9")]
    fleet = Fleet(clients, ready=lambda member: member is clients[0])
    for seed in range(3):
        await fleet.generate(ids_of(40, seed), GREEDY, max_new_tokens=1)
    nobody = Fleet(clients, ready=lambda member: False)
    with pytest.raises(EngineUnavailable, match="No engine is ready"):
        await nobody.generate([5], GREEDY, max_new_tokens=1)
    await fleet.close()


async def test_releases_are_loaded_by_all(fleet: Fleet, lora: Path, tiny: Path, other: Path) -> None:
    serving = LocalServing(fleet, model_dir=tiny, context_length=512)
    first = release("lora", 1)
    await serving.load(first, lora)
    assert [await member.adapters() for member in fleet.members] == [["s@r1-00000000"]] * 2
    answers = [await serving.generate(ask(first, seed)) for seed in (0, 1, 0, 1)]
    assert answers[0].output_ids == answers[2].output_ids
    full = release("checkpoint", 2)
    await serving.load(full, other)
    assert (await fleet.model_info())["weight_version"] == "s@r2-00000000" and await fleet.checksum()
    await serving.load(release("base", 0), None)
    await serving.unload(first)
    assert await fleet.adapters() == [] and (await fleet.model_info())["weight_version"] == "base"


async def test_what_one_refuses_none_keeps(fleet: Fleet, lora: Path, lora2: Path, tiny: Path) -> None:
    taken = "s@r5-00000000"
    await fleet.members[1].load_lora("other", lora)
    with pytest.raises(EngineError):
        await fleet.load_lora("other", lora.parent / "nowhere")
    assert await fleet.members[0].adapters() == []
    await fleet.load_lora("other", lora)
    assert await fleet.adapters() == ["other"]
    await fleet.unload_lora("other")
    with pytest.raises(EngineError):
        await fleet.load_lora(taken, lora.parent / "nowhere")
    assert [await member.adapters() for member in fleet.members] == [[], []]


async def test_an_engine_that_stops_answering_a_push_is_named_in_time_and_the_others_serve(
    fleet: Fleet, lora: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is taken and nothing is ever said: no refusal, no end."""
    ended = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    class Wedging(EngineClient):
        """Its control calls go nowhere while `wedged`; the rest of it answers."""

        wedged = True

        async def _control(self, path, body, timeout_s=0.5):
            if self.wedged and path.endswith("_lora_adapter"):
                nowhere = EngineClient(f"http://127.0.0.1:{port}")
                try:
                    return await nowhere._control(path, body, timeout_s)
                finally:
                    await nowhere.close()
            return await super()._control(path, body)

    monkeypatch.setattr("reef_cli.engines.fleet._TAKE_BACK_S", 0.5)
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    odd = Fleet([fleet.members[0], Wedging(fleet.members[1].base_url)])
    serving = LocalServing(odd, model_dir=tiny, context_length=512)
    before = [(await serving.generate(ask(None, seed))).output_ids for seed in (0, 1)]
    new = release("lora", 8)
    async with asyncio.timeout(10):
        with pytest.raises(EngineUnavailable) as caught:
            await serving.load(new, lora)
    assert caught.value.details["engine"] == odd.members[1].base_url
    assert [await member.adapters() for member in odd.members] == [[], []], "the healthy one keeps nothing of it"
    assert [(await serving.generate(ask(None, seed))).output_ids for seed in (0, 1)] == before
    odd.members[1].wedged = False  # type: ignore[attr-defined]
    await serving.load(new, lora)
    assert (await serving.generate(ask(new, 0))).spans
    await serving.unload(new)
    ended.set()
    server.close()
    await odd.members[1].close()


async def test_a_swap_that_fails_on_the_second_brings_the_first_back(fleet: Fleet, tiny: Path, other: Path) -> None:
    class Refusing(EngineClient):
        fails = True

        async def update_from_disk(self, directory: Path, version: str, timeout_s: float = 600.0) -> None:
            if self.fails and version != "base":
                raise EngineError("no room")
            await super().update_from_disk(directory, version, timeout_s)

    odd = Fleet([fleet.members[0], Refusing(fleet.members[1].base_url)])
    serving = LocalServing(odd, model_dir=tiny, context_length=512)
    before = await serving.generate(ask(None))
    with pytest.raises(EngineError, match="no room") as caught:
        await serving.load(release("checkpoint", 3), other)
    assert caught.value.details["engine"] == odd.members[1].base_url
    assert (await odd.model_info())["weight_version"] == "base" and await odd.checksum()
    assert [(await serving.generate(ask(None, 0))).output_ids for _ in range(2)] == [before.output_ids] * 2
    await odd.members[1].close()
