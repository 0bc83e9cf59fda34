"""Harbor task folders as suite items: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`, `solution/solve.sh`.

The model works in a shell, one script a turn, in a bubblewrap sandbox without network; then the task's own tests run there and
their reward (`/logs/verifier/reward.txt` or `reward.json`) is the score. There are no container images: of a Dockerfile
`WORKDIR`, `COPY`, `ADD` (of local files), `ENV` and `RUN` are done in the sandbox on this machine's system, the base image is
not. A task with a solution is tried with it once: unless that is rewarded in full, the task cannot be run here and is missing,
not failed. `[metadata]` may hold `split`, `must_not_regress` and `tags`.
"""

import asyncio
import hashlib
import json
import re
import shlex
import shutil
import tempfile
import threading
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from reef_cli.core.errors import ConfigError
from reef_cli.core.ports import Answer
from reef_cli.evaluation.calling import Called
from reef_cli.evaluation.grade import Grade, Ungraded
from reef_cli.sandbox import bubblewrap
from reef_cli.sandbox.program import Finished, Limits, Program, run

TURNS = 8
_SHOWN = 4000
_BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)
_RULES = (
    "You solve a task in a Linux shell. Reply with one ```bash block; it is run and you get its output. There is no network. "
    "When the task is done, reply without a block."
)
_IGNORED = {"FROM", "ARG", "LABEL", "MAINTAINER", "USER", "EXPOSE", "CMD", "ENTRYPOINT", "SHELL", "STOPSIGNAL", "HEALTHCHECK"}
_SYSTEM = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "proc", "dev", "sys", "tmp", "run"}
_MEMORY = re.compile(r"(\d+)\s*([kmgt]?)b?", re.IGNORECASE)

Ask = Callable[[Sequence[Mapping[str, Any]], int], Awaitable[Called]]


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of the Dockerfile: `COPY` with source and target, or `RUN` with a script."""

    kind: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A Harbor task; the `grader` of its item. `work` plays it with whoever answers."""

    name: str
    folder: Path
    instruction: str
    workdir: str
    steps: tuple[Step, ...]
    environment: Mapping[str, str]
    agent_s: float
    verifier_s: float
    verifier_environment: Mapping[str, str]
    memory_bytes: int
    _checked: dict[str, str] = field(default_factory=dict, compare=False)
    _checking: threading.Lock = field(default_factory=threading.Lock, compare=False)

    async def work(self, ask: Ask) -> tuple[Called, Grade | None]:
        """The episode: what was answered in all, and its grade. `Ungraded` when the task cannot be run or graded here."""
        if fault := await asyncio.to_thread(self.fault):
            raise Ungraded(fault)
        messages: list[Mapping[str, Any]] = [
            {"role": "system", "content": _RULES},
            {"role": "user", "content": self.instruction},
        ]
        answers: list[Answer] = []
        attempts = 0
        with self._world() as world:
            await asyncio.to_thread(world.prepare)
            for turn in range(TURNS):
                called = await ask(messages, turn)
                attempts += called.attempts
                if called.answer is None:
                    return called, None
                answers.append(called.answer)
                scripts = _BLOCK.findall(called.answer.text)
                if not scripts:
                    break
                done = await asyncio.to_thread(world.shell, scripts[-1], self.agent_s / TURNS)
                messages += [{"role": "assistant", "content": called.answer.text}, _seen(done)]
            reward = await asyncio.to_thread(world.verify)
        return Called(_whole(answers), attempts=attempts), Grade(reward, f"reward {reward:g} after {len(answers)} turns")

    def fault(self) -> str | None:
        """Why the task cannot be run here, found out with its own solution, once; None when it can or nobody can tell."""
        solution = self.folder / "solution" / "solve.sh"
        with self._checking:
            if "fault" not in self._checked:
                self._checked["fault"] = self._try(solution) if solution.is_file() else ""
            return self._checked["fault"] or None

    def _try(self, solution: Path) -> str:
        try:
            with self._world() as world:
                world.prepare()
                shutil.copytree(solution.parent, world.root / "solution")
                done = world.shell("bash /solution/solve.sh", self.agent_s)
                reward = world.verify()
        except Ungraded as error:
            return str(error)
        if reward >= 1.0:
            return ""
        return f"{self.name} cannot be run here: its own solution gets reward {reward:g} ({done.output.strip()[-120:]})"

    @contextmanager
    def _world(self) -> Iterator["World"]:
        with tempfile.TemporaryDirectory(prefix="reef-task-") as folder:
            yield World(self, Path(folder))


