"""One GPU: a trainer's steps (LoRA and all weights), and pushes over what one GPU allows; figures as JSON.

NCCL takes no two ranks on one GPU, so it is tried with our group alone, without an engine. What is pushed to a real engine goes
over gloo and from disk (the engine is the embedded one, on the CPU) and as `trainer.transport: ipc` sends it: as handles of the
GPU's memory, which a second process opens as SGLang does and copies. Every weight that arrives is compared by its digest.
`--device cpu` is the same without a GPU: gloo in place of NCCL, the bytes themselves in place of handles.

    python -m benchmarks.gpu                                   # on the GPU, under two minutes with the default model
    python -m benchmarks.gpu --device cpu --samples 4 --repeats 1
"""

import argparse
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gate import machine
from benchmarks.step import measure, samples
from reef_cli.config.paths import cache_at
from reef_cli.config.schema import EngineSettings, TrainerSettings
from reef_cli.engines import launch
from reef_cli.engines.models import ModelStore
from reef_cli.trainer.carriers import tensor_parallel
from reef_cli.trainer.http import EngineHttp
from reef_cli.trainer.process import join_alone
from reef_cli.trainer.protocol import Push
from reef_cli.trainer.push import Pusher
from reef_cli.trainer.weightfiles import whole_weights
from reef_cli.weights.group import close_group, free_port, listen, make_group
from reef_cli.weights.handles import deserialize, serialize

READY_S = 200.0


def steps(model: Path, device: Any, count: int, repeats: int) -> dict[str, Any]:
    """Tokens a second and the loss of a LoRA step and of one of all weights; on a GPU the most memory each took."""
    batch, found = samples(count, 0), {}
    for method in ("lora", "full"):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        settings = TrainerSettings(device=device, method=method, micro_batch=8)
        found[method] = measure(settings, model, batch, repeats)
        if device == "cuda":
            found[method]["peak_gpu_mb"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
    return found


def pushes(model: Path, device: str) -> dict[str, Any]:
    """All weights to the embedded engine; first other ones, so that what arrives is seen."""
    pusher = Pusher(model, torch.device(device))
    found = {}
    with tempfile.TemporaryDirectory(prefix="reef-gpu-") as scratch, _engine(model, Path(scratch)) as engine:
        own = _checksum(engine)
        other = _other(model, Path(scratch) / "other")
        keys = (engine.key, engine.read_key)
        try:
            # The embedded engine takes bytes, no handles: those are `handles` below.
            for transport in ("group", "disk") if device == "cuda" else ("group", "ipc", "disk"):
                for folder, label in ((other, "other"), (model, "own")):
                    engine.post("/pause_generation", {"mode": "retract"}, 30.0)
                    found[transport] = dict(pusher.push(Push("s", str(folder), label, engine.url, *keys, transport)))
                    engine.post("/continue_generation", {"torch_empty_cache": False}, 30.0)
                    if (_checksum(engine) == own) != (label == "own"):
                        raise RuntimeError(f"the engine does not run the weights that {transport} brought")
        finally:
            pusher.close()
    return found


def handles(model: Path, device: str) -> dict[str, Any]:
    """All weights for a second process on the same GPU, as the ipc transport writes them down."""
    named = [(name, tensor.to(device)) for name, tensor in whole_weights(model)]
    started = time.perf_counter()
    payload = serialize(named)
    written = time.perf_counter()
    reader = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--reader", device], input=payload, capture_output=True, text=True, check=False
    )
    if reader.returncode != 0:
        raise RuntimeError(f"the second process failed: {reader.stderr[-2000:]}")
    told = json.loads(reader.stdout.splitlines()[-1])
    if told.pop("digest") != _digest(named):
        raise RuntimeError("the second process found other weights")
    return {"write_s": round(written - started, 4), "payload_bytes": len(payload), "bytes": _size(named), **told}


