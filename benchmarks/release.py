"""Times of the release store: store, publish, promote, rollback, and listing a chain of 1,000 from a fresh process.

Run: `python -m benchmarks.release [--chain 1000] [--large-mb 256] [--model DIR --checkpoints 20] [--learn 20] [--home DIR]
[--out benchmarks/results/release.json]`. With `--model`, a folder with a real model (`reef model list` names it), full
checkpoints of it are stored after made-up steps and compacted; that needs torch. With `--learn`, `reef serve` takes so many
real SAO steps on full weights and its own chain is measured. Wall times in ms (median, p95); everything is fsynced, so the
disk is part of them: `fsync_ms` is what one small fsync costs here.
Bars: publish, promote and rollback <= 50 ms besides the bytes; bytes at 1 GB/s; a listing of 1,000 in <= 100 ms.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gate import machine
from reef_cli.core.types import Artifact, Draft, Operation, Surface
from reef_cli.releases import ReleaseService

LISTING = """
import resource, sys, time
from pathlib import Path
from reef_cli.releases import ReleaseService
def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
wall, used = time.perf_counter(), cpu()
count = len(ReleaseService(Path(sys.argv[1])).list("s"))
print(count, (time.perf_counter() - wall) * 1e3, (cpu() - used) * 1e3)
"""


def timed(times: int, work: Callable[[int], object]) -> dict[str, float]:
    """Median and 95th percentile in ms of `work(0..times-1)`, and the mean CPU ms with that of the git processes."""
    spent = []
    used = cpu_s()
    for index in range(times):
        started = time.perf_counter()
        work(index)
        spent.append((time.perf_counter() - started) * 1e3)
    used = (cpu_s() - used) / times * 1e3
    spent.sort()
    return {
        "cpu_ms": round(used, 2),
        "median_ms": round(statistics.median(spent), 2),
        "p95_ms": round(spent[int(0.95 * (times - 1))], 2),
        "runs": times,
    }


def cpu_s() -> float:
    """CPU seconds of this process and its ended children: steadier than wall time on a shared machine."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def fsync_ms(folder: Path) -> float:
    path = folder / "probe"

    def once(index: int) -> None:
        with path.open("wb") as file:
            file.write(b"x" * 512)
            os.fsync(file.fileno())

    return timed(20, once)["median_ms"]


def adapter(folder: Path, size: int, seed: int) -> Path:
    """A PEFT folder with `size` bytes of weights, different for each seed."""
    folder.mkdir(exist_ok=True)
    header = {"base_model.model.q_proj.lora_A.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        block = hashlib.sha256(str(seed).encode()).digest() * 32768
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "tiny", "r": 8}))
    return folder


def draft(artifact: Artifact, **evidence: Any) -> Draft:
    return Draft(artifact.content_id, artifact.kind, Surface.WEIGHTS, Operation.TRAINING, "benchmark", evidence)


def measure_steps(home: Path) -> dict[str, Any]:
    """A life of small adapters: store, publish, hold and promote, roll back."""
    service = ReleaseService(home / "steps")
    artifacts: list[Artifact] = []
    source = home / "adapter"

    def store(index: int) -> None:
        artifacts.append(service.store(source, "lora"))

    stored = []
    for seed in range(12):
        adapter(source, 1_000_000, seed)
        stored.append(timed(1, store)["median_ms"])
    service.create("s", artifacts[0])
    publish = timed(12, lambda index: service.publish("s", draft(artifacts[index]), None))
    held = [service.hold("s", draft(artifacts[index]), None).release_id for index in range(12)]
    promote = timed(12, lambda index: service.promote("s", held[index]))
    rollback = timed(12, lambda index: service.rollback("s"))
    return {"store_1mb_ms": round(statistics.median(stored), 2), "publish": publish, "promote": promote, "rollback": rollback}