@dataclass(frozen=True, slots=True)
class World:
    """The files of one episode: `root/<top>` stands for `/<top>` inside."""

    task: Task
    root: Path

    def prepare(self) -> None:
        """What the Dockerfile does. `Ungraded` when a step fails."""
        self._inside(self.task.workdir).mkdir(parents=True, exist_ok=True)
        (self.root / "logs" / "verifier").mkdir(parents=True)
        for step in self.task.steps:
            if step.kind == "COPY":
                self._copy(*step.words)
            else:
                done = self.shell(step.words[0], self.task.agent_s)
                if done.code != 0:
                    why = done.output.strip()[-160:]
                    raise Ungraded(f"{self.task.name} cannot be prepared here: RUN {step.words[0][:60]} failed: {why}")

    def _copy(self, *words: str) -> None:
        *sources, target = words
        for pattern in sources:
            found = sorted((self.task.folder / "environment").glob(pattern.lstrip("./") or "*"))
            if not found:
                raise Ungraded(f"{self.task.name} cannot be prepared here: nothing to COPY at {pattern}")
            for source in found:
                place = self._inside(str(PurePosixPath(self.task.workdir) / target))
                if source.is_dir():
                    shutil.copytree(source, place, dirs_exist_ok=True)
                    continue
                into = target.endswith(("/", ".")) or len(sources) > 1 or len(found) > 1 or place.is_dir()
                place = place / source.name if into else place
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place)

    def _inside(self, path: str) -> Path:
        """Where a path of the sandbox lies on this machine; `Ungraded` for the system's own folders."""
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", ".")]
        if not parts or parts[0] in _SYSTEM or ".." in parts:
            raise Ungraded(f"{self.task.name} cannot be prepared here: it writes to {path}")
        return self.root.joinpath(*parts)

    def shell(self, script: str, seconds: float, environment: Mapping[str, str] | None = None) -> Finished:
        """Run a script in the working folder."""
        folders = {f"/{path.name}": path for path in sorted(self.root.iterdir())}
        limits = Limits(seconds=max(1.0, seconds), memory_bytes=self.task.memory_bytes)
        variables = {**self.task.environment, **(environment or {})}
        return run(Program(["bash", "-c", script], folders, {}, self.task.workdir, variables, b"", limits))

    def verify(self) -> float:
        """The reward of the task's own tests, which arrive only now. `Ungraded` when they leave none in [0, 1]."""
        shutil.rmtree(self.root / "tests", ignore_errors=True)
        shutil.rmtree(self.root / "logs", ignore_errors=True)
        shutil.copytree(self.task.folder / "tests", self.root / "tests")
        logs = self.root / "logs" / "verifier"
        logs.mkdir(parents=True)
        done = self.shell("bash /tests/test.sh", self.task.verifier_s, self.task.verifier_environment)
        reward = _reward(logs)
        if reward is None:
            late = f"not done after {self.task.verifier_s:g} s" if done.timed_out else done.output.strip()[-120:]
            raise Ungraded(f"{self.task.name}: the tests left no reward: {late}")
        return reward


def _reward(logs: Path) -> float | None:
    try:
        if any(path.is_symlink() for path in logs.iterdir()):
            return None  # what ran there could point anywhere
        if (logs / "reward.json").is_file():
            value = json.loads((logs / "reward.json").read_text())
            value = value.get("reward", next(iter(value.values()), None)) if isinstance(value, dict) else value
        else:
            value = float((logs / "reward.txt").read_text())
        reward = float(value)
    except (OSError, ValueError, TypeError):
        return None
    return reward if 0.0 <= reward <= 1.0 else None


def _seen(done: Finished) -> dict[str, str]:
    text = done.output if len(done.output) <= _SHOWN else f"{done.output[: _SHOWN // 2]}\n[...]\n{done.output[-_SHOWN // 2 :]}"
    ended = "timed out" if done.timed_out else f"exit status {done.code}"
    return {"role": "user", "content": f"{ended}\n{text}"}


def _whole(answers: Sequence[Answer]) -> Answer:
    """One answer for the whole episode; the last one's end, all of its cost."""
    costs = [answer.cost for answer in answers if answer.cost is not None]
    return Answer(
        "\n\n".join(answer.text for answer in answers),
        sum(answer.output_tokens for answer in answers),
        answers[-1].finish,
        None,
        sum(answer.prompt_tokens for answer in answers),
        sum(costs) if costs else None,
    )


def tasks_below(folder: Path) -> list[Path]:
    """The task folders at or below `folder`, by path."""
    return sorted(path.parent for path in folder.rglob("task.toml"))


def read(folder: Path) -> tuple[Task, dict[str, Any], str]:
    """A task, its metadata and a digest of all its files. `ConfigError` naming the task; `MissingDependency`."""
    if (reason := bubblewrap.problem()) is not None:
        raise bubblewrap.missing("Harbor tasks", reason)
    try:
        facts = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"task {folder.name} cannot be read", why=str(error)) from error
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"task {folder.name} has no tests/test.sh", why="that is what gives the reward")
    if facts.get("steps"):
        raise ConfigError(f"task {folder.name} has several steps", why="only tasks of one step can be run")
    workdir, environment, steps = _dockerfile(folder)
    verifier, agent, machine = (facts.get(name) or {} for name in ("verifier", "agent", "environment"))
    name = str((facts.get("task") or {}).get("name") or folder.name)
    task = Task(
        name,
        folder,
        instruction,
        workdir,
        steps,
        {**environment, **_texts(machine.get("env"))},
        float(agent.get("timeout_sec", 120.0)),
        float(verifier.get("timeout_sec", 120.0)),
        _texts(verifier.get("env")),
        _memory(machine),
    )
    return task, dict(facts.get("metadata") or {}), _digest(folder)


def _dockerfile(folder: Path) -> tuple[str, dict[str, str], tuple[Step, ...]]:
    """Working folder, variables and steps of `environment/Dockerfile`; `/app` without one."""
    if any((folder / "environment").glob("docker-compose.y*ml")):
        raise ConfigError(f"task {folder.name} needs several containers", why="it has a docker-compose file")
    path = folder / "environment" / "Dockerfile"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    workdir, steps = "/app", list[Step]()
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        kind = word.upper()
        if not word or word.startswith("#") or kind in _IGNORED:
            continue
        if kind == "WORKDIR":
            workdir = str(PurePosixPath(workdir) / rest.strip())
        elif kind == "ENV":
            pairs = shlex.split(rest) if "=" in rest else [rest.strip().replace(" ", "=", 1)]
            variables |= dict(pair.split("=", 1) for pair in pairs)
        elif kind in ("COPY", "ADD"):
            steps.append(Step("COPY", tuple(part for part in shlex.split(rest) if not part.startswith("--"))))
        elif kind == "RUN":
            steps.append(Step("RUN", (rest.strip(),)))
        else:
            raise ConfigError(f"task {folder.name}: {kind} in its Dockerfile is not understood")
    return workdir, variables, tuple(steps)


def _texts(value: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, Mapping) else {}


def _memory(machine: Mapping[str, Any]) -> int:
    if isinstance(megabytes := machine.get("memory_mb"), int):
        return megabytes * 1024 * 1024
    found = _MEMORY.fullmatch(str(machine.get("memory", "2G")).strip())
    scale = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
    return int(found[1]) * scale[found[2].lower()] if found else 2 * 1024**3


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
