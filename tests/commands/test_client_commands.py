"""Commands in front of a server: what they ask, what they print piped and as JSON."""

import json
from pathlib import Path

import pytest

from tests.commands.runner import Reef
from tests.control.fake_reef import FakeReef, record


def test_status_piped_and_json(reef: Reef) -> None:
    done = reef("status")
    assert done.code == 0
    line = next(line for line in done.out.splitlines() if line.startswith("default\t"))
    assert line.split("\t")[1:6] == ["training, backward 3/16", "r2-cccccccc", "10", "4", "0.700"]
    assert "paused, idle" in done.out
    assert "next: reef tui" in done.err
    done = reef("status", "--json")
    assert done.json["scenarios"][0]["rewards"][-1] == 0.7
    assert done.err == ""


def test_status_names_both_heads(reef: Reef, server: FakeReef) -> None:
    server.scenarios[0]["heads"] = {"weights": "r2-cccccccc", "harness": "r5-eeeeeeee"}
    server.scenarios[0]["routing"] = {"canary": 0.1}
    assert "default\ttraining, backward 3/16\tr2-cccccccc, harness r5-eeeeeeee (routed)\t" in reef("status").out


def test_records_newest_come_last_and_harmless(reef: Reef, server: FakeReef) -> None:
    done = reef("records", "list", "-n", "3")
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert [row[0] for row in rows] == ["8", "9", "10"]
    assert rows[2][-1] == "wiped [red]x[/red]"
    assert "\x1b" not in done.out
    assert server.asked("GET", "/reef/scenarios/default/records")[0][0] == {"limit": "3", "order": "newest"}
    assert "\\u001b" in reef("records", "list", "--json").out  # JSON keeps it, escaped
    assert [
        row["sequence"] for row in reef("records", "list", "--after", "7", "--kind", "report", "--json").json["records"]
    ] == [9]


def test_show_prints_the_conversation_without_its_escape_sequences(reef: Reef, server: FakeReef) -> None:
    server.overrides["GET", "/reef/scenarios/default/records/abc"] = lambda *_: (
        200,
        {
            "id": "abc",
            "messages": [{"role": "user", "content": "hi \x1b[2J"}],
            "response": {"role": "assistant", "content": "yo\nho"},
        },
    )
    done = reef("records", "show", "abc")
    assert "user: hi" in done.out
    assert "yo\nho" in done.out
    assert "\x1b" not in done.out


def test_export_pages_through_everything_and_import_sends_bounded_batches(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    server.records = [record(number) for number in range(1, 613)]
    for row in server.records:
        path = f"/reef/scenarios/default/records/{row['id']}"
        server.overrides["GET", path] = lambda *_, r=row: (200, {**r, "text": "x" * 9000})
    done = reef("records", "export", "all.jsonl")
    assert done.code == 0
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["sequence"] for line in lines] == list(range(1, 613))

    server.overrides["POST", "/reef/records/batch"] = lambda _, body: (200, {"stored": len(body["records"])})
    done = reef("records", "import", "all.jsonl", "-s", "copy", "--json")
    assert done.json == {"scenario": "copy", "received": 612, "stored": 612}
    sent = server.asked("POST", "/reef/records/batch")
    assert sum(len(body["records"]) for _, body, _ in sent) == 612
    assert all(len(json.dumps(body)) < 1024 * 1024 for _, body, _ in sent)
    assert all(headers["x-reef-scenario"] == "copy" for _, _, headers in sent)