def measure_large(home: Path, megabytes: int) -> dict[str, Any]:
    """Storing one large adapter: the bytes' own speed, and its materialisation by hard link."""
    service = ReleaseService(home / "large")
    source = adapter(home / "large-adapter", megabytes * 1_000_000, 1)
    copied = storing(lambda: service.store(source, "lora"))
    artifact = service.store(source, "lora")
    folder = timed(1, lambda index: service.directory(artifact.content_id))
    again = timed(1, lambda index: service.store(source, "lora"))
    handed = adapter(home / "handed-adapter", megabytes * 1_000_000, 2)
    with (handed / "adapter_model.safetensors").open("rb") as file:
        os.fsync(file.fileno())  # as the trainer does before it hands a candidate over
    linked = storing(lambda: service.store(handed, "lora", take=True))
    service.create("s", artifact)
    publish = timed(1, lambda index: service.publish("s", draft(artifact), None))
    return {
        "megabytes": megabytes,
        "copied": copied,
        "handed_over": linked,
        "same_again_ms": again["median_ms"],
        "materialise_ms": folder["median_ms"],
        "publish_ms": publish["median_ms"],
        "sha256_gb_per_s": hash_rate(handed / "adapter_model.safetensors"),
    }


def storing(work: Callable[[], Artifact]) -> dict[str, float]:
    """Rate of storing one artifact, by the clock and by the processor time it took (the bound on a busy machine)."""
    started, used_before = time.perf_counter(), cpu_s()
    artifact = work()
    seconds, busy = time.perf_counter() - started, cpu_s() - used_before
    rates = {"gb_per_s": artifact.size / seconds / 1e9, "gb_per_cpu_s": artifact.size / busy / 1e9}
    return {"s": round(seconds, 3), "cpu_s": round(busy, 3), **{name: round(rate, 3) for name, rate in rates.items()}}


def hash_rate(path: Path) -> float:
    """What one pass of sha256 alone makes: the bound of anything that names bytes by it."""
    used_before = cpu_s()
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")
    return round(path.stat().st_size / (cpu_s() - used_before) / 1e9, 3)


def measure_checkpoints(home: Path, model: Path, count: int, rate: float) -> dict[str, Any]:
    """Disk used by `count` full checkpoints of a real model, each one step after the last, before and after compaction.

    A step is what the trainer does: fp32 weights move by `rate` in the direction of a noisy sign (Adam's first steps), and are
    rounded to bf16 for the checkpoint. Every checkpoint is then restored and compared by digest.
    """
    import torch
    from safetensors.torch import load_file, save_file

    service = ReleaseService(home / "checkpoints")
    draw = torch.Generator().manual_seed(0)
    weights = {name: tensor.float() for name, tensor in load_file(str(model / "model.safetensors")).items()}
    ids, stored, published = [], [], []
    head = None
    for step in range(count):
        folder = home / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "config.json").write_bytes((model / "config.json").read_bytes())
        for tensor in weights.values() if step else ():
            tensor += rate * torch.randn(tensor.shape, generator=draw).clamp_(-1, 1)
        save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, str(folder / "model.safetensors"))
        with (folder / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())
        started = time.perf_counter()
        artifact = service.store(folder, "checkpoint", take=True)
        stored.append(time.perf_counter() - started)
        facts = Draft(artifact.content_id, "checkpoint", Surface.WEIGHTS, Operation.TRAINING, "benchmark")
        head = service.publish("s", facts, head.release_id) if head else service.create("s", artifact)
        published.append(time.perf_counter() - started)
        ids.append(artifact)
        shutil.rmtree(folder)
    whole = used(home / "checkpoints")
    report = service.compact(idle_s=0)
    compacted = used(home / "checkpoints")
    started = time.perf_counter()
    problems = service.verify("s")
    size = ids[0].size
    return {
        "model": model.name,
        "checkpoints": count,
        "learning_rate": rate,
        "checkpoint_mb": round(size / 1e6, 1),
        "whole_mb": round(whole / 1e6, 1),
        "compacted_mb": round(compacted / 1e6, 1),
        "mb_per_older_checkpoint": round(
            (compacted - whole / count * (count - report.objects)) / max(1, report.objects) / 1e6, 1
        ),
        "compact_s": report.seconds,
        "store_gb_per_s": round(size / statistics.median(stored) / 1e9, 3),
        "publish_besides_bytes_ms": round((statistics.median(published) - size / 1e9) * 1e3, 1),
        "verified": not problems,
        "verify_s": round(time.perf_counter() - started, 1),
    }


