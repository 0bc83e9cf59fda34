"""Pauses, versions and aborts mean the same in both engines."""

import threading
from itertools import pairwise
from typing import Any

import pytest

from tests.sglang.running import Running

LONG = {"max_new_tokens": 40, "ignore_eos": True}
PROMPT = list(range(100, 120))


def in_background(engine: Running, **sampling: Any) -> "tuple[threading.Thread, list[dict[str, Any]]]":
    """A request that comes during a pause."""
    replies: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: replies.append(engine.generate(PROMPT[:9], **sampling)), daemon=True)
    thread.start()
    return thread, replies


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_survive_a_pause_and_carry_both_versions(engine: Running, mode: str) -> None:
    flight = engine.under_way(PROMPT, **LONG)
    assert engine.post("/pause_generation", {"mode": mode}).json()["status"] == "ok"
    assert engine.get("/ready").status_code == 503 and engine.get("/model_info").status_code == 200
    held = flight.last["meta_info"]["completion_tokens"]
    late, replies = in_background(engine, max_new_tokens=2)
    named = engine.post("/update_weight_version", {"new_version": "next", "abort_all_requests": False})
    assert named.json()["success"] and engine.get("/model_info").json()["weight_version"] == "next"
    flushed = engine.post("/flush_cache")
    assert flushed.status_code == (200 if mode == "retract" else 400)
    assert not flight.done and late.is_alive()
    assert engine.post("/continue_generation", {"torch_empty_cache": False}).status_code == 200
    meta = flight.meta()
    late.join(240)
    assert replies[0]["meta_info"]["weight_version"] == "next"
    engine.post("/update_weight_version", {"new_version": "base", "abort_all_requests": False})
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == ["base", "next"] and meta["completion_tokens"] == 40
    assert spans[0]["start"] == 0 and spans[-1]["end"] == 40 and spans[0]["end"] >= held
    assert all(one["end"] == two["start"] for one, two in pairwise(spans))
    assert meta["finish_reason"] == {"type": "length", "length": 40}


def test_the_default_pause_aborts_with_what_there_is(engine: Running) -> None:
    flight = engine.under_way(PROMPT, **LONG)
    engine.post("/pause_generation", {"mod": "in_place"})
    meta = flight.meta()
    assert meta["finish_reason"]["type"] == "abort" and 0 < meta["completion_tokens"] < 40
    engine.post("/continue_generation", {"torch_empty_cache": False})
    assert engine.generate([5], max_new_tokens=1)["output_ids"]


def test_a_new_version_aborts_unless_told_otherwise(engine: Running) -> None:
    flight = engine.under_way(PROMPT, **LONG)
    engine.post("/update_weight_version", {"new_version": "base"})
    assert flight.meta()["finish_reason"]["type"] == "abort"


def test_aborting_matches_the_beginning_of_ids(engine: Running) -> None:
    first, second = engine.under_way(PROMPT, rid="abc1", **LONG), engine.under_way(PROMPT[:15], rid="abc12", **LONG)
    engine.post("/abort_request", {"rid": "abc1"})
    assert [flight.meta()["finish_reason"]["type"] for flight in (first, second)] == ["abort", "abort"]


def test_an_unknown_pause_mode_is_refused(engine: Running) -> None:
    assert engine.post("/pause_generation", {"mode": "gently"}).status_code in (400, 422)
    assert engine.generate([5], max_new_tokens=1)["output_ids"]
