"""What all tests share: the language model, a tiny random one made in seconds, and a check that no process is left behind.

Every process a test starts inherits `MARK` from the environment, however deep in the tree; when the run ends, whatever still
carries it and runs `reef_cli` is an orphan: it is named, ended, and the run fails.
"""

import fcntl
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine's other work only; CI tries the same examples every time.
settings.register_profile("reef", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ)
settings.load_profile("reef")

MARK = "PYTEST_REEF_RUN"
_GRACE_S = 15.0
"""Engines and trainers notice the death of their server by themselves; they get this long."""


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what it runs in the background with Ctrl-C switched off, and every process below would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        os.environ[MARK] = secrets.token_hex(8)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the run when it leaves a process behind. With several workers only the controller looks, after they ended."""
    if hasattr(session.config, "workerinput"):
        return
    deadline = time.monotonic() + _GRACE_S
    while (left := marked_processes(os.environ[MARK])) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid, command in left.items():
        print(f"\nERROR: the tests left process {pid} behind: {command[:300]}")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if left and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def marked_processes(mark: str) -> dict[int, str]:
    """Processes of Reef that carry the mark: pid and command line. Zombies have no environment and do not count."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir() if Path("/proc/self/environ").exists() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if "reef_cli" in command and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = command
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that all workers see."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def once(marker: Path) -> Iterator[bool]:
    """Yields True to the one worker that has to do the work; the others wait for it and get False."""
    with marker.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = not marker.exists()
        yield first
        if first:
            marker.touch()


@pytest.fixture(scope="session")
def tiny_model(shared_folder: Path) -> Path:
    """A two-layer Llama of random weights with a tokenizer and a chat template of its own; 400 tokens, context 512."""
    folder = shared_folder / "tiny-llama"
    with once(shared_folder / "tiny-llama.made") as first:
        if first:
            from tests.engines.live import make_model

            make_model(folder)
    return folder


@pytest.fixture(scope="session")
def language_model() -> Path:
    """The default language model: `REEF_TEST_MODEL`, else the model store's."""
    from reef_cli.core.errors import ReefError
    from reef_cli.engines.models import ModelStore

    if own := os.environ.get("REEF_TEST_MODEL"):
        return Path(own)
    try:
        return ModelStore().resolve("smollm2-135m-instruct")
    except ReefError as error:
        pytest.skip(f"no language model: {error.message} (reef model pull smollm2-135m-instruct, or set REEF_TEST_MODEL)")
