"""Answers by episodes: what the gate asks, an agent does. The tasks come from a suite and from folders of coding tasks."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ConfigError, EngineUnavailable, ReleaseNotFound
from reef_cli.core.ports import Answer, Sampling
from reef_cli.core.types import Release
from reef_cli.evaluation.grade import Grade
from reef_cli.evaluation.suite import Item, Suite
from reef_cli.harness.episodes import Episode, Task
from reef_cli.harness.service import HarnessService
from reef_cli.harness.tasks import CodingTask, load_tasks, run_tests
from reef_cli.harness.trajectory import Trajectory
from reef_cli.harness.trials import Trials


class WorkFolder:
    """Grades what an episode left, by the note its answer ends with; the notes are the server's own."""

    def __init__(self) -> None:
        self._notes: dict[str, Grade] = {}

    def note(self, text: str, episode: str, found: Grade) -> str:
        """`text` with a last line that names the episode and what its tests said."""
        line = f"[episode {episode}: {found.reason}]"
        self._notes[line] = found
        return f"{text}\n\n{line}"

    def grade(self, answer: str) -> Grade:
        return self._notes.pop(answer.rpartition("\n")[2], Grade(0.0, "the episode left no note"))


@dataclass(frozen=True, slots=True)
class Tasks:
    """What episodes are asked: a suite's prompts, and coding tasks by their prompt."""

    suite: Suite | None
    coding: Mapping[str, CodingTask] = field(default_factory=dict)
    grader: WorkFolder = field(default_factory=WorkFolder)

    def prompts(self) -> list[str]:
        return [str(item.messages[0]["content"]) for item in self.suite.items] if self.suite else []


def gather(suite: Suite | None, folder: Path | None, attempts: int = 1) -> Tasks:
    """The suite's items and the folder's tasks, each `attempts` times, as one suite.

    `ConfigError` for what no agent can be asked.
    """
    for item in suite.items if suite is not None else ():
        if [message.get("role") for message in item.messages] != ["user"] or not isinstance(item.messages[0]["content"], str):
            raise ConfigError(
                f"item {item.id} of {suite.name if suite else ''} is no task for an agent",
                why="an agent is started with one message of a user, which is text",
            )
    if folder is None:
        return Tasks(suite)
    grader = WorkFolder()
    found = load_tasks(folder)
    coding = {task.task.prompt: task for task in found}
    if len(coding) < len(found):
        raise ConfigError(f"two tasks of {folder} have the same prompt", hint="tasks are told apart by what they ask")
    items = tuple(_item(task, grader, attempt) for attempt in range(1, attempts + 1) for task in found)
    marks = [suite.digest if suite else "", str(attempts), *(task.digest() for task in found)]
    digest = hashlib.sha256(" ".join(marks).encode()).hexdigest()
    name = f"{suite.name} and {folder.name}" if suite else folder.name
    return Tasks(Suite(name, f"sha256:{digest}", (*(suite.items if suite else ()), *items)), coding, grader)


def _item(task: CodingTask, grader: WorkFolder, attempt: int) -> Item:
    facts = task.facts
    return Item(
        task.task.id if attempt == 1 else f"{task.task.id}#{attempt}",
        ({"role": "user", "content": task.task.prompt},),
        grader,
        split=facts.get("split", "heldout"),
        tags=("coding",),
        weight=float(facts.get("weight", 1.0)),
        anchor=bool(facts.get("must_not_regress", False)),
    )


class EpisodeAnswering:
    """The port `Answering` by episodes: the answer is the agent's last word. An episode that could not run is no answer."""

    def __init__(self, trials: Trials, service: HarnessService, tasks: Tasks) -> None:
        self._trials = trials
        self._service = service
        self._tasks = tasks

    async def answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, release: Release | None) -> Answer:  # noqa: ARG002 - an agent samples as its own settings say
        if release is None:
            raise ReleaseNotFound("an agent is evaluated with the harness of a release", hint="name one")
        prompt = str(messages[-1].get("content", ""))
        coding = self._tasks.coding.get(prompt)
        name = f"task-{hashlib.sha256(prompt.encode()).hexdigest()[:12]}"
        task = coding.task if coding else Task(name, prompt)
        tree = await asyncio.to_thread(self._service.tree_of, release)

        def grade(work: Path, _: Trajectory) -> tuple[float, str]:
            assert coding is not None
            return run_tests(coding.tests, work)

        tags = {"harness": release.release_id}
        episode = await self._trials.run(release.scenario, tree, task, grade if coding else None, tags)
        if episode.outcome == "outage":
            raise EngineUnavailable(f"The episode could not run; the service is unavailable: {episode.reason}")
        text = episode.trajectory.final
        if coding is not None:
            text = self._tasks.grader.note(text, episode.id, Grade(episode.score or 0.0, episode.graded))
        return Answer(text, episode.tokens[1], _finish(episode))


def _finish(episode: Episode) -> str:
    return "length" if episode.limit is not None else "stop"
