"""Programs from a provider's model, run in the sandbox and verified; guidance carried out by another server's model."""

import json
import subprocess
from typing import Any

import pytest

from reef_cli.sandbox import bubblewrap
from tests.doubles.upstream import Upstream
from tests.e2e.server import LIMIT_S, Server, clean_environment, command

pytestmark = pytest.mark.skipif(bubblewrap.problem() is not None, reason=str(bubblewrap.problem()))

PROGRAM = """Like this:
```python
import json
r = 1 / (2 + 2 ** 0.5) - SEED % 7 / 1000
print("radius", r)
print(json.dumps([[r, r, r], [1 - r, 1 - r, r]]))
```"""


def discover(server: Server, *words: str) -> Any:
    done = subprocess.run(
        command("discover", "packing-2", "--json", "--home", str(server.home), "--steps", "1", *words),
        capture_output=True, text=True, timeout=LIMIT_S, env=clean_environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + server.words()[-3000:]
    return json.loads(done.stdout)


def test_a_provider_writes_programs_and_a_guide_advises_an_executor(provider: Upstream, front: Server) -> None:
    provider.text = PROGRAM
    found = discover(front, "--space", "programs", "--groups", "1", "--rollouts", "2")
    assert found["valid_tries"] == 2 and found["valid"] and 0.5 < found["strict"] <= 0.585787
    assert "SEED % 7" in found["text"] and found["origin"]["receipt"] and found["history"][0]["rollouts"] == 2
    assert {seen.body["model"] for seen in provider.seen if seen.method == "POST"} == {"stub-model"}

    provider.text = "<guidance>a little larger</guidance>"
    advised = discover(
        front,
        "--space",
        "guidance-programs",
        "--run",
        "advised",
        "--groups",
        "1",
        "--rollouts",
        "2",
        "--executor-url",
        front.url,
    )
    assert advised["valid_tries"] == 0, "an executor that answers with no program makes nothing"
    token = front.settings["reef.home"] + "/token"
    again = discover(
        front, "--space", "guidance-programs", "--run", "advised", "--groups", "1", "--rollouts", "2",
        "--executor-url", front.url.replace("127.0.0.1", "localhost"), "--executor-token-file", token,
    )  # fmt: skip
    assert again["steps"] == 2, "at another address the executor's token is its own"
    prompts = [json.dumps(seen.body.get("messages")) for seen in provider.seen if seen.method == "POST"][-8:]
    assert sum("Advice: a little larger" in prompt for prompt in prompts) == 4
