"""The event stream: live, resumable without a gap or a repeat, patient with slow readers, quick to end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.gateway.fakes import AUTH, House, house


@asynccontextmanager
async def stream(reef: House, query: str = "", **headers: str) -> AsyncIterator[Any]:
    async with reef.client.get(f"/reef/events{query}", headers={**AUTH, **headers}) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream"
        yield answer


async def next_event(answer: Any) -> tuple[str, str, Any]:
    """`(id, event, data)` of the next frame with data."""
    fields: dict[str, str] = {}
    while True:
        line = (await asyncio.wait_for(answer.content.readline(), 5)).decode()
        assert line, "the stream ended"
        if line == "\n":
            if "data" in fields:
                return fields["id"], fields["event"], json.loads(fields["data"])
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.rstrip("\n").partition(": ")
            fields[name] = value


async def test_live_events(reef: House) -> None:
    await reef.chat(text="before")
    async with stream(reef) as answer:
        receipt = await reef.chat()
        _, kind, data = await next_event(answer)
        assert (kind, data["id"], data["scenario"], data["kind"]) == ("record", receipt, "s1", "inference")
        await reef.send("POST", "/reef/report", {"score": 1, "references": [receipt]}, {"x-reef-scenario": "s1"})
        _, kind, data = await next_event(answer)
        assert (kind, data["kind"], data["score"]) == ("record", "report", 1.0)
        await reef.log.write(
            lambda c: (
                c.execute("INSERT INTO release_events (scenario, release_id, at, event) VALUES ('s1', 'r1', 1.0, 'served')")
                and None
            )
        )
        _, kind, data = await next_event(answer)
        assert (kind, data["release_id"], data["event"]) == ("release", "r1", "served")


async def test_resuming_exactly(reef: House) -> None:
    receipts = [await reef.chat(text=f"q{number}") for number in range(6)]
    seen: list[str] = []
    cursor = "0.0.0"
    for _ in range(6):  # one event per connection: each resumes after the last
        async with stream(reef, **{"Last-Event-ID": cursor}) as answer:
            cursor, _, data = await next_event(answer)
            seen.append(data["id"])
    assert seen == receipts
    async with stream(reef, f"?after={cursor}") as answer:
        receipt = await reef.chat()
        assert (await next_event(answer))[2]["id"] == receipt


async def test_more_than_a_page(reef: House) -> None:
    records = [{"id": f"i:{n}", "dialect": "chat", "model": "m", "request": "{}", "response": None} for n in range(450)]
    assert (await reef.send("POST", "/reef/records/batch", records, {"x-reef-scenario": "s1"}))[0] == 200
    async with stream(reef, "?after=0.0.0") as answer:
        assert [(await next_event(answer))[2]["id"] for _ in range(450)] == [record["id"] for record in records]


async def test_limit_and_scenario(reef: House) -> None:
    await reef.chat("s1")
    wanted = [await reef.chat("s2"), await reef.chat("s2")]
    await reef.chat("s1")
    async with stream(reef, "?after=0.0.0&scenario=s2&limit=2") as answer:
        text = await asyncio.wait_for(answer.text(), 5)
    assert [json.loads(line[6:])["id"] for line in text.splitlines() if line.startswith("data: ")] == wanted


async def test_wrong_cursors(reef: House) -> None:
    for cursor in ("x", "1", "1.2", "1.2.3.4", "-1.0.0", "1e3.0.0", "٣.0.0"):
        assert (await reef.send("GET", f"/reef/events?after={cursor}"))[0] == 400, cursor
    assert (await reef.send("GET", "/reef/events?scenario=a%20b"))[0] == 400
    assert (await reef.send("GET", "/reef/events?limit=-1"))[0] == 400


async def test_head_ends_at_once(reef: House) -> None:
    async with reef.client.head("/reef/events", headers=AUTH) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream"


async def test_keep_alive(reef: House) -> None:
    async with stream(reef) as answer:
        text = b""
        while b": keep-alive" not in text:
            text += await asyncio.wait_for(answer.content.readany(), 5)
        assert text.startswith(b"id: ")


async def test_a_stream_ends_when_the_server_drains(reef: House) -> None:
    async with stream(reef) as answer:
        await answer.content.readline()
        reef.deps.draining.start()
        await asyncio.wait_for(answer.content.read(), 2)
        assert await reef.deps.draining.idle(1), "streams are not waited for"


async def test_a_reader_that_leaves_is_forgotten(tmp_path: Path) -> None:
    async with house(tmp_path) as reef:
        async with stream(reef) as answer:
            await answer.content.readline()
            assert reef.metrics.event_streams.value() == 1
            assert len(reef.log._listeners) == 1
        for _ in range(100):
            if reef.metrics.event_streams.value() == 0:
                break
            await asyncio.sleep(0.02)
        assert reef.metrics.event_streams.value() == 0
        assert reef.log._listeners == []


async def test_a_slow_reader_holds_up_nobody(reef: House) -> None:
    async with stream(reef, "?after=0.0.0") as answer:
        for number in range(50):
            await reef.chat(text="x" * 2000 + str(number))
        assert [(await next_event(answer))[2]["kind"] for _ in range(50)] == ["inference"] * 50
