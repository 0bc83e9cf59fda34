"""A rank's surroundings: environment variables, process group, and DeepSpeed without just-in-time compilation.

`rank_environment` is used by the server's side and imports nothing heavy; the rest runs inside a rank.
"""

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

GROUP_TIMEOUT = timedelta(minutes=30)


def rank_environment(
    base: Mapping[str, str], *, rank: int, world_size: int, port: int, threads: int, cuda: bool
) -> dict[str, str]:
    """The environment of one rank: everything DeepSpeed wants to know, so that it never asks MPI."""
    env = dict(base)
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        # Idle OpenMP threads sleep instead of spinning, or the engine beside the trainer is starved.
        "OMP_WAIT_POLICY": base.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # A user's own recipes folder sits beside the shipped ones wherever the server found it.
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*(p or "." for p in sys.path), base.get("PYTHONPATH", "")])).strip(
            os.pathsep
        ),
        # DeepSpeed looks for its build tools on PATH, also when started by absolute path.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)]),
    }
    if not cuda:
        env |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": base.get("GLOO_SOCKET_IFNAME", "lo"), "CUDA_VISIBLE_DEVICES": ""}
    return env


def join_group(cuda: bool) -> None:
    """Join the trainer's default process group as the environment says (gloo on CPU, NCCL on GPU)."""
    import deepspeed
    import deepspeed.ops

    # Built with a C++ compiler at first use otherwise (26 s), for a gain that only several CPU ranks would see.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", timeout=GROUP_TIMEOUT, verbose=False)


def join_alone(threads: int = 2, cuda: bool = False) -> None:
    """Make this process the only rank of a group, for scripts and tests that train in-process.

    Once per process: DeepSpeed remembers the first group for ever, so it is kept until the process ends.
    """
    import torch.distributed as dist

    from reef_cli.weights.group import free_port

    if dist.is_initialized():
        return
    os.environ.update(rank_environment(os.environ, rank=0, world_size=1, port=free_port(), threads=threads, cuda=cuda))
    join_group(cuda)
