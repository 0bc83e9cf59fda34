"""`reef demo` as it is, seed by seed: held-out scores before, after and after the rollback, and the curve of its steps.

python benchmarks/demo.py --recipe openclawrl --seeds 0 1 2
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sao_cpu import machine
from reef_cli.demo.run import play
from reef_cli.demo.scenes import SCENES, scene
from reef_cli.demo.show import Show

RESULTS = Path(__file__).parent / "results" / "demo.json"


def run(recipe: str, seed: int, steps: int | None) -> dict[str, Any]:
    chosen = scene(recipe)
    show = Show(curve=chosen.curve, share=chosen.share)
    try:
        with tempfile.TemporaryDirectory(prefix="reef-bench-demo-", ignore_cleanup_errors=True) as home:
            result = play(Path(home), show, chosen, steps=steps, seed=seed, overrides={"trainer.seed": str(seed)})
    finally:
        show.close()
    return {"recipe": recipe, "seed": seed, **asdict(result), "machine": machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="openclawrl", choices=SCENES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(args.json.read_text())["runs"] if args.json.exists() else []
    for seed in args.seeds:
        done = run(args.recipe, seed, args.steps)
        runs = [one for one in runs if (one["recipe"], one["seed"]) != (args.recipe, seed)] + [done]
        runs.sort(key=lambda one: (one["recipe"], one["seed"]))
        args.json.parent.mkdir(exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
        print(f"{args.recipe} seed {seed}: {done['before']:.2f}, {done['after']:.2f}, {done['rolled_back']:.2f}", flush=True)


if __name__ == "__main__":
    main()
