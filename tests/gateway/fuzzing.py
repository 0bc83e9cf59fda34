"""What the fuzz tests share: bodies and headers of every kind, a log that must stay calm, and a count of what was sent.

`REEF_FUZZ_EXAMPLES` sets the examples of each test; `REEF_FUZZ_OUT` names a file the counts are written to at the end.
"""

import json
import logging
import os
import platform
import string
import subprocess
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("REEF_FUZZ_EXAMPLES", "300"))
LONG = EXAMPLES >= 1000
"""Whether this is the long run (`make fuzz`)."""

FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    *("score", "feedback", "references", "metadata", "agent_record_id", "text", "session", "release_id", "requires", "name"),
    *("training_mode", "expected_head", "shares", "pin", "shadow", "suite", "candidate", "records", "dialect", "model"),
    *("request", "response", "tokens", "tags", "kind", "request_type", "id", "created_at", "usage", "messages", "stream"),
)
Names = st.sampled_from(("s1", "s2", "absent", "%20", "..", "a b", "é", "r0-00000000", "x" * 70))
Values = Json | st.sampled_from(("inference", "report", "train", "chat", "RECEIPT", ["RECEIPT"], "auto", "s1", 1.0, {}))
Objects = st.dictionaries(st.sampled_from(FIELDS), Values, max_size=6)
Bodies = st.binary(max_size=60) | Json.map(json.dumps).map(str.encode) | Objects.map(json.dumps).map(str.encode)
Text = st.text(string.ascii_letters + string.digits + " .-_:;,/@{}[]\"'%\\é\u0663", max_size=20)
Headers = st.fixed_dictionaries(
    {},
    optional={
        "x-reef-scenario": st.sampled_from(("s1", "s2", "absent", " ", "")) | Text,
        "x-reef-release-id": st.just("r0-00000000") | Text,
        "x-reef-capture": st.sampled_from(("on", "off", "no")),
        "x-reef-tag-a": Text,
        "x-request-id": Text,
        "Content-Encoding": st.sampled_from(("gzip", "br", "identity", "deflate", "x")),
        "Last-Event-ID": Text,
        "session_id": Text,
    },
)


@st.composite
def mutants(draw: st.DrawFn, good: tuple[tuple[str, dict[str, Any]], ...], most: int = 2) -> tuple[str, dict[str, Any]]:
    """A path with a good body of which some places, at any depth, hold something else, or are gone."""
    path, body = draw(st.sampled_from(good))
    body = json.loads(json.dumps(body))
    for _ in range(draw(st.integers(1, most))):
        place: Any = body
        while place:
            key = draw(st.sampled_from(sorted(place))) if isinstance(place, dict) else draw(st.sampled_from(range(len(place))))
            if not (isinstance(place[key], dict | list) and place[key] and draw(st.booleans())):
                if draw(st.integers(0, 7)):
                    place[key] = deepcopy(draw(Values))
                else:
                    del place[key]
                break
            place = place[key]
    return path, body


class Calm(logging.Handler):
    """Keeps what the log says that it should not: anything with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "Traceback" in record.getMessage():
            self.said.append(logging.Formatter().format(record))

    def check(self) -> None:
        assert self.said == []


class Tally:
    """What was sent in this run, by test and status."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.counts: dict[str, Counter[str]] = {}

    def add(self, test: str, status: int) -> None:
        self.counts.setdefault(test, Counter())[f"{status // 100}xx" if status != 501 else "501"] += 1

    def write(self, out: Path) -> None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        document = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "commit": commit,
            "seconds": round(time.monotonic() - self.began, 1),
            "requests": sum(sum(count.values()) for count in self.counts.values()),
            "own_5xx": sum(count["5xx"] for count in self.counts.values()),
            "by_test": {name: dict(sorted(count.items())) for name, count in sorted(self.counts.items())},
        }
        out.write_text(json.dumps(document, indent=2) + "\n")


def sound(status: int, text: str) -> None:
    """No failure of our own, no traceback, strict JSON, and errors with words."""
    assert status < 500 or status == 501, (status, text)
    assert "Traceback" not in text
    body = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    if status >= 400:
        assert body["error"]["message"]


def clean(headers: dict[str, str]) -> dict[str, str]:
    """Without characters no HTTP client would send."""
    return {name: value.encode("ascii", "ignore").decode() for name, value in headers.items()}
