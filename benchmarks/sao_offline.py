"""SAO without a server: sample with transformers, score with a grader, train with the recipe's own program in this process.

Shows the learning curve of the shipped suite (or another one) and what a step costs. Nothing of the gateway, the log or the
release chain is involved, so a curve here says that the method and its settings learn; the end-to-end claim is tested
elsewhere.

    python benchmarks/sao_offline.py --model ~/models/smollm2 --steps 30 --seed 0
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from reef_cli.evaluation.graders import build

SUITE = Path(__file__).resolve().parent.parent / "recipes/sao/examples/sao/suite.jsonl"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=os.environ.get("REEF_TEST_MODEL"), help="model folder")
    parser.add_argument("--suite", type=Path, default=SUITE)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--eval-limit", type=int, default=32)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a setting of the recipe")
    parser.add_argument("--state", type=Path, help="folder to resume from, and to keep the state in at the end")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--json", type=Path, help="write the curve here")
    return parser.parse_args()


def grade(spec: Mapping[str, Any], text: str, finished: bool) -> float:
    """The suite's own grader; an answer cut off at the token limit is worth nothing."""
    return build(spec).grade(text).score if finished else 0.0


class Offline:
    """A model, its program, and a sampler over the same weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoTokenizer

        from recipes.sao.recipe import SAORecipe, SAOSettings
        from reef_cli.config.schema import TrainerSettings
        from reef_cli.trainer.learner import Learner
        from reef_cli.trainer.process import join_alone

        torch.manual_seed(args.seed)
        torch.set_num_threads(args.threads)
        join_alone()
        overrides = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in args.set)}
        spec = SAORecipe(SAOSettings(**overrides)).program()
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.learner = Learner(
            args.model,
            spec.path,
            spec.settings,
            TrainerSettings(rank=args.rank, micro_batch=8, threads=args.threads),
            args.seed,
        )
        self.max_new_tokens = args.max_new_tokens

    def resume(self, folder: Path) -> list[dict[str, Any]]:
        """The curve so far; the model and the program's state are put back."""
        if not (folder / "curve.json").exists():
            return []
        self.learner.ensure(None, folder / "checkpoint")
        curve: list[dict[str, Any]] = json.loads((folder / "curve.json").read_text())
        return curve

    def keep(self, folder: Path, curve: Sequence[Mapping[str, Any]]) -> None:
        self.learner.write("offline", folder)
        (folder / "curve.json").write_text(json.dumps(curve))

    def prompt(self, item: Mapping[str, Any]) -> list[int]:
        ids = self.tokenizer.apply_chat_template(item["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
        return [int(token) for token in ids]

    def sample(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[tuple[list[int], list[float], bool]]:
        """Output ids, their log-probs and whether the answer ended by itself."""
        import torch

        model = self.learner.actor.causal
        eos = int(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        width = max(map(len, prompts))
        ids = torch.tensor([[eos] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=self.max_new_tokens, pad_token_id=eos, eos_token_id=eos,
            return_dict_in_generate=True, output_logits=True, use_cache=True, **how,
        )  # fmt: skip
        new = out.sequences[:, width:]
        logprobs = torch.stack([step.float() / (temperature or 1.0) for step in out.logits], 1).log_softmax(-1)
        logprobs = logprobs.gather(-1, new.unsqueeze(-1)).squeeze(-1)
        answers = []
        for row, lp in zip(new.tolist(), logprobs.tolist(), strict=True):
            finished = eos in row
            length = row.index(eos) + 1 if finished else len(row)
            answers.append((row[:length], lp[:length], finished))
        return answers

    def scores(self, items: Sequence[Mapping[str, Any]], answers: Sequence[tuple[list[int], list[float], bool]]) -> list[float]:
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids, _, _ in answers]
        return [grade(item["grader"], text, done) for item, text, (_, _, done) in zip(items, texts, answers, strict=True)]

    def evaluate(self, items: Sequence[Mapping[str, Any]], temperature: float) -> float:
        found: list[float] = []
        for start in range(0, len(items), 32):
            part = items[start : start + 32]
            found += self.scores(part, self.sample([self.prompt(item) for item in part], temperature))
        return sum(found) / len(found)


def main() -> None:
    args = arguments()
    items = [json.loads(line) for line in args.suite.read_text().splitlines() if line]
    train = [item for item in items if item["split"] == "development"]
    held = [item for item in items if item["split"] == "heldout"][: args.eval_limit]
    lab = Offline(args)
    curve = lab.resume(args.state) if args.state else []
    deadline = time.monotonic() + args.seconds
    for step in range(len(curve), args.steps + 1):
        row: dict[str, Any] = {"step": step}
        if step % args.eval_every == 0:
            row |= {"heldout_t1": lab.evaluate(held, 1.0), "heldout_greedy": lab.evaluate(held, 0.0)}
        if step < args.steps:
            row |= one_step(lab, random.Random(f"{args.seed}/{step}").choices(train, k=args.batch_size), step)
        curve.append(row)
        print(
            *(f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()), flush=True
        )
        if time.monotonic() > deadline:
            break
    if args.state:
        lab.keep(args.state, curve)
    for item in held[:6]:
        print(item["messages"][-1]["content"], "->", lab.tokenizer.decode(lab.sample([lab.prompt(item)], 0.0)[0][0]))
    if args.json:
        args.json.write_text(json.dumps(curve, indent=1))


def one_step(lab: Offline, items: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
    from reef_cli.core.ids import RecordId
    from reef_cli.core.types import Sample, TokenSpan, TokenTrace

    started = time.perf_counter()
    prompts = [lab.prompt(item) for item in items]
    answers = lab.sample(prompts, 1.0)
    rewards = lab.scores(items, answers)
    generated = time.perf_counter()
    samples = []
    for i, (prompt, (ids, logprobs, _), reward) in enumerate(zip(prompts, answers, rewards, strict=True)):
        trace = TokenTrace(tuple(prompt), tuple(ids), tuple(logprobs), (1,) * len(ids), (TokenSpan("v", 0, len(ids)),))
        samples.append(Sample(RecordId(f"{step}-{i}"), (), trace, reward, ("v",), step, 0.0))
    report = lab.learner.step(samples, base_step=step)
    keys = ("entropy", "k3", "masked_share", "logprob_gap_lag0", "explained_variance", "value_mean", "grad_norm", "skipped")
    shown = {key: report.metrics[key] for key in keys if report.metrics.get(key) is not None}
    return {
        "reward": sum(rewards) / len(rewards),
        "tokens": sum(len(ids) for ids, _, _ in answers) / len(answers),
        **shown,
        "gen_s": generated - started,
        "train_s": time.perf_counter() - generated,
    }


if __name__ == "__main__":
    main()
