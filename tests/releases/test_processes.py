"""Real processes on one store: racing publishers, racing collectors, and `kill -9` at any moment."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from reef_cli.core.errors import HeadMoved
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases import Keep, ReleaseService
from tests.releases.conftest import write_lora

PUBLISHER = """
import sys
from pathlib import Path
from reef_cli.core.errors import HeadMoved
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases import ReleaseService
from reef_cli.releases.routing import HEAD, Policy
from tests.releases.conftest import write_lora

service, source, count, tell = ReleaseService(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
head, published, number = service.head("s").release_id, 0, 0
while published < count:
    number += 1
    write_lora(source, f"{tell} {number} ".encode() * 20_000)
    artifact = service.store(source, "lora")
    try:
        release = service.publish("s", Draft(artifact.content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, tell), head)
    except HeadMoved as lost:
        head = lost.details["head"]
    else:
        head, published = release.release_id, published + 1
        print(release.release_id, flush=True)
        try:
            service.route("s", Policy(shares={HEAD: 0.5, release.release_id: 0.5}), author=tell)
        except HeadMoved:
            pass  # the other process set its policy first
"""


def start(home: Path, source: Path, count: int, name: str) -> "subprocess.Popen[str]":
    source.mkdir(exist_ok=True)
    command = [sys.executable, "-c", PUBLISHER, str(home), str(source), str(count), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def seeded(tmp_path: Path) -> ReleaseService:
    service = ReleaseService(tmp_path / "home")
    source = tmp_path / "seed"
    source.mkdir()
    write_lora(source, b"seed")
    service.create("s", service.store(source, "lora"))
    return service


def test_two_processes_race_and_every_win_is_in_one_line(tmp_path):
    service = seeded(tmp_path)
    racers = [start(service.home, tmp_path / name, 8, name) for name in ("ann", "bob")]
    collected = 0
    while any(racer.poll() is None for racer in racers):
        service.gc(dry_run=False, keep=Keep(grace_s=60.0))
        collected += 1
        time.sleep(0.05)
    won = {}
    for name, racer in zip(("ann", "bob"), racers, strict=True):
        out, err = racer.communicate(timeout=30)
        assert racer.returncode == 0, err
        won[name] = out.split()
    listed = service.list("s")
    assert len(listed) == 17 and collected > 0
    assert {release.release_id for release in listed[:-1]} == set(won["ann"]) | set(won["bob"])
    assert [release.step for release in listed] == list(range(16, -1, -1))
    for name, ids in won.items():
        assert [release.release_id for release in reversed(listed) if release.author == name] == ids
    assert service.verify("s") == []
    policies = service.list("s", Surface.ROUTING)
    assert 8 <= len(policies) <= 16 and [release.step for release in policies] == list(range(len(policies)))[::-1]
    assert all(service.policy(release).named <= {*won["ann"], *won["bob"]} for release in policies)


def test_threads_with_one_expectation_have_one_winner(tmp_path):
    service = seeded(tmp_path)
    head = service.head("s")
    results: list[object] = []
    barrier = threading.Barrier(6)

    def publish(number: int) -> None:
        draft = Draft(head.content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, f"t{number}")
        barrier.wait()
        try:
            results.append(service.publish("s", draft, head.release_id))
        except HeadMoved as lost:
            results.append(lost)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [result for result in results if not isinstance(result, HeadMoved)]
    assert service.head("s") == winner and len(service.list("s")) == 2
    assert {lost.details["head"] for lost in results if isinstance(lost, HeadMoved)} == {winner.release_id}


def test_kill_at_any_moment_leaves_a_valid_chain_with_all_that_was_acknowledged(tmp_path):
    service = seeded(tmp_path)
    draw = random.Random(5)
    acknowledged: list[str] = []
    for number in range(6):
        process = start(service.home, tmp_path / f"work{number}", 1000, f"run{number}")
        first = process.stdout.readline().split()
        time.sleep(draw.uniform(0.0, 0.12))
        os.killpg(process.pid, signal.SIGKILL)
        acknowledged += first + process.communicate()[0].split()
        fresh = ReleaseService(service.home)
        listed = fresh.list("s")
        assert [release.release_id for release in reversed(listed) if release.release_id in set(acknowledged)] == acknowledged
        # At most the one release per run whose acknowledgement the kill swallowed.
        assert len(listed) - 1 - len(acknowledged) <= number + 1
        assert all(release.restorable for release in listed)
        assert fresh.verify("s") == [], "the main chain and the policies"
        named = fresh.policy(fresh.head("s", Surface.ROUTING)).named
        assert named <= {release.release_id for release in listed}, "a policy never names what is not there"
        fresh.publish("s", Draft(listed[-1].content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, "after"), None)
        acknowledged.append(fresh.head("s").release_id)
    service.gc(dry_run=False, keep=Keep(grace_s=0.0))
    assert list((service.repo / "lfs" / "tmp").iterdir()) == [] and list((service.repo / "reef-tmp").iterdir()) == []
    assert service.verify("s") == []
