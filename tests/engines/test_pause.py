"""Pauses, aborts, disconnects: what happens to requests under way and to those that come meanwhile."""

import asyncio

import httpx
import pytest

from tests.engines.live import Live, ids_of, settled

LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}


async def _post(http: httpx.AsyncClient, path: str, body: dict | None = None) -> httpx.Response:
    return await http.post(path, json=body or {})


def _client(live: Live) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=live.url, timeout=60, limits=httpx.Limits(max_connections=50))


async def _state(http: httpx.AsyncClient) -> dict:
    return (await http.get("/server_info")).json()["internal_states"][0]


async def _start(http: httpx.AsyncClient, rid: str = "r", **sampling) -> asyncio.Task:
    """A long request that has made some tokens already."""
    before = (await _state(http))["steps"]
    body = {"rid": rid, "input_ids": ids_of(30), "sampling_params": LONG | sampling, "return_logprob": True}
    task = asyncio.ensure_future(_post(http, "/generate", body))
    while (await _state(http))["steps"] < before + 4:
        await asyncio.sleep(0.005)
    return task


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_requests_survive_a_pause_and_carry_both_versions(live: Live, mode: str) -> None:
    whole = live.generate(ids_of(30), **LONG)
    async with _client(live) as http:
        task = await _start(http)
        assert (await _post(http, "/pause_generation", {"mode": mode})).json()["status"] == "ok"
        assert (await http.get("/ready")).status_code == 503
        frozen = await _state(http)
        late = asyncio.ensure_future(
            _post(http, "/generate", {"input_ids": ids_of(9), "sampling_params": {"max_new_tokens": 2}})
        )
        await asyncio.sleep(0.2)
        assert not task.done() and not late.done()
        assert (await _state(http))["steps"] == frozen["steps"]
        version = {"new_version": "next", "abort_all_requests": False}
        assert (await _post(http, "/update_weight_version", version)).json() == {
            "success": True,
            "message": "Weight version updated to next",
            "new_version": "next",
        }
        flushed = await _post(http, "/flush_cache")
        assert flushed.status_code == (200 if mode == "retract" else 400)
        await _post(http, "/continue_generation")
        reply = (await task).json()
        assert (await late).json()["meta_info"]["completion_tokens"] == 2
        await _post(http, "/update_weight_version", {"new_version": "base", "abort_all_requests": False})
    spans = reply["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["base", "next"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 400
    assert reply["output_ids"] == whole["output_ids"]
    assert reply["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    assert reply["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


async def test_the_default_pause_aborts_with_what_there_is(live: Live) -> None:
    async with _client(live) as http:
        task = await _start(http)
        await _post(http, "/pause_generation", {"mod": "in_place"})
        reply = (await task).json()
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(reply["output_ids"]) < 400 == LONG["max_new_tokens"]
        assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])
        await _post(http, "/continue_generation")
        assert live.generate(ids_of(5), max_new_tokens=2)["meta_info"]["completion_tokens"] >= 1


async def test_an_unknown_pause_mode_is_refused(live: Live) -> None:
    assert live.post("/pause_generation", {"mode": "gently"}).status_code == 400


async def test_updating_the_version_aborts_unless_told_otherwise(live: Live) -> None:
    async with _client(live) as http:
        task = await _start(http)
        await _post(http, "/update_weight_version", {"new_version": "base"})
        assert (await task).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_aborting_matches_the_beginning_of_ids_but_only_of_a_known_one(live: Live) -> None:
    async with _client(live) as http:
        first, second = await _start(http, "abc1"), await _start(http, "abc12")
        await _post(http, "/abort_request", {"rid": "abc"})
        await _post(http, "/abort_request", {"rid": ""})
        await asyncio.sleep(0.05)
        assert not first.done()
        await _post(http, "/abort_request", {"rid": "abc1"})
        replies = [(await task).json() for task in (first, second)]
        assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies] == ["abort", "abort"]
        third = await _start(http, "zzz")
        await _post(http, "/abort_request", {"abort_all": True})
        assert (await third).json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_seat(live: Live, stream: bool) -> None:
    async with _client(live) as http:
        body = {"input_ids": ids_of(30), "sampling_params": LONG, "stream": stream}

        async def attend() -> None:
            async with http.stream("POST", "/generate", json=body) as reply:
                async for _ in reply.aiter_bytes():
                    pass

        task = asyncio.ensure_future(attend())
        while not (await _state(http))["running"]:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        steps = (await _state(http))["steps"]
        for _ in range(400):
            state = await _state(http)
            if not state["running"]:
                break
            await asyncio.sleep(0.01)
        assert state["running"] == 0 and state["steps"] - steps < 390


async def test_flush_waits_for_running_requests_within_its_timeout(live: Live) -> None:
    async with _client(live) as http:
        task = await _start(http)
        assert (await _post(http, "/flush_cache")).status_code == 400
        assert (await _post(http, "/flush_cache?timeout=30")).status_code == 200
        assert (await _state(http))["cached_tokens"] == 0
        await task


async def test_health_answers_503_while_paused(tiny, tmp_path) -> None:
    engine = Live(tiny, tmp_path / "log", "--health-timeout", "0.5", "--skip-invariance-check").wait()
    try:
        async with _client(engine) as http:
            assert (await http.get("/health")).status_code == 200
            await _post(http, "/pause_generation", {"mode": "in_place"})
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/model_info")).status_code == 200
            await _post(http, "/continue_generation")
            assert (await http.get("/health")).status_code == 200
    finally:
        engine.stop()


async def test_more_requests_than_seats_wait_and_all_are_answered(tiny, tmp_path) -> None:
    engine = Live(
        tiny, tmp_path / "log", "--max-running-requests", "3", "--prefix-slots", "0", "--skip-invariance-check"
    ).wait()
    try:
        async with _client(engine) as http:
            body = lambda i: {"input_ids": ids_of(10 + i, i), "sampling_params": {"temperature": 0, "max_new_tokens": 15}}  # noqa: E731
            replies = await asyncio.gather(*(_post(http, "/generate", body(i)) for i in range(20)))
            assert all(reply.status_code == 200 and reply.json()["output_ids"] for reply in replies)
            assert await settled(lambda: engine.process.poll() is None)
            assert (await _state(http))["running"] == 0
    finally:
        engine.stop()