def read(device: str) -> None:
    """The second process: open, copy, say what there is."""
    payload = sys.stdin.read()
    if device == "cuda":
        torch.cuda.init()
    started = time.perf_counter()
    # As SGLang reads it, with the GPU named by its UUID; ours builds CPU tensors only.
    named = _with_uuids(payload) if device == "cuda" else deserialize(payload)
    own = [(name, tensor.clone()) for name, tensor in named]
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    print(json.dumps({"read_s": round(seconds, 4), "digest": _digest(own)}))


def _with_uuids(payload: str) -> Any:
    from torch.multiprocessing import reductions

    rebuild, place = reductions.rebuild_cuda_tensor, 6
    by_uuid = {str(torch.cuda.get_device_properties(number).uuid): number for number in range(torch.cuda.device_count())}

    def here(*arguments: Any) -> Any:
        number = by_uuid.get(arguments[place], arguments[place])
        return rebuild(*arguments[:place], number, *arguments[place + 1 :])  # type: ignore[no-untyped-call]

    reductions.rebuild_cuda_tensor = here
    return pickle.loads(b64decode(payload))  # our own parent wrote it


def alone(model: Path, device: str) -> dict[str, Any]:
    """Our process group without an engine: NCCL on a GPU, a broadcast of as many bytes as the weights have."""
    backend = "nccl" if device == "cuda" else "gloo"
    store = listen("127.0.0.1", 1)
    group = make_group("127.0.0.1", store.port, 1, 0, "reef-alone", backend, 60.0, store)
    try:
        flat = torch.zeros(sum(file.stat().st_size for file in model.glob("*.safetensors")), dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            dist.broadcast(flat, group_src=0, group=group)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(round(time.perf_counter() - started, 4))
    finally:
        close_group(group)
    return {"backend": backend, "bytes": flat.numel(), "broadcast_s": seconds}


@contextmanager
def _engine(model: Path, folder: Path) -> Iterator[EngineHttp]:
    """An embedded engine of our own, as `reef serve` starts it."""
    made = launch.embedded(EngineSettings(), model, free_port(), folder / "engine.log")
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(
            made.command, stdout=log, stderr=log, env=os.environ | dict(made.env), start_new_session=True
        )
    engine = EngineHttp(made.url, made.admin_key, made.api_key)
    try:
        _until(lambda: tensor_parallel(engine) > 0, process, folder / "engine.log")
        yield engine
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


def _until(ready: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            if ready():
                return
        except Exception as error:  # whatever a starting server answers
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the engine did not start: {log.read_text()[-2000:]}") from error
            time.sleep(0.3)


def _other(model: Path, folder: Path) -> Path:
    """A checkpoint whose every weight differs."""
    from safetensors.torch import save_file

    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    save_file({name: tensor * 0.5 for name, tensor in whole_weights(model)}, str(folder / "model.safetensors"))
    return folder


def _checksum(engine: EngineHttp) -> str:
    return str(engine.post("/weights_checker", {"action": "checksum", "selector": "all"}, 60.0)["per_engine_checksum"])


def _digest(named: Any) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        whole.update(name.encode() + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def _size(named: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reader", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu.json on a GPU, else only printed")
    options = parser.parse_args()
    if options.reader:
        return read(options.reader)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    model, load = ModelStore(cache_at({})).resolve(options.model), round(os.getloadavg()[0], 2)
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    join_alone(threads, cuda=device == "cuda")
    found = {
        "machine": machine(),
        "load_before": load,
        "device": device,
        "torch": torch.__version__,
        "samples": options.samples,
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    for part, run in (
        ("steps", lambda: steps(model, device, options.samples, options.repeats)),
        ("pushes", lambda: pushes(model, device)),
        ("handles", lambda: handles(model, device)),
        ("alone", lambda: alone(model, device)),
    ):
        try:
            found[part] = run()
        except Exception as error:  # one part that fails must not cost the figures of the others
            found[part] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({part: found[part]}, indent=1), flush=True)
    out = options.out or (Path("benchmarks/results/gpu.json") if device == "cuda" else None)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    failed = [part for part in ("steps", "pushes", "handles", "alone") if "failed" in found[part]]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
