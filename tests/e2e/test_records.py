"""Experience from outside: sessions as trees on the command line, exports that import back, what a long session costs."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.upstream import Upstream
from tests.e2e.server import Server, reef, stopped, until

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def say(client: httpx.Client, messages: list[dict[str, Any]], text: str, **more: Any) -> str:
    """One turn on a transcript that grows; its receipt."""
    messages.append({"role": "user", "content": text})
    reply = client.post(CHAT, json={"model": "m", "messages": messages, "tools": TOOLS} | more)
    assert reply.status_code == 200, reply.text
    messages.append(reply.json()["choices"][0]["message"])
    return str(reply.headers["x-reef-agent-record-id"])


def command(front: Server, *words: str) -> Any:
    done = reef(*words, "--json", "--home", str(front.home))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_agents_session_is_one_tree(front: Server, provider: Upstream) -> None:
    """Turns, a title, a client's retry, a sub-agent under the session's name, a compaction and the turn after it."""
    client = front.client(**{"x-reef-scenario": "tree", "x-claude-code-session-id": "run-1"})
    talk: list[dict[str, Any]] = [{"role": "system", "content": "You are a coding agent."}]
    first = say(client, talk, "Fix the bug")
    title = {
        "messages": [{"role": "system", "content": "You are a title generator."}, {"role": "user", "content": "Fix the bug"}]
    }
    client.post(CHAT, json={"model": "m", **title})
    second = say(client, talk, "And the test")
    body = {"model": "m", "messages": talk[:-1], "tools": TOOLS}
    assert client.post(CHAT, json=body).status_code == 200, "the same request again: the client gave up on the first"
    helper: list[dict[str, Any]] = [{"role": "system", "content": "You are a sub-agent that searches."}]
    sub = say(client, helper, "Find the file")
    summary = "You are a context summarization assistant."
    compacting = [{"role": "system", "content": summary}, {"role": "user", "content": f"<conversation>{talk}</conversation>"}]
    client.post(CHAT, json={"model": "m", "messages": compacting})
    after = say(client, [talk[0], {"role": "user", "content": "Summary: bug fixed."}], "Go on")

    (row,) = command(front, "sessions", "list", "-s", "tree")["sessions"]
    assert (row["session"], row["records"], row["turns"]) == ("run-1", 7, 4)
    tree = command(front, "sessions", "show", "run-1", "-s", "tree")
    kinds = {
        turn["row"]["id"]: (branch["kind"], turn["row"]["role"]) for branch in tree["branches"] for turn in branch["turns"]
    }
    assert kinds[first] == kinds[second] == ("main", "turn")
    assert kinds[sub][1] == kinds[after][1] == "turn" and kinds[sub][0] == kinds[after][0] == "root"
    assert sorted(role for _, role in kinds.values() if role != "turn") == ["compaction", "title"]
    assert [turn["row"]["role"] for turn in tree["retries"]] == ["retry"]

    shown = reef("sessions", "show", "run-1", "-s", "tree", "--home", str(front.home)).stdout
    assert "branch 0 (main): 2 calls, 0 of 14 output tokens can train" in shown and "retries: 1" in shown
    assert shown.index(first) < shown.index(second) < shown.index(sub) < shown.index(after)


def test_fifty_turns_cost_a_fifteenth_and_come_back_exactly(front: Server, provider: Upstream) -> None:
    client = front.client(**{"x-reef-scenario": "fifty"})
    talk: list[dict[str, Any]] = [{"role": "system", "content": "You code, carefully. " * 150}]
    bodies = []
    for number in range(50):
        provider.text = f"answer {number} " * 30
        talk.append({"role": "user", "content": f"question {number} " * 40})
        bodies.append(json.dumps({"model": "m", "messages": talk, "tools": TOOLS}).encode())
        reply = client.post(CHAT, content=bodies[-1])
        talk.append(reply.json()["choices"][0]["message"])
    (row,) = [row for row in front.get("/reef/scenarios")["scenarios"] if row["name"] == "fifty"]
    naive = sum(map(len, bodies))
    assert row["counts"]["stored_bytes"] * 15 <= naive, f"the saving is {naive / row['counts']['stored_bytes']:.1f}"
    rows = front.get("/reef/scenarios/fifty/records", limit=100)["records"]
    assert len({one["session"] for one in rows}) == 1
    found = [client.get(f"/reef/scenarios/fifty/records/{one['id']}").json()["request"].encode() for one in rows]
    assert found == bodies


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_export_moves_a_scenario(front: Server, provider: Upstream, tmp_path: Path, suffix: str) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    client = front.client(**{"x-reef-scenario": "moved"})
    receipt = say(client, [], "Grüße\u2028")
    client.post("/reef/report", json={"score": 0.5, "references": [receipt], "agent_record_id": f"r:{suffix}"})
    file = tmp_path / f"all.{suffix}"
    count = command(front, "records", "export", str(file), "-s", "moved")["exported"]
    assert count == len(front.get("/reef/scenarios/moved/records")["records"])
    moved = command(front, "records", "import", str(file), "-s", "moved")
    assert (moved["received"], moved["stored"]) == (count, 0), "everything is known here"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    refused = reef("records", "import", str(file), "-s", f"copy-{suffix}", "--home", str(front.home))
    assert refused.returncode == 4 and "another scenario" in refused.stderr, "ids are unique in a home"


def test_what_is_not_recorded_leaves_nothing(front: Server, provider: Upstream) -> None:
    client = front.client(**{"x-reef-scenario": "quiet", "x-reef-capture": "off"})
    for stream in (False, True):
        ask = {"model": "m", "messages": [{"role": "user", "content": "secret"}], "stream": stream}
        reply = client.post(CHAT, json=ask)
        assert (
            reply.status_code == 200 and "x-reef-agent-record-id" not in reply.headers and "agent_record_id" not in reply.text
        )
    assert front.get("/reef/scenarios/quiet/records")["records"] == []


def test_what_nothing_learned_from_is_evicted_only_when_told_and_never_without_a_word(
    double: Upstream, provider: Upstream, tmp_path: Path
) -> None:
    kept = {"engine.kind": "upstream", "engine.url": double.url, "storage.keep_bytes": "0"}
    server = Server(tmp_path / "h", {"engine.model": "stub-model", **kept})
    with stopped(server):
        receipt = say(server.start().ready().client(), [], "remember this")
        server.stop()
        server.start().ready()
        until(lambda: "storage.unconsumed: evict" in server.words(), "the word that limits are exceeded")
        assert server.client().get(f"/reef/scenarios/default/records/{receipt}").status_code == 200
        server.stop()
        server.settings["storage.unconsumed"] = "evict"
        client = server.start().ready().client()
        until(lambda: client.get(f"/reef/scenarios/default/records/{receipt}").status_code == 404, "the body being dropped")
        (row,) = server.get("/reef/scenarios/default/records")["records"]
        assert row["id"] == receipt and row["evicted_at"] and "evicted 1 records" in server.words()
        answer = client.post("/reef/report", json={"score": 1, "references": [receipt]})
        assert answer.status_code == 400 and "evicted by retention" in answer.json()["error"]["message"]


def test_a_turn_late_in_a_long_session_costs_about_what_an_early_one_does(front: Server, provider: Upstream) -> None:
    """400 turns that each send the whole transcript, and no session named: what is spent beyond passing the body on.

    A late turn sends nine times as many messages as an early one, so that eight times the cost is less than linear.
    """
    threads = Path(f"/proc/{front.pid}/task")

    def cpu() -> float:
        return sum(int((one / "schedstat").read_text().split()[0]) for one in threads.iterdir()) / 1e9

    def spent(scenario: str, **headers: str) -> tuple[float, float]:
        """Seconds of the server's CPU for turns 20 to 70, and for the last 50."""
        client = front.client(**{"x-reef-scenario": scenario, **headers})
        talk: list[dict[str, Any]] = [{"role": "system", "content": "You code, carefully."}]
        marks = []
        for number in range(400):
            if number in (20, 70, 350):
                marks.append(cpu())
            talk.append({"role": "user", "content": f"question {number} in some words more"})
            reply = client.post(CHAT, json={"model": "m", "messages": talk})
            talk.append(reply.json()["choices"][0]["message"])
        return marks[1] - marks[0], cpu() - marks[2]

    early, late = spent("long")
    early_off, late_off = spent("long-off", **{"x-reef-capture": "off"})
    assert late - late_off < 8 * max(early - early_off, 0.02), (early, late, early_off, late_off)
    rows = front.get("/reef/scenarios/long/sessions")["sessions"]
    assert [row["turns"] for row in rows] == [400]
    print(f"CPU for 50 turns: early {early:.2f} s, late {late:.2f} s; without a record {early_off:.2f} s and {late_off:.2f} s")
