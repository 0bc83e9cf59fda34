"""The custom group: two real processes, rank 0 beside its own default group, and the failures that must not hang."""

import multiprocessing as mp
import time

import pytest
import torch
import torch.distributed as dist

from reef_cli.core.errors import EngineError
from reef_cli.weights.group import close_group, free_port, make_group


def _receiver(port: int, out) -> None:
    torch.set_num_threads(1)
    group = make_group("127.0.0.1", port, 2, 1, "push", "gloo", 20)
    flat = torch.empty(1000, dtype=torch.uint8)
    dist.broadcast(flat, group_src=0, group=group)
    out.send(int(flat.sum()))
    close_group(group)


def _trainer(port: int, out) -> None:
    """Rank 0 of the push group from inside a process that already has a default group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    for attempt in ("push",):
        group = make_group("127.0.0.1", port, 2, 0, attempt, "gloo", 20)
        dist.broadcast(torch.full((1000,), 3, dtype=torch.uint8), group_src=0, group=group)
        close_group(group)
    total = torch.ones(1)
    dist.all_reduce(total)
    out.send(float(total))
    dist.destroy_process_group()


def test_a_push_group_forms_beside_a_default_group_and_leaves_it_whole() -> None:
    spawn = mp.get_context("spawn")
    port = free_port()
    ends = [spawn.Pipe(duplex=False) for _ in range(2)]
    workers = [
        spawn.Process(target=target, args=(port, end[1])) for target, end in zip((_trainer, _receiver), ends, strict=True)
    ]
    for worker in workers:
        worker.start()
    try:
        assert ends[1][0].poll(40) and ends[1][0].recv() == 3000
        assert ends[0][0].poll(40) and ends[0][0].recv() == 1.0
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()


def test_a_missing_peer_is_a_typed_error_within_the_time_out() -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match="Cannot form process group"):
        make_group("127.0.0.1", free_port(), 2, 0, "lonely", "gloo", timeout_s=1.0)
    assert time.monotonic() - started < 8


def test_a_missing_store_is_a_typed_error_within_the_time_out() -> None:
    started = time.monotonic()
    with pytest.raises(EngineError):
        make_group("127.0.0.1", free_port(), 2, 1, "early", "gloo", timeout_s=1.0)
    assert time.monotonic() - started < 8


def test_a_name_can_be_used_again_only_after_the_group_is_closed() -> None:
    group = make_group("127.0.0.1", free_port(), 1, 0, "solo", "gloo", 10)
    with pytest.raises(EngineError, match="already been created"):
        make_group("127.0.0.1", free_port(), 1, 0, "solo", "gloo", 10)
    close_group(group)
    close_group(make_group("127.0.0.1", free_port(), 1, 0, "solo", "gloo", 10))