def measure_learned(home: Path, steps: int) -> dict[str, Any]:
    """Disk used by the chain of a server that took `steps` SAO steps on full weights, before and after compaction."""
    from benchmarks.recipes_cpu import SAO, SCENARIO, Arm, Cell, configuration, example_folder, learn
    from reef_cli.demo.server import Server
    from reef_cli.evaluation.suite import Suite

    arm = Arm(SAO, {"critic_only_steps": 0})
    home = home / "learned"
    home.mkdir()
    settings = configuration(arm, 0, None).replace("trainer:\n", "trainer:\n  method: full\n")
    (home / "serve.yaml").write_text(settings)
    server = Server(home, home / "serve.yaml", {})
    cell = Cell("sao, full weights", 0, steps)
    try:
        client = server.wait_ready(600.0, lambda _: None)
        client.post("/reef/scenarios", {"name": SCENARIO})
        items = Suite.load(example_folder() / "suite.jsonl").select("development").items
        learn(cell, arm, client, server, items, steps)
    finally:
        server.stop()
    service = ReleaseService(home)
    checkpoints = [row for row in service.list(SCENARIO) if row.operation is Operation.TRAINING]
    whole = used(service.repo)
    report = service.compact(idle_s=0)
    return {
        "releases": len(checkpoints),
        "rewards": cell.rewards,
        "whole_mb": round(whole / 1e6, 1),
        "compacted_mb": round(used(service.repo) / 1e6, 1),
        "objects_compacted": report.objects,
        "verified": not service.verify(SCENARIO),
    }


def used(folder: Path) -> int:
    """Bytes on the disk, each inode once."""
    facts = {(stat.st_dev, stat.st_ino): stat.st_blocks * 512 for path in folder.rglob("*") if (stat := path.lstat())}
    return sum(facts.values())


def measure_listing(home: Path, chain: int) -> dict[str, Any]:
    """Grow a chain, then list it from fresh processes: with loose objects, and packed as `gc` leaves them."""
    service = ReleaseService(home / "chain")
    artifacts = [service.store(adapter(home / "a", 120_000, seed), "lora") for seed in range(8)]
    head = service.create("s", artifacts[0])
    started = time.perf_counter()
    for index in range(chain - 1):
        facts = draft(artifacts[index % 8], candidate_mean=0.5, current_mean=0.4, metrics={"loss": index / chain})
        head = service.publish("s", facts, head.release_id)
    grown = time.perf_counter() - started
    loose = fresh_listing(home / "chain")
    service.gc(dry_run=False)
    packed = fresh_listing(home / "chain")
    warm = timed(10, lambda index: service.list("s"))
    return {
        "releases": chain,
        "publish_mean_ms": round(grown / chain * 1e3, 2),
        "fresh_loose": loose,
        "fresh_packed": packed,
        "warm": warm,
    }


def fresh_listing(home: Path) -> dict[str, float]:
    rows = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", LISTING, str(home)], capture_output=True, text=True, check=True)
        rows.append([float(word) for word in done.stdout.split()])
    return {
        "wall_ms": round(min(row[1] for row in rows), 1),
        "cpu_ms": round(min(row[2] for row in rows), 1),
        "count": rows[0][0],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chain", type=int, default=1000)
    parser.add_argument("--large-mb", type=int, default=256)
    parser.add_argument("--model", type=Path, help="folder of a model for the checkpoints; absent: they are left out")
    parser.add_argument("--checkpoints", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-6, help="learning rate of the steps between checkpoints")
    parser.add_argument("--learn", type=int, default=0, help="real SAO steps on full weights; absent: none")
    parser.add_argument("--home", type=Path, help="where to work, on the disk to be measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.home, prefix="reef-bench-") as folder:
        home = Path(folder)
        result = {
            "what": "release store, everything fsynced",
            "fsync_ms": fsync_ms(home),
            "load": os.getloadavg()[0],
            **measure_steps(home),
            "large": measure_large(home, options.large_mb),
            "listing": measure_listing(home, options.chain),
            **(
                {"checkpoints": measure_checkpoints(home, options.model, options.checkpoints, options.rate)}
                if options.model
                else {}
            ),
            **({"learned": measure_learned(home, options.learn)} if options.learn else {}),
            **machine(),
        }
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