def test_a_bad_line_of_an_import_is_named(reef: Reef, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": "a"}\nnot json\n')
    done = reef("records", "import", "bad.jsonl")
    assert done.code == 2
    assert "bad.jsonl:2 is not JSON" in done.err


def test_report_sends_exactly_what_was_said(reef: Reef, server: FakeReef) -> None:
    server.overrides["POST", "/reef/report"] = lambda _, body: (
        200,
        {
            "agent_record_id": "g:1",
            "scenario": "default",
            "eligible": [{"reference": ref, "eligible": False, "reason": "no_recipe"} for ref in body["references"]],
        },
    )
    done = reef(
        "report", "a", "b", "--score", "-0.5", "-f", "wrong", "--meta", "n=3", "--meta", "who=me", "--id", "g:1", "-s", "x"
    )
    assert done.code == 0, done.err
    assert done.out == "report g:1 in default\na\tno\tno_recipe\nb\tno\tno_recipe\n"
    _, body, headers = server.asked("POST", "/reef/report")[0]
    assert body == {
        "references": ["a", "b"],
        "score": -0.5,
        "feedback": "wrong",
        "metadata": {"n": 3, "who": "me"},
        "agent_record_id": "g:1",
    }
    assert headers["x-reef-scenario"] == "x"


def test_chat_prints_answer_and_receipt(reef: Reef, server: FakeReef) -> None:
    server.overrides["GET", "/v1/models"] = lambda *_: (200, {"data": [{"id": "smol"}]})
    server.overrides["POST", "/v1/chat/completions"] = lambda *_: (
        200,
        {"choices": [{"message": {"role": "assistant", "content": "Paris\x1b[2J."}}]},
        {"x-reef-agent-record-id": "0198", "x-reef-release-id": "r2-cccccccc"},
    )
    done = reef("chat", "capital?", "--system", "short", "--temperature", "0")
    assert done.out == "Paris.\n"
    assert "receipt: 0198" in done.err
    body = server.asked("POST", "/v1/chat/completions")[0][1]
    assert body["model"] == "smol"
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["temperature"] == 0
    assert reef("chat", "capital?", "--json").json["receipt"] == "0198"


def test_scenario_verbs(reef: Reef, server: FakeReef) -> None:
    server.overrides["POST", "/reef/scenarios"] = lambda *_: (201, {"name": "new"})
    assert [line.split("\t")[0] for line in reef("scenario", "list").out.splitlines()] == ["default", "support"]
    assert reef("scenario", "create", "new", "--json").json == {"scenario": "new", "created": True}
    assert reef("scenario", "pause", "default").out == "default paused\n"
    assert reef("scenario", "archive", "default", "--dry-run").out == "default would be archived\n"
    assert server.asked("DELETE", "/reef/scenarios/default") == []
    done = reef("scenario", "archive", "default")
    assert done.code == 2
    assert "--yes" in done.err


def job(state: str, **more: object) -> dict[str, object]:
    return {"job_id": "j1", "scenario": "default", "state": state, "outcome": None, "reason": None, "detail": {}, **more}


def test_jobs_show_prints_a_steps_diagnostics(reef: Reef, server: FakeReef) -> None:
    metrics = {
        "masked_share": 0.25, "ess_share": 0.82515, "k3": 0.1169571, "logprob_gap_lag0": None, "skipped": "ess_too_low",
        "lag_histogram": {"0": 12, "2": 4}, "policy_updated": False,
    }  # fmt: skip
    ended = job(
        "settled", outcome="reject", detail={"metrics": metrics, "smoke": 1.0}, transitions=[{"at": 0, "state": "training"}]
    )
    server.overrides["GET", "/reef/scenarios/default/jobs/j1"] = lambda *_: (200, ended)
    lines = reef("jobs", "show", "j1").out.splitlines()
    for line in (
        "masked_share\t0.25", "ess_share\t0.8252", "k3\t0.117", "skipped\tess_too_low", "lag_histogram\t0: 12, 2: 4",
        "policy_updated\tFalse", "smoke\t1.0",
    ):  # fmt: skip
        assert line in lines, lines
    assert reef("jobs", "show", "j1", "--json").json["detail"]["metrics"] == metrics


def test_jobs_wait_follows_to_the_end_and_exits_by_outcome(reef: Reef, server: FakeReef) -> None:
    states = ["training", "evaluating", "settled"]

    def answer(*_: object) -> tuple[int, object]:
        state = states.pop(0) if len(states) > 1 else states[0]
        return 200, job(state, outcome="select" if state == "settled" else None)

    server.overrides["GET", "/reef/scenarios/default/jobs"] = lambda *_: (200, {"jobs": [job("training")]})
    server.overrides["GET", "/reef/scenarios/default/jobs/j1"] = answer
    done = reef("jobs", "wait")
    assert done.code == 0, done
    assert done.err.splitlines()[:3] == ["j1: training", "j1: evaluating", "j1: settled"]
    for ended, code in ((job("settled", outcome="reject", reason="worse"), 5), (job("failed", reason="out of memory"), 1)):
        server.overrides["GET", "/reef/scenarios/default/jobs/j1"] = lambda *_, e=ended: (200, e)
        done = reef("jobs", "wait", "j1", "--json")
        assert done.code == code
        assert done.json["error"]["details"]["job"] == ended
    server.overrides["GET", "/reef/scenarios/default/jobs/j1"] = lambda *_: (200, job("training"))
    assert reef("jobs", "wait", "j1", "--timeout-s", "0").code == 6


def evaluated(_: object, body: dict[str, object]) -> tuple[int, object]:
    """An answer of `evaluate` over what was asked for: the first release at 0.4, the last one at 0.7."""
    named = [body.get("against"), *(body.get("releases") or ["r0-aaaaaaaa", "r1-bbbbbbbb", "r2-cccccccc"])]
    names = [name for name in named if name]
    row = {"items": 20, "missing": 0, "output_tokens": 30, "prompt_tokens": 70, "money": 0.5}
    spread = {name: 0.4 + 0.3 * index / max(1, len(names) - 1) for index, name in enumerate(names)}
    means = [{"release": name, "mean": mean, "interval": [mean - 0.1, mean + 0.1], **row} for name, mean in spread.items()]
    counts = {"against": names[0], "wins": 6, "losses": 1, "ties": 13, "interval": [0.05, 0.5], "result": "better"}
    differences = [{"release": name, "mean": spread[name] - 0.4, **counts} for name in names[1:]]
    facts = {"scenario": "default", "suite": "made.jsonl", "split": "heldout", "skipped": [], "budget_spent": False}
    return 200, {**facts, "releases": means, "differences": differences, "asked": body}


def test_eval_takes_the_head_and_compares_what_is_named(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    server.overrides["POST", "/reef/scenarios/default/evaluate"] = evaluated
    assert reef("eval", "--json").json["asked"] == {"releases": ["r2-cccccccc"]}
    (tmp_path / "s.jsonl").write_text("{}")
    done = reef("eval", "r1", "r2", "--against", "r0", "--suite", "s.jsonl", "-n", "5", "--split", "all", "--again")
    assert done.code == 0, done
    assert done.out.splitlines()[0] == "r0-aaaaaaaa\t0.400\t0.300 to 0.500\t20\t0\t100\t0.5000"
    last = "r2-cccccccc against r0-aaaaaaaa: +0.300 [+0.050, +0.500], 6 wins, 1 losses, 13 ties: better"
    assert last in done.out and "since r0-aaaaaaaa: evolution helped (+0.300)" in done.out
    asked = server.asked("POST", "/reef/scenarios/default/evaluate")[-1][1]
    assert asked == {
        "releases": ["r1-bbbbbbbb", "r2-cccccccc"], "against": "r0-aaaaaaaa", "suite": str(tmp_path / "s.jsonl"),
        "limit": 5, "split": "all", "again": True,
    }  # fmt: skip
    assert reef("eval", "--since", "r0", "--json").json["asked"] == {"since": "r0-aaaaaaaa"}
    assert reef("eval", "r1", "--since", "r0").code == 2


def test_eval_exits_5_when_worse_than_what_it_is_compared_with(reef: Reef, server: FakeReef) -> None:
    def worse(query: object, body: dict[str, object]) -> tuple[int, object]:
        status, answer = evaluated(query, body)
        answer["differences"][-1]["result"] = "worse"  # type: ignore[index]
        return status, answer

    server.overrides["POST", "/reef/scenarios/default/evaluate"] = worse
    done = reef("eval", "r2", "--against", "r1", "--json")
    assert done.code == 5
    assert done.json["error"]["details"]["result"]["releases"][1]["release"] == "r2-cccccccc"
    assert reef("eval", "--since", "r0").code == 0, "a chain is looked at, not judged"


def test_eval_draws(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    import xml.etree.ElementTree as ElementTree
    from importlib.util import find_spec

    server.overrides["POST", "/reef/scenarios/default/evaluate"] = evaluated
    for name in ("p.svg", "p.html"):
        assert reef("eval", "--since", "r0", "--plot", name).code == 0
    svg = (tmp_path / "p.svg").read_text()
    root = ElementTree.fromstring(svg)
    circles = [float(node.get("cx", 0)) for node in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert circles == pytest.approx([190 + 480 * mean for mean in (0.4, 0.55, 0.7)])
    page = (tmp_path / "p.html").read_text()
    assert svg in page and "http" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing is fetched from elsewhere"
    assert reef("eval", "--plot", "p.gif").code == 2
    done = reef("eval", "--since", "r0", "--plot", "p.png")
    if find_spec("matplotlib") is None:
        assert done.code != 0 and "reef-cli[plot]" in done.err
    else:
        assert done.code == 0 and (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_bar_of_a_score() -> None:
    from reef_cli.commands.plot import Point, bar

    assert bar(Point("r", 0.5, 0.25, 0.75), 9) == "··├─●─┤··"
    assert bar(Point("r", 1.0, 0.9, 1.0), 9) == "·······├●"
    assert bar(Point("r", None, 0.0, 1.0), 9) == "???"


def test_the_token_file_wins_over_the_environment(reef: Reef, tmp_path: Path) -> None:
    (tmp_path / "tok").write_text("fake-token\n")
    assert reef("status", "--token-file", "tok", env={"REEF_TOKEN": "wrong"}).code == 0
    done = reef("status", "--token-file", "absent")
    assert done.code == 2
