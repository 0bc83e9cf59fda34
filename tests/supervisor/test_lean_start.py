"""What the server loads before it knows its engine: libraries only some deployments need cost the others time and memory."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "jinja2", "pydantic", "sqlite_utils", "git", "textual", "click")


def test_the_server_loads_no_library_that_an_upstream_deployment_does_not_need() -> None:
    modules = "typer.main, reef_cli.commands.serve, reef_cli.supervisor.run"
    script = f"import sys, {modules}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []
