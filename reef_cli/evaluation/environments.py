"""Tasksets of the `verifiers` library (its v1 API) as suite items; needs the extra `verifiers`.

`evaluation.suite: verifiers:TASKSET` names an installed taskset package. Each task becomes an item: its prompt is asked, its
own rewards score the answer (their sum, held to [0, 1]). Tasks that need tools, containers or a user who opens the conversation
are refused: an item here is one answer. Tasks are split by a digest of their key, one in five for development.
"""

import hashlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from reef_cli.core.errors import ConfigError, EvaluationError, MissingDependency
from reef_cli.evaluation.calling import Caller
from reef_cli.evaluation.grade import Case, Grade

PREFIX = "verifiers:"
# An endless taskset is read so far.
MOST = 1000
_DEVELOPMENT = 5


@dataclass(frozen=True, slots=True)
class Rewarded:
    """Scores an answer by a task's own rewards; some of them ask the library's own judges."""

    own: ClassVar[bool] = True
    task: Any

    async def judge(self, case: Case, caller: Caller | None) -> Grade:  # noqa: ARG002 - rewards bring what they need
        vf = _library()
        trace = _trace(vf, self.task, case)
        try:
            await self.task.score(trace)
        except Exception as error:  # a taskset's rewards may raise anything; a broken one is an outage, not a score
            raise EvaluationError("a reward of the taskset failed", why=f"{type(error).__name__}: {error}"[:300]) from error
        given = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        if not given:
            raise EvaluationError("the taskset gave no reward", why="its rewards need a runtime", hint="use another taskset")
        total = float(trace.reward)
        names = ", ".join(f"{name} {reward.score:g}" for name, reward in given.items())
        return Grade(min(1.0, max(0.0, total)), names if 0.0 <= total <= 1.0 else f"{names}; sum {total:g} held to [0, 1]")


def load(name: str) -> Iterator[tuple[dict[str, Any], Rewarded]]:
    """`(row of a suite without its grader, grader)` of each task. `MissingDependency`, `ConfigError`."""
    vf = _library()
    try:
        taskset = vf.load_taskset(vf.TasksetConfig(id=name))
        tasks = list(taskset.take(MOST))
    except Exception as error:  # a foreign package's code
        raise ConfigError(f"taskset {name!r} cannot be loaded", why=f"{type(error).__name__}: {error}"[:300]) from error
    for index, task in enumerate(tasks):
        yield _row(name, index, task), Rewarded(task)


def _library() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise MissingDependency(
            "this suite needs the verifiers library", why=str(error), hint="pip install 'reef-cli[verifiers]'"
        ) from error


def _row(name: str, index: int, task: Any) -> dict[str, Any]:
    data = task.data
    if task.NEEDS_CONTAINER or type(task).toolsets(task.config) or data.prompt is None:
        raise ConfigError(
            f"task {index} of {name} cannot be asked as one question",
            why="it needs a container, tools or a user that speaks first",
        )
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [message.model_dump(mode="json", exclude_none=True) for message in data.prompt]
    part = int.from_bytes(hashlib.sha256(task.key.encode()).digest()[:4], "big") % _DEVELOPMENT
    identifier = f"{data.name or data.id or name}-{task.key[:12]}"
    return {"id": identifier[-200:], "messages": messages, "split": "heldout" if part else "development"}


def _trace(vf: Any, task: Any, case: Case) -> Any:
    """The library's record of a conversation of one answer."""
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig(), name="reef", trainable=False))
    kinds: Mapping[str, Any] = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    for message in case.messages:
        _append(vf, trace, kinds[str(message["role"])](content=message["content"]))
    _append(vf, trace, vf.AssistantMessage(content=case.answer), sampled=True)
    trace.is_completed = trace.ok = True
    return trace


def _append(vf: Any, trace: Any, message: Any, *, sampled: bool = False) -> None:
    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))
