"""Whether a deployment's training fits this machine, asked before anything is started.

What a step cannot do without (weights, gradients, optimizer states) is counted exactly: more than the machine has is refused.
The rest is an estimate: too little room is a warning. Looks only, and imports nothing heavy.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from reef_cli.config.schema import Settings
from reef_cli.core.errors import ConfigError
from reef_cli.trainer.estimate import Estimate, estimate

ROW_TOKENS = 1024
"""Length of the rows an estimate is made for; longer ones need more, in proportion."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator as its driver describes it; bytes."""

    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class Room:
    """An estimate beside what is there. `place` says where a rank's memory is: the GPU, or this machine's own."""

    needs: Estimate
    place: str
    memory: int
    disk_needed: int
    disk_free: int

    def __str__(self) -> str:
        fixed, total = gib(self.needs.fixed), gib(self.needs.memory)
        return (
            f"a training step needs about {total} of {self.place} memory per rank"
            f" ({fixed} for weights, gradients and optimizer) and {gib(self.disk_needed)} of disk;"
            f" there are {gib(self.memory)} and {gib(self.disk_free)}"
        )

    @property
    def warning(self) -> str | None:
        """What may run out, or None."""
        if self.needs.memory > self.memory:
            return f"{self}: lower trainer.micro_batch"
        return f"{self}: lower storage.keep_checkpoints" if self.disk_needed > self.disk_free else None


def room_for(settings: Settings, model_dir: Path, home: Path) -> Room:
    """What training takes and what there is. Raises `ConfigError` when it cannot fit at all."""
    trainer = settings.trainer
    needs = estimate(trainer, model_dir, tokens=ROW_TOKENS)
    cards = gpus() if trainer.device != "cpu" else []
    ranks_here = trainer.world_size if not cards else -(-trainer.world_size // len(cards))
    total = min(card.memory for card in cards) if cards else machine_memory()
    disk = (settings.storage.keep_checkpoints + 2) * (needs.checkpoint + needs.artifact)
    room = Room(needs, "GPU" if cards else "the machine's", total // max(1, ranks_here), disk, _free(home))
    if needs.fixed > room.memory:
        raise ConfigError(
            f"training cannot fit: {room}",
            hint="trainer.method lora, precision bf16, or zero_stage 3 over more ranks (trainer.world_size) need less",
        )
    return room


def gpus() -> list[Gpu]:
    """NVIDIA GPUs that the driver shows; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in shown.splitlines() if "," in line]
    return [Gpu(name.strip(), int(mib) * 1024**2) for name, _, mib in rows if mib.strip().isdigit()]


def machine_memory() -> int:
    """Bytes of memory this process may use: the machine's, or its container's limit."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no limit, or no cgroup
        return whole


def gib(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / 1024**3:.1f} GiB"


def _free(place: Path) -> int:
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
