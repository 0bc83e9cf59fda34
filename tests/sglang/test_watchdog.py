"""SGLang's own watchdog lets a push take as long as it takes: requests are taken back first, so nothing counts as stuck.

The watchdog ends an engine in which a batch makes no step for `watchdog_timeout` (300 s); six minutes are 1.2 times that.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import until
from tests.engines.live import make_model
from tests.sglang.running import Running, running

pytestmark = pytest.mark.timeout(900)
WATCHDOG_S = 15.0
BITES = "Scheduler watchdog timeout"
LONG = {"max_new_tokens": 450, "ignore_eos": True}
PROMPT = list(range(100, 120))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Running]:
    model = make_model(tmp_path / "m", width=8192)
    with running("sglang", model, tmp_path, adapters=False, watchdog_timeout=WATCHDOG_S) as made:
        yield made


def test_a_pause_of_a_push_may_outlast_the_watchdog_and_another_may_not(watched: Running) -> None:
    flight = watched.under_way(PROMPT, **LONG)
    assert watched.post("/pause_generation", {"mode": "retract"}).json()["status"] == "ok"
    time.sleep(1.6 * WATCHDOG_S + 6)  # it looks every half of its time, and says so first
    log = watched.launch.log_path
    assert watched.process.poll() is None and BITES not in log.read_text(errors="replace") and not flight.done
    assert watched.post("/continue_generation", {"torch_empty_cache": False}).status_code == 200
    assert flight.meta()["finish_reason"] == {"type": "length", "length": 450}

    watched.under_way(PROMPT, **LONG)
    watched.post("/pause_generation", {"mode": "in_place"})
    until(lambda: BITES in log.read_text(errors="replace"), "the watchdog of an engine paused with its requests", 90)
