"""Episodes: an agent with a tree on one task, headless, in a throw-away root of its own, within limits.

The agent reaches one thing: a unix socket to a proxy that belongs to the episode. The proxy knows the gateway's token and the
episode's own token, counts calls and keeps receipts; no provider key and no gateway token is ever inside. An episode that could
not run is an outage and never a score; one that ran badly is graded like any other. Nothing is left behind, also after a crash.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from reef_cli.core.errors import EvaluationError
from reef_cli.harness import files, sandbox
from reef_cli.harness.adapter import Adapter, InstallPlan
from reef_cli.harness.client import agent as programs
from reef_cli.harness.client import launch
from reef_cli.harness.client.proxy import Limits, Proxy, Upstream, tcp
from reef_cli.harness.client.store import Place, alive
from reef_cli.harness.files import TreeFile
from reef_cli.harness.install import launch_spec
from reef_cli.harness.render import admit
from reef_cli.harness.trajectory import Trajectory
from reef_cli.harness.tree import Tree

OUTPUT_LIMIT = 4 << 20
_RELAY = Path(__file__).with_name("relay.py")


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits of one episode. Hitting them ends the run; what was done until then is graded."""

    seconds: float = 600.0
    requests: int = 200
    tokens: int | None = None
    cost: float | None = None
    price: tuple[float, float] = (0.0, 0.0)
    """Of a million input and a million output tokens, in the currency of `cost`."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to do: a prompt and the files the work folder starts with."""

    id: str
    prompt: str
    files: Mapping[str, TreeFile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Runtime:
    """An installed agent and where it may send its calls. `headers` tag the records of its calls."""

    adapter: Adapter
    place: Place
    gateway: str
    token: str
    scenario: str
    model: str = "default"
    version: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    unsafe: bool = False


@dataclass(frozen=True, slots=True)
class Episode:
    """How it went. `outcome` outage means it says nothing about the tree; `reason` is a sentence for a person.

    `limit` names the cap that ended the run, `tokens` counts input and output. `graded` is what the grader said with its score.
    `kept` is the folder with trajectory, output and receipts.
    """

    id: str
    task: str
    outcome: Literal["ran", "outage"]
    reason: str
    exit_status: int | None
    seconds: float
    requests: int
    receipts: tuple[str, ...]
    trajectory: Trajectory
    score: float | None = None
    limit: Literal["time", "requests", "budget"] | None = None
    tokens: tuple[int, int] = (0, 0)
    kept: Path | None = None
    graded: str = ""


Grade = Callable[[Path, Trajectory], tuple[float, str]]
"""Score and a sentence about the work folder and what the agent said; runs after the agent's processes are gone."""


def new_identity() -> str:
    """The id of an episode; sorts by time."""
    return f"{int(time.time() * 1000):013d}-{secrets.token_hex(4)}"


def run(
    runtime: Runtime,
    tree: Tree,
    task: Task,
    *,
    state: Path,
    grade: Grade | None = None,
    caps: Caps | None = None,
    cancel: threading.Event | None = None,
    identity: str | None = None,
) -> Episode:
    """Run one episode (blocking), under a new id unless one is given.

    Raises `MissingDependency` without a sandbox, `UnsupportedArtifact` for an unfit tree and `EvaluationError` when the grader
    itself breaks; everything else is in the result.
    """
    if not runtime.unsafe:
        sandbox.require()
    limits, cancelled = caps or Caps(), cancel or threading.Event()
    identity = identity or new_identity()
    with ExitStack() as stack:
        root = _root(state, identity, stack)
        room = _furnish(runtime, tree, task, root)
        counted = Limits(limits.requests, limits.tokens, limits.cost, limits.price)
        receipts: list[Mapping[str, Any]] = []
        token = secrets.token_urlsafe(24)
        stack.enter_context(Proxy(_upstream(runtime, identity), token, receipts.append, counted, str(room.socket)))
        begun = time.monotonic()
        end = _execute(runtime, tree, task, room, identity, token, limits.seconds, cancelled)
        spent = time.monotonic() - begun
        trajectory = runtime.adapter.read_trajectory(room.home / runtime.adapter.descriptor.config["dir"], end.output)
        outcome, reason = _judge(end, counted, trajectory)
        score, graded = _graded(grade, room.work, trajectory) if grade is not None and outcome == "ran" else (None, "")
        limit = _limit(end, counted)
        names = tuple(str(item["receipt"]) for item in receipts)
        kept = _keep(
            state,
            identity,
            runtime,
            room,
            end,
            receipts,
            {"task": task.id, "outcome": outcome, "reason": reason, "score": score},
        )
        return Episode(
            identity,
            task.id,
            outcome,
            reason,
            end.status,
            spent,
            counted.taken,
            names,
            trajectory,
            score,
            limit,
            counted.used,
            kept,
            graded,
        )


def _limit(end: "_End", counted: Limits) -> Literal["time", "requests", "budget"] | None:
    if end.timed_out:
        return "time"
    if not counted.refused:
        return None
    return "budget" if counted.broke else "requests"


@dataclass(frozen=True, slots=True)
class _End:
    status: int | None
    output: str
    errors: str
    timed_out: bool = False
    cancelled: bool = False
    started: bool = True


def _root(state: Path, identity: str, stack: ExitStack) -> Path:
    roots = state / "roots"
    roots.mkdir(parents=True, exist_ok=True, mode=0o700)
    root = roots / identity
    root.mkdir(mode=0o700)
    stack.callback(shutil.rmtree, root, ignore_errors=True)
    (root / "owner").write_text(str(os.getpid()))
    # Unix socket paths are short by law of the kernel, so this one folder lies elsewhere.
    short = Path(tempfile.mkdtemp(prefix="reef-ep-"))
    stack.callback(shutil.rmtree, short, ignore_errors=True)
    (root / "socket-folder").write_text(str(short))
    stack.callback(sandbox.kill_all, None, identity)
    return root


def _furnish(runtime: Runtime, tree: Tree, task: Task, root: Path) -> sandbox.Room:
    rendered = admit(runtime.adapter, tree, runtime.version, runtime.model)
    seeds = {path: TreeFile(data) for path, data in runtime.adapter.seeds().items()}
    files.write({**seeds, **rendered.files}, root / "home" / runtime.adapter.descriptor.config["dir"])
    files.write(task.files, root / "work")
    return sandbox.Room(root / "home", root / "work", Path((root / "socket-folder").read_text()) / "gateway.sock")


def _upstream(runtime: Runtime, identity: str) -> Upstream:
    connect, prefix = tcp(runtime.gateway)
    tags = {"x-reef-tag-session": identity, "x-reef-tag-client": "reef-episode", "x-reef-tag-trial": identity}
    secret = {"authorization": f"Bearer {runtime.token}"} if runtime.token else {}
    return Upstream(connect, {"x-reef-scenario": runtime.scenario, **tags, **runtime.headers, **secret}, prefix)


def command(
    runtime: Runtime, tree: Tree, prompt: str, room: sandbox.Room, token: str, identity: str
) -> tuple[list[str], dict[str, str]]:
    """The whole command line and the whole environment of an episode; nothing of the caller's environment gets in."""
    plan = _plan(runtime)
    spec = launch_spec(runtime.adapter, admit(runtime.adapter, tree, runtime.version, runtime.model))
    spec["env"] |= runtime.adapter.descriptor.launch.get("episode_env", {})
    spec["runner"] = programs.runner(plan)
    home, work = (str(room.home), str(room.work)) if runtime.unsafe else (sandbox.HOME, sandbox.WORK)
    program = programs.program(runtime.place, plan)
    known = launch.values(
        f"{home}/{spec['config']}", str(program), "http://127.0.0.1:{relay_port}", token, runtime.model, runtime.scenario
    )
    base = {
        "HOME": home,
        "PATH": programs.search_path(runtime.place, plan, {"PATH": "/usr/local/bin:/usr/bin:/bin"}),
        "PWD": work,
        "TMPDIR": "/tmp" if not runtime.unsafe else str(room.home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        sandbox.MARK: identity,
        "XDG_CONFIG_HOME": f"{home}/.config",
        "XDG_DATA_HOME": f"{home}/.local/share",
        "XDG_CACHE_HOME": f"{home}/.cache",
    }
    socket_path, script = (str(room.socket), str(_RELAY)) if runtime.unsafe else (sandbox.SOCKET, sandbox.RELAY)
    relay = [programs.python(), "-I", script, socket_path, "0", "--", *launch.arguments(spec, "headless", known, prompt)]
    environment = launch.environment(spec, known, base)
    if runtime.unsafe:
        return relay, environment
    # Never the whole installation: a scenario's token lies beside the agent.
    node = programs.node_folder(runtime.place, plan)
    readable = [runtime.place.agent(plan["version"]), *([node.parents[2]] if node else []), Path(sys.base_prefix)]
    return sandbox.wrap(relay, room, readable, _RELAY), environment


def _plan(runtime: Runtime) -> dict[str, Any]:
    plan: InstallPlan = runtime.adapter.plan(runtime.version)
    return {
        name: getattr(plan, name) for name in ("manager", "package", "version", "program", "native", "node", "node_package")
    }


def _execute(
    runtime: Runtime,
    tree: Tree,
    task: Task,
    room: sandbox.Room,
    identity: str,
    token: str,
    seconds: float,
    cancel: threading.Event,
) -> _End:
    plan = _plan(runtime)
    if not programs.program(runtime.place, plan).exists():
        return _End(None, "", f"{runtime.adapter.name} {plan['version']} is not installed", started=False)
    argv, environment = command(runtime, tree, task.prompt, room, token, identity)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                argv, env=environment, cwd=room.work, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            return _End(None, "", str(error), started=False)
        try:
            timed_out = _wait(child, time.monotonic() + seconds, cancel)
        finally:
            sandbox.kill_all(child.pid, identity)
            child.wait()
        return _End(child.returncode, _read(out), _read(err), timed_out and not cancel.is_set(), cancel.is_set())


def _wait(child: "subprocess.Popen[bytes]", deadline: float, cancel: threading.Event) -> bool:
    """True when the time ran out (or a person cancelled) before the child ended."""
    while child.poll() is None:
        if time.monotonic() >= deadline or cancel.is_set():
            return True
        try:
            child.wait(min(0.1, max(deadline - time.monotonic(), 0.001)))
        except subprocess.TimeoutExpired:
            continue
    return False


def _read(file: Any) -> str:
    file.seek(0, os.SEEK_END)
    size = file.tell()
    file.seek(max(0, size - OUTPUT_LIMIT))
    return str(file.read().decode(errors="replace"))


def _judge(end: _End, counted: Limits, trajectory: Trajectory) -> tuple[Literal["ran", "outage"], str]:
    """Did this run say anything about the tree? Pure."""
    if not end.started:
        return "outage", f"the agent does not start: {end.errors}"
    if end.cancelled:
        return "outage", "cancelled"
    failed = (end.status not in (0, None) and not end.timed_out) or trajectory.error is not None
    if counted.taken == 0:
        words = " | ".join(end.errors.strip().splitlines()[-3:]) or "no output"
        return "outage", f"the agent made no model call (exit {end.status}): {words[-400:]}"
    last = counted.statuses[-1] if counted.statuses else 0
    if (failed or end.timed_out) and not counted.refused and (last == 0 or last in (401, 403, 408, 429) or last >= 500):
        return "outage", f"the model could not be reached: the last call ended with {last or 'a broken connection'}"
    if end.timed_out:
        return "ran", "the time ran out"
    return "ran", f"ended with status {end.status}" + (f": {trajectory.error}" if trajectory.error else "")


def _graded(grade: Grade, work: Path, trajectory: Trajectory) -> tuple[float, str]:
    try:
        score, said = grade(work, trajectory)
        return float(score), said
    except Exception as error:  # a grader is foreign code; its failure must not pass for a score
        raise EvaluationError("the grader failed", why=f"{type(error).__name__}: {error}") from error


def _keep(
    state: Path,
    identity: str,
    runtime: Runtime,
    room: sandbox.Room,
    end: _End,
    receipts: list[Mapping[str, Any]],
    facts: Mapping[str, Any],
) -> Path:
    kept = state / "kept" / identity
    kept.mkdir(parents=True, mode=0o700)
    (kept / "output.txt").write_text(end.output)
    (kept / "errors.txt").write_text(end.errors)
    source = room.home / runtime.adapter.descriptor.config["dir"]
    for pattern in runtime.adapter.descriptor.trajectory.get("paths", ()):
        for path in source.glob(pattern):
            if path.is_file() and not path.is_symlink():
                target = kept / "trajectory" / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    (kept / "episode.json").write_text(json.dumps({**facts, "receipts": receipts, "exit_status": end.status}, indent=1))
    return kept


def sweep(state: Path) -> int:
    """After a crash: end processes and remove roots of owners that are gone; returns how many roots went."""
    gone = 0
    for root in (state / "roots").iterdir() if (state / "roots").is_dir() else []:
        try:
            owner = int((root / "owner").read_text())
        except (OSError, ValueError):
            owner = 0
        if owner and owner != os.getpid() and alive(owner):
            continue
        if owner == os.getpid():
            continue
        sandbox.kill_all(None, root.name)
        short = root / "socket-folder"
        if short.is_file() and Path(short.read_text()).name.startswith("reef-ep-"):
            shutil.rmtree(short.read_text(), ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
        gone += 1
    return gone
