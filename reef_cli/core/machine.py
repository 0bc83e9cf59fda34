"""What of the machine this process may use. Containers and `taskset` give less than the machine has."""

import math
import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = CPU_QUOTA) -> int:
    """Cores this process may use: its affinity, or its container's quota of CPU time (cgroup v2) where that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(cores, math.ceil(int(allowed) / int(period))))
    except (OSError, ValueError):  # no quota, or no cgroup
        return cores
