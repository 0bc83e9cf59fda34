"""One rank's model, program and the state now in memory; swaps states when a command is about another scenario or checkpoint.

Promises: a step starts from exactly the state that was asked for; after a failed step the memory's state counts as unknown and
is loaded again from disk; every file appears whole or not at all. Knows neither the socket nor the server.
"""

import gc
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.errors import TrainerError
from reef_cli.core.ids import new_id
from reef_cli.core.types import Sample
from reef_cli.trainer import batching, checkpoint
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.losses import importance
from reef_cli.trainer.model import Actor, gathered, load_actor, lora_config, lora_parameters, reset_lora
from reef_cli.trainer.program import StepReport, load_program
from reef_cli.weights.lora import Lora, hf_name, read_lora, write_lora

Tick = Callable[[str, int, int], None]
DRIFT_SAMPLES = 4
"""Samples a step's drift is measured on: two forward passes over them, a tenth of a step."""


class Learner:
    """The trainer in one process. All methods are collective: every rank calls them with the same arguments."""

    def __init__(
        self,
        model_dir: Path,
        program: str,
        program_settings: Mapping[str, Any],
        settings: TrainerSettings,
        seed: int = 0,
        device: torch.device | str = "cpu",
        tick: Tick = lambda _phase, _done, _total: None,
    ) -> None:
        torch.manual_seed(seed)
        self.model_dir, self.settings, self.seed = model_dir, settings, seed
        self.tick = tick
        self._device = torch.device(device)
        self.program = load_program(program, program_settings)
        self._program_path = program
        self.policy: Policy | None = None
        self._resident: str | None = None
        self.fresh_reason = ""
        if not settings.rests:
            self._afresh(None)

    @property
    def actor(self) -> Actor:
        return self._policy.actor

    @property
    def _policy(self) -> Policy:
        if self.policy is None:
            raise TrainerError("The trainer holds no model")
        return self.policy

    # -- one step ----------------------------------------------------------------------------------------------------------

    def train(
        self,
        scenario: str,
        base_step: int,
        base_directory: Path | None,
        from_checkpoint: Path | None,
        samples: Sequence[Sample],
        out: Path,
        reference: str | None = None,
    ) -> dict[str, Any]:
        """Ensure the state, make one step, write candidate and checkpoint. Returns `{directory, kind, checkpoint, metrics}`.

        `reference` names weights to measure the step's drift from (see `drift`); empty is the base model.
        """
        clock = _Phases()
        self.ensure(base_directory, from_checkpoint)
        clock.lap("load_seconds")
        # Until the new checkpoint is complete, memory equals no state on disk.
        self._resident = None
        report = self.step(samples, base_step)
        if self._policy.dirty:
            self._restore(base_directory, from_checkpoint)
        clock.lap("step_seconds")
        drift: dict[str, float] = {}
        if reference is not None and report.policy_updated and self.can_drift:
            drift["kl_to_gated"] = self.drift(Path(reference) if reference else None, samples)
            clock.lap("drift_seconds")
        self.tick("export", 0, 1)
        paths = self.write(scenario, out)
        clock.lap("export_seconds")
        metrics = {
            "policy_updated": report.policy_updated,
            **report.metrics,
            **drift,
            **clock.laps,
            "seconds": sum(clock.laps.values()),
            "state": self.fresh_reason or "resumed",
            "samples": len(samples),
        }
        return {**paths, "metrics": metrics}

    def step(self, samples: Sequence[Sample], base_step: int = 0) -> StepReport:
        """One step of the program on the state in memory, without writing anything."""
        if not samples:
            raise TrainerError("A training step needs at least one sample")
        policy, batch = self._policy, self._batch(samples, base_step)
        policy.tick = self.tick
        self.actor.train()
        return self.program.train(policy, batch)

    @property
    def can_drift(self) -> bool:
        """Whether other weights fit into memory for a moment: LoRA adapters do, full weights and ZeRO-3 partitions do not."""
        return self.settings.method == "lora" and self.settings.zero_stage < 3

    @torch.no_grad()
    def drift(self, reference: Path | None, samples: Sequence[Sample]) -> float:
        """K3 estimate of KL(weights in memory || `reference`) in nats per token, over the step's first samples."""
        policy, batch = self._policy, self._batch(samples[:DRIFT_SAMPLES])
        now = [policy.forward(micro).logprob for micro in batch.micros]
        with self._instead(reference):
            then = [policy.forward(micro, adapter=reference is not None).logprob for micro in batch.micros]
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for mine, theirs in zip(now, then, strict=True):
            if mine.numel():
                total[0] += importance.k3((theirs - mine).double()).sum()
                total[1] += mine.numel()
        total = policy.sum(total)
        return float(total[0] / total[1].clamp(min=1))

    @contextmanager
    def _instead(self, reference: Path | None) -> Iterator[None]:
        """Another adapter's matrices in the modules for the block; afterwards exactly what was there."""
        if reference is None:
            yield
            return
        kept = [matrix.detach().clone() for _, pair in lora_parameters(self.actor) for matrix in pair]
        try:
            reset_lora(self.actor, read_lora(reference), self.seed)
            yield
        finally:
            for matrix, old in zip((m for _, pair in lora_parameters(self.actor) for m in pair), kept, strict=True):
                matrix.data.copy_(old)

    @torch.no_grad()
    def score(self, directory: Path | None, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probs of each sample's action tokens under the weights of `directory` (None: base). Drops the state in memory."""
        self._afresh(directory)
        policy, batch = self._policy, self._batch(samples)
        mine: dict[int, list[float]] = {}
        for micro in batch.micros:
            parts = micro.split(policy.forward(micro).logprob)
            mine |= {position: part.tolist() for position, part in parts.items()}
        found = {position: part for share in policy.gather(mine) for position, part in share.items()}
        return [found.get(i, []) for i in range(len(samples))]

    def _batch(self, samples: Sequence[Sample], base_step: int = 0) -> batching.Batch:
        policy, settings = self._policy, self.settings
        return batching.build(
            samples,
            settings.micro_batch,
            base_step=base_step,
            rank=policy.rank,
            world_size=policy.world_size,
            device=self._device,
            pack_tokens=settings.pack_tokens,
        )

    def rest(self) -> None:
        """Give the memory of model and optimizer back; the next command loads what it needs from files."""
        self.tick("rest", 0, 1)
        self._resident = None
        if self.policy is not None:
            self.policy.close()
            self.policy = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # -- states ------------------------------------------------------------------------------------------------------------

    def ensure(self, base_directory: Path | None, from_checkpoint: Path | None) -> None:
        """Put a checkpoint's state, else an artifact's weights with nothing learned beside them, into memory."""
        self.fresh_reason = ""
        if from_checkpoint is None:
            self.fresh_reason = "fresh: no checkpoint"
            return self._afresh(base_directory)
        state = checkpoint.read_state(from_checkpoint)
        if state.id == self._resident:
            return None
        if self.policy is None:
            self._afresh(base_directory)
        self.tick("load", 0, 1)
        difference = self._shape().differs(state.shape)
        if difference is not None:
            self.fresh_reason = f"fresh: {difference}"
            return self._afresh(base_directory)
        self._policy.load(from_checkpoint / checkpoint.ENGINE_DIR)
        self.program.reset(self._policy)
        self.program.load_state_dict(checkpoint.read_program(from_checkpoint))
        self._resident = state.id
        return None

    def _afresh(self, base_directory: Path | None) -> None:
        """Weights of an artifact (None: the base model) under a new optimizer and a new program state."""
        self._resident = None
        lora = self.settings.method == "lora"
        # Full weights, and ZeRO-3's partitions, cannot be put back in place: load the model again.
        if self.policy is None or not lora or self.settings.zero_stage == 3:
            self._build(None if lora else base_directory, read_lora(base_directory) if lora and base_directory else None)
        else:
            reset_lora(self.actor, read_lora(base_directory) if base_directory else None, self.seed)
            self.policy.start()
        self.program.reset(self._policy)

    def _build(self, directory: Path | None, adapter: Lora | None) -> None:
        self.tick("load model", 0, 1)
        if self.policy is not None:
            self.policy.close()
            self.policy = None
        actor = load_actor(directory or self.model_dir, self.settings, self._device)
        if actor.lora:
            reset_lora(actor, adapter, self.seed)
        self.policy = Policy(actor, self.settings, self.program.optimizer, self.seed)

    def _restore(self, base_directory: Path | None, from_checkpoint: Path | None) -> None:
        """Undo a step that was called off, but keep what the program learned beside it (the critic)."""
        kept = self.program.state_dict()
        if from_checkpoint is not None and not self.fresh_reason:
            self._policy.load(from_checkpoint / checkpoint.ENGINE_DIR)
        else:
            self._afresh(base_directory)
            self.program.load_state_dict(kept)

    # -- files -------------------------------------------------------------------------------------------------------------

    def write(self, scenario: str, out: Path) -> dict[str, Any]:
        """Candidate and checkpoint of what is in memory, under `out`."""
        policy = self._policy
        lora = self.settings.method == "lora"
        final = out / ("adapter" if lora else "model")
        partial, partial_checkpoint = out / ".candidate.partial", out / ".checkpoint.partial"
        if policy.rank == 0:
            for folder in (partial, partial_checkpoint):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True, mode=0o700)
        policy.barrier()
        self._export(partial)
        policy.save(partial_checkpoint / checkpoint.ENGINE_DIR)
        state_id = policy.gather(new_id())[0]
        if policy.rank == 0:
            checkpoint.write_state(partial_checkpoint, state_id, scenario, self._shape(), self.program.state_dict())
        policy.barrier()
        if policy.rank == 0:
            checkpoint.publish(partial_checkpoint, out / "checkpoint")
            checkpoint.publish(partial, final)
        policy.barrier()
        self._resident = state_id
        return {"directory": str(final), "kind": "lora" if lora else "checkpoint", "checkpoint": str(out / "checkpoint")}

    def _export(self, directory: Path) -> None:
        stage = self.settings.zero_stage
        if self.settings.method == "lora":
            pairs = dict(lora_parameters(self.actor))
            with gathered([matrix for pair in pairs.values() for matrix in pair], stage):
                tensors = {
                    module: (a.detach().bfloat16().cpu(), b.detach().bfloat16().cpu()) for module, (a, b) in pairs.items()
                }
            if self._policy.rank == 0:
                write_lora(directory, Lora(lora_config(self.settings, self.model_dir.name), tensors))
            return
        parameters = dict(self.actor.causal.named_parameters())
        with gathered(list(parameters.values()), stage):
            whole = {hf_name(name) or name: p.detach().bfloat16().cpu().contiguous() for name, p in parameters.items()}
        if self._policy.rank == 0:
            checkpoint.write_model(directory, whole, self.model_dir)

    def _shape(self) -> checkpoint.Shape:
        s = self.settings
        return checkpoint.Shape(
            s.method,
            s.rank,
            s.alpha,
            s.precision,
            s.zero_stage,
            self._policy.world_size,
            self._program_path,
            tuple(s.target_modules),
        )


class _Phases:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now
