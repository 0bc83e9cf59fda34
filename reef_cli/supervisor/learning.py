"""Builds the learning half of a deployment: trainer, gate, runner and lane around each recipe, and the worker over them."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reef_cli.config.paths import Home
from reef_cli.config.schema import Settings, TrainerSettings
from reef_cli.core.errors import ConfigError, MissingDependency
from reef_cli.core.ids import split_weight_version
from reef_cli.core.ports import Evaluating, Training
from reef_cli.core.types import Cadence, Held, Surface
from reef_cli.evaluation.gate import Gate
from reef_cli.evaluation.suite import Suite
from reef_cli.learning.cadence import Policy
from reef_cli.learning.contract import Recipe, Tools
from reef_cli.learning.evolving import Evolving
from reef_cli.learning.lanes import Lane
from reef_cli.learning.runner import Runner
from reef_cli.learning.worker import LearningWorker
from reef_cli.supervisor.room import room_for
from reef_cli.trainer.handle import TrainerHandle

if TYPE_CHECKING:
    from reef_cli.supervisor.local import LocalEngine
    from reef_cli.supervisor.stack import Stack

logger = logging.getLogger(__name__)


def pushes_whole_weights(settings: TrainerSettings) -> bool:
    """Whether a release replaces all weights of the engine (`merged`, `full`) instead of standing beside it as an adapter."""
    mode = settings.push or ("adapter" if settings.method == "lora" else "full")
    wrong = {("full", "adapter"), ("full", "merged"), ("lora", "full")}
    if (settings.method, mode) in wrong:
        raise ConfigError(
            f"trainer.push {mode} does not go with trainer.method {settings.method}",
            hint="lora: adapter or merged; full: full",
        )
    return mode != "adapter"


def contract_of(recipe: Recipe) -> Mapping[str, Any]:
    """What a recipe says of itself to those who report to it."""
    facts = {"surface": recipe.surface, "cadence": recipe.cadence, "title": recipe.title}
    return {**facts, "settings": asdict(recipe.settings)}


def check_recipe(recipe: Recipe, engine: "LocalEngine | None") -> None:
    """Raises `ConfigError` or `MissingDependency` when this deployment cannot run the recipe."""
    if isinstance(recipe, Evolving):
        return
    if recipe.surface is not Surface.WEIGHTS:
        raise ConfigError(f"recipe {recipe.name} changes the {recipe.surface}, and does not say how")
    if engine is None:
        raise ConfigError(
            f"recipe {recipe.name} trains weights, and an upstream engine has none to train",
            hint="use engine.kind: embedded or sglang",
        )
    missing = [name for name in ("torch", "transformers", "peft", "deepspeed") if find_spec(name) is None]
    if missing:
        raise MissingDependency(f"{missing[0]} is needed for training", hint="pip install 'reef-cli[local,train]'")


def make_trainer(settings: Settings, recipe: Recipe, engine: "LocalEngine", home: Home) -> TrainerHandle:
    """The trainer's handle; its processes start with the first step. Raises `ConfigError` when training cannot fit here."""
    room = room_for(settings, engine.model_dir, home.root)
    logger.info("%s", room)
    if room.warning:
        logger.warning("%s", room.warning)
    return TrainerHandle(
        settings.trainer,
        engine.model_dir,
        recipe.program(),
        home.logs / "trainer.log",
        seed=settings.trainer.seed,
        engine_key=engine.admin_key,
        engine_read_key=engine.read_key,
        transport=settings.trainer.transport or ("group" if engine.started_here else "disk"),
        borrow=engine.serving.lent if settings.trainer.rests else nullcontext,
    )


def open_worker(stack: "Stack", suite: Suite | None) -> LearningWorker:
    """The learning worker of a deployment, with a lane per recipe; `run` it as a task. Makes the trainer weights need."""
    check_recipes(stack.members)
    for recipe in stack.members:
        check_recipe(recipe, stack.engine)
    lanes = [_lane(stack, recipe, suite) for recipe in stack.members]
    return LearningWorker(
        log=stack.log,
        publishing=stack.publisher,
        lanes=lanes,
        clock=stack.clock,
        away=lambda: stack.engine.away() if stack.engine else None,
    )


def check_recipes(members: Sequence[Recipe]) -> None:
    """Raises `ConfigError` unless each surface has at most one recipe."""
    for recipe in members:
        same = [other.name for other in members if other.surface is recipe.surface]
        if len(same) > 1:
            raise ConfigError(
                f"the recipes {' and '.join(same)} both change the {recipe.surface}",
                why="a surface has one head, and one recipe moves it",
                hint="keep one of them",
            )


def _lane(stack: "Stack", recipe: Recipe, suite: Suite | None) -> Lane:
    settings, answering = stack.settings, stack.answering()
    cadence = Cadence(settings.reef.cadence or recipe.cadence)
    tools = Tools(stack.engine.chat if stack.engine else None, answering, stack.clock, stack.log.report)
    training, evaluating = _judged(stack, recipe, Gate(
        answering, suite, settings.evaluation, cadence=cadence, clock=stack.clock, bench=stack.bench
    ))  # fmt: skip
    review = settings.reef.publish == "review"
    runner = Runner(
        log=stack.log,
        releases=stack.releases,
        publishing=stack.publisher,
        training=training,
        evaluating=evaluating,
        recipe=recipe,
        policy=Policy(cadence, review, recipe.settings.gate_every, settings.storage.keep_checkpoints),
        workspace=stack.home.checkpoints,
        clock=stack.clock,
        tools=tools,
    )
    return Lane(stack.log, stack.releases, stack.publisher, recipe, runner, cadence, stack.clock, tools)


def _judged(stack: "Stack", recipe: Recipe, gate: Gate) -> tuple[Training, Evaluating]:
    """What makes a recipe's candidates, and what judges them: episodes for a harness, the gate over the suite for weights."""
    if isinstance(recipe, Evolving):
        assert stack.evolved is not None
        return stack.evolved.training, stack.evolved.evaluating
    assert stack.engine is not None
    stack.trainer = make_trainer(stack.settings, recipe, stack.engine, stack.home)
    return stack.trainer, gate


async def push_weights(
    trainer: TrainerHandle, urls: Sequence[str], directory: Path, label: str, held: Held | None
) -> Mapping[str, Any]:
    """Have the trainer send an artifact's weights into the engines under their label; returns phase times and bytes."""
    named = split_weight_version(label)
    return await trainer.push(named[0] if named else "", directory, label, urls[0], urls[1:], held)
