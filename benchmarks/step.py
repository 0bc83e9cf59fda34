"""A trainer's step with samples padded beside each other and packed behind each other: tokens a second, and the same loss.

Samples of mixed lengths (log-normal, as agents' turns are) in the batch's order, LoRA on the default model, no critic. Each way
takes `--repeats` steps after one that is not counted; all from the same state.

    python -m benchmarks.step
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gate import machine
from reef_cli.config.paths import cache_at
from reef_cli.config.schema import TrainerSettings
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Sample, TokenSpan, TokenTrace
from reef_cli.engines.models import ModelStore


def samples(count: int, seed: int) -> list[Sample]:
    """Prompts of about 60 and answers of about 40 tokens, some several times as long."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        prompt, answer = (min(400, max(4, round(dice.lognormvariate(mean, 0.9)))) for mean in (4.1, 3.7))
        ids = [[dice.randrange(100, 40_000) for _ in range(size)] for size in (prompt, answer)]
        tokens = TokenTrace(tuple(ids[0]), tuple(ids[1]), (-8.0,) * answer, (1,) * answer, (TokenSpan("base", 0, answer),))
        made.append(Sample(RecordId(str(number)), (), tokens, float(number % 2), ("base",), 0, 0.0))
    return made


def measure(settings: TrainerSettings, model: Path, batch: Sequence[Sample], repeats: int) -> dict[str, Any]:
    from recipes.sao.recipe import SAORecipe, SAOSettings
    from reef_cli.trainer.learner import Learner

    program = SAORecipe(SAOSettings(use_critic=False, critic_only_steps=0, min_ess=0.0, max_masked=1.0)).program()
    learner = Learner(model, program.path, program.settings, settings)
    seconds, losses = [], []
    for _ in range(repeats + 1):
        learner.ensure(None, None)
        started = time.perf_counter()
        losses.append(learner.step(batch).metrics["policy_loss"])
        seconds.append(time.perf_counter() - started)
    tokens = sum(len(sample.tokens.prompt_ids) + len(sample.tokens.output_ids) for sample in batch)
    micros = learner._batch(batch).micros
    return {
        "seconds": [round(each, 3) for each in seconds[1:]],
        "tokens_per_s": round(tokens / statistics.median(seconds[1:]), 1),
        "loss": losses[0],
        "passes": len(micros),
        "padding_share": round(1 - tokens / sum(micro.input_ids.numel() for micro in micros), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--pack-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step.json"))
    options = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    import torch

    from reef_cli.trainer.process import join_alone

    torch.set_num_threads(options.threads)
    join_alone(options.threads)
    model = ModelStore(cache_at({})).resolve("smollm2-135m-instruct")
    plain = TrainerSettings(device="cpu", threads=options.threads, micro_batch=8)
    batch = samples(options.samples, 0)
    ways = {
        "padded": plain,
        "packed": replace(plain, pack_tokens=options.pack_tokens),
        "padded_checkpointed": replace(plain, gradient_checkpointing=True),
    }
    rows = {name: measure(settings, model, batch, options.repeats) for name, settings in ways.items()}
    print(json.dumps(rows, indent=1))
    found = {"machine": machine(), "load_before": load, "samples": len(batch), "pack_tokens": options.pack_tokens, "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
