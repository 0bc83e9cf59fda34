"""Tokens per second of the embedded engine beside transformers' own continuous batching, on the same prompts and threads.

Run: `python -m benchmarks.engine_cpu [--model DIR] [--tokens 48] [--rounds 2] [--out benchmarks/results/engine_cpu.json]`.
Each engine runs in a process of its own; rounds alternate between the two, and the best round of each counts, since
shared machines make single rounds wander. A round runs the prompts twice, for 2 tokens and for many, and counts the difference:
that leaves out the prompts and the batching manager that transformers builds per call. CPU seconds are the whole process's.
Both sample at temperature 1 and return log-probs; the embedded engine is measured without HTTP.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
BATCHES = (1, 4, 16)
Round = Callable[[list[list[int]], int], int]


def prompts(count: int) -> list[list[int]]:
    """`count` prompts of 32 tokens without a common prefix."""
    return [[(7919 * (i + 1) + 104729 * j) % 40000 + 100 for j in range(32)] for i in range(count)]


def embedded(model: str, threads: int) -> Round:
    import torch

    from reef_cli.engines.embedded.core import Core
    from reef_cli.engines.embedded.model import Model
    from reef_cli.engines.embedded.request import Progress, Request, Text, Wish
    from reef_cli.engines.embedded.sampling import parse

    def load() -> Model:
        torch.set_num_threads(threads)
        return Model(model, torch.bfloat16, 32, None, 64)

    core = Core(load, "base", max(BATCHES))
    loaded = core.start()
    decode = _decoder(model)

    def run(inputs: list[list[int]], tokens: int) -> int:
        core.call(core.flush).result()
        done = threading.Semaphore(0)

        def notify(progress: Progress) -> None:
            if progress.finish is not None:
                done.release()

        params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        requests = [
            Request(Wish(str(i), ids, parse(params, loaded.vocab_size), return_logprob=True), Text(decode, True), notify)
            for i, ids in enumerate(inputs)
        ]
        for request in requests:
            core.submit(request)
        for _ in requests:
            done.acquire()
        return sum(len(request.choices) for request in requests)

    return run


def _decoder(model: str) -> Callable[[list[int], bool], str]:
    from reef_cli.engines.chat_format import ModelChat

    return ModelChat(Path(model)).decode


def transformers(model: str, threads: int) -> Round:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    torch.set_num_threads(threads)
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="paged|sdpa").eval()
    batching = ContinuousBatchingConfig(return_logprobs=True, num_blocks=64, max_batch_tokens=512)

    def run(inputs: list[list[int]], tokens: int) -> int:
        config = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, temperature=1.0, eos_token_id=-1
        )
        done = net.generate_batch(inputs, generation_config=config, continuous_batching_config=batching, warmup=False)
        return sum(len(output.generated_tokens) for output in done.values())

    return run


def worker(kind: str, model: str, threads: int) -> None:
    """Serve rounds over stdin/stdout: `[batch, tokens]` in, `{"tokens", "wall_s", "cpu_s"}` out, one JSON per line."""
    run = {"embedded": embedded, "transformers": transformers}[kind](model, threads)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not mix with the answers
    for line in sys.stdin:
        batch, tokens = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        made = run(prompts(batch), tokens)
        result = {"tokens": made, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(result), file=out, flush=True)
    os._exit(0)  # the managers' threads have nothing to save


class Worker:
    def __init__(self, kind: str, model: str, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.engine_cpu", "--worker", kind, "--model", model, "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def round(self, batch: int, tokens: int) -> dict[str, float]:
        """Tokens, wall and CPU seconds beyond the first two tokens of every request."""
        short, long = self._run(batch, 2), self._run(batch, tokens)
        return {key: long[key] - short[key] for key in long}

    def _run(self, batch: int, tokens: int) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([batch, tokens]), file=self._process.stdin, flush=True)
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def measure(model: str, threads: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    workers = {kind: Worker(kind, model, threads) for kind in ("embedded", "transformers")}
    rows: list[dict[str, Any]] = []
    try:
        for each in workers.values():
            each.round(1, 4)
        for batch in BATCHES:
            found: dict[str, list[dict[str, float]]] = {kind: [] for kind in workers}
            for _ in range(rounds):
                for kind, each in workers.items():
                    found[kind].append(each.round(batch, tokens))
            rows += [_row(kind, batch, results) for kind, results in found.items()]
    finally:
        for each in workers.values():
            each.close()
    return rows


def _row(kind: str, batch: int, results: list[dict[str, float]]) -> dict[str, Any]:
    best = min(results, key=lambda result: result["wall_s"])
    thrifty = min(result["cpu_s"] / result["tokens"] for result in results)
    return {
        "engine": kind,
        "requests": batch,
        "tokens_per_s": round(best["tokens"] / best["wall_s"], 1),
        "cpu_s_per_1000_tokens": round(1000 * thrifty, 2),
    }


def facts() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engine_cpu.json"))
    parser.add_argument("--worker", choices=("embedded", "transformers"))
    options = parser.parse_args()
    if not options.model:
        from reef_cli.engines.models import ModelStore

        options.model = str(ModelStore().resolve("smollm2-135m-instruct"))
    if options.worker:
        worker(options.worker, options.model, options.threads)
        return
    result = {
        "machine": facts(),
        "settings": {
            "model": Path(options.model).name,
            "tokens": options.tokens,
            "threads": options.threads,
            "dtype": "bfloat16",
        },
        "rows": measure(options.model, options.threads, options.tokens, options.rounds),
    }
    print(f"{'engine':<14}{'requests':>9}{'tokens/s':>10}{'CPU s per 1000 tokens':>24}")
    for row in result["rows"]:
        print(f"{row['engine']:<14}{row['requests']:>9}{row['tokens_per_s']:>10}{row['cpu_s_per_1000_tokens']:>24}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
