"""Builds the learning half of a deployment: trainer, gate, runner and worker around a recipe."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reef_cli.config.paths import Home
from reef_cli.config.schema import Settings, TrainerSettings
from reef_cli.core.clock import Clock
from reef_cli.core.errors import ConfigError, MissingDependency
from reef_cli.core.ids import split_weight_version
from reef_cli.core.ports import Answering, ChatTemplate, Evaluating, Publishing, Training
from reef_cli.core.types import Cadence, Surface
from reef_cli.evaluation.asking import Bench
from reef_cli.evaluation.gate import Gate
from reef_cli.evaluation.suite import Suite
from reef_cli.experience.log import ExperienceLog
from reef_cli.learning.cadence import Policy
from reef_cli.learning.contract import Recipe, Tools
from reef_cli.learning.evolving import Evolving
from reef_cli.learning.runner import Runner
from reef_cli.learning.worker import LearningWorker, WorkerSettings
from reef_cli.releases.service import ReleaseService
from reef_cli.supervisor.local import LocalEngine
from reef_cli.supervisor.room import room_for
from reef_cli.trainer.handle import TrainerHandle

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What the worker is plugged into."""

    log: ExperienceLog
    releases: ReleaseService
    publishing: Publishing
    answering: Answering
    suite: Suite | None
    bench: Bench
    training: Training
    clock: Clock
    home: Home
    template: ChatTemplate | None = None
    evaluating: Evaluating | None = None
    """What judges candidates; absent: the gate over `suite`."""


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


def check_recipe(recipe: Recipe, engine: LocalEngine | None) -> None:
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


def make_trainer(settings: Settings, recipe: Recipe, engine: LocalEngine, home: Home) -> TrainerHandle:
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
    )


def make_worker(settings: Settings, recipe: Recipe, parts: Parts) -> LearningWorker:
    """The learning worker over its parts; `run` it as a task."""
    cadence = Cadence(settings.reef.cadence or recipe.cadence)
    review = settings.reef.publish == "review"
    tools = Tools(parts.template, parts.answering, parts.clock, parts.log.report)
    runner = Runner(
        log=parts.log,
        releases=parts.releases,
        publishing=parts.publishing,
        training=parts.training,
        evaluating=parts.evaluating
        or Gate(parts.answering, parts.suite, settings.evaluation, cadence=cadence, clock=parts.clock, bench=parts.bench),
        recipe=recipe,
        policy=Policy(cadence, review, recipe.settings.gate_every, settings.storage.keep_checkpoints),
        workspace=parts.home.checkpoints,
        clock=parts.clock,
        tools=tools,
    )
    return LearningWorker(
        log=parts.log,
        releases=parts.releases,
        publishing=parts.publishing,
        recipe=recipe,
        runner=runner,
        cadence=cadence,
        settings=WorkerSettings(),
        clock=parts.clock,
        tools=tools,
    )


async def push_weights(trainer: TrainerHandle, urls: Sequence[str], directory: Path, label: str) -> Mapping[str, Any]:
    """Have the trainer send an artifact's weights into the engines under their label; returns phase times and bytes."""
    named = split_weight_version(label)
    return await trainer.push(named[0] if named else "", directory, label, urls[0], urls[1:])
