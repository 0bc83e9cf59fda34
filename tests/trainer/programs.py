"""Programs that misbehave in one way each, for the tests of supervision; named by dotted path in the trainer subprocess."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reef_cli.trainer.batching import Batch
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.program import OptimizerSettings, Program, StepReport


@dataclass(frozen=True, slots=True)
class FaultSettings:
    how: str
    rank: int = 0


class Faulty(Program):
    """`how`: die, stop (frozen by a signal), stall, sleep, memory, raise, exit."""

    settings_type = FaultSettings

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(1e-3)

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        if policy.rank == self.settings.rank:
            getattr(self, self.settings.how)()
        policy.barrier()
        return StepReport(False)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep(self) -> None:
        time.sleep(2.5)

    def stall(self) -> None:
        time.sleep(600)

    def memory(self) -> None:
        import torch

        torch.empty(1 << 60)

    def raise_(self) -> None:
        raise ValueError("the program's own mistake")

    def exit_(self) -> None:
        print("last words", flush=True)
        os._exit(7)


class Unhelpful(Faulty):
    """Cannot even be built."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        raise RuntimeError("no program today")
