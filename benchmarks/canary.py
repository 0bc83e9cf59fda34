"""A canary's error rates and power by simulation: how often equal releases are told apart, how many sessions it takes else.

Run: `python -m benchmarks.canary [--runs 2000] [--out benchmarks/results/canary.json]`. Each session goes to the canary with
the chance of its share and brings one reward; the comparison looks after every session and stops when it says anything, as the
server does. Rewards are 0 or 1, or spread over [0, 1]; in some rows the rates of both sides swing together. Fixed seeds.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gate import machine
from reef_cli.evaluation.live import LiveTally

ALPHA = 0.05
HORIZON = 2000
SWING = 0.3
SWING_EVERY = 100


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: shares of runs that end in each result within the horizon, and the median sessions of those that ended."""

    rewards: str
    share: float
    current: float
    canary: float
    swing: bool
    promoted: float
    returned: float
    open: float
    median_sessions: int | None


def reward(draw: random.Random, rewards: str, rate: float) -> float:
    if rewards == "binary":
        return float(draw.random() < rate)
    return draw.betavariate(4 * rate, 4 * (1 - rate))


def one_run(
    draw: random.Random, rewards: str, share: float, rates: tuple[float, float], swing: bool, horizon: int
) -> tuple[str, int]:
    live = LiveTally(ALPHA)
    for number in range(1, horizon + 1):
        candidate = draw.random() < share
        shift = 0.0 if not swing else SWING if number // SWING_EVERY % 2 else -SWING
        rate = min(max(rates[candidate] + shift, 0.02), 0.98)
        blocks = len(live.tally.values)
        live.add(candidate=candidate, reward=reward(draw, rewards, rate))
        if len(live.tally.values) == blocks:
            continue
        if live.better or live.worse:
            return "better" if live.better else "worse", number
    return "open", horizon


def simulate(rewards: str, share: float, rates: tuple[float, float], swing: bool, runs: int, horizon: int) -> Row:
    draw = random.Random(f"{rewards} {share} {rates} {swing}")
    found = [one_run(draw, rewards, share, rates, swing, horizon) for _ in range(runs)]
    ended = sorted(count for result, count in found if result != "open")
    shares = [sum(result == name for result, _ in found) / runs for name in ("better", "worse", "open")]
    return Row(rewards, share, rates[0], rates[1], swing, *shares, ended[len(ended) // 2] if ended else None)


def cells() -> list[tuple[str, float, tuple[float, float], bool]]:
    """Equal releases in every setting; then differences of 5, 10 and 20 points both ways, and broken canaries."""
    equal = [
        (kind, share, (rate, rate), False) for kind in ("binary", "spread") for share in (0.05, 0.1, 0.5) for rate in (0.5, 0.9)
    ]
    equal += [("binary", share, (0.5, 0.5), True) for share in (0.1, 0.5)]
    apart = [
        ("binary", share, (0.6, 0.6 + effect), False) for share in (0.1, 0.5) for effect in (-0.2, -0.1, -0.05, 0.05, 0.1, 0.2)
    ]
    broken = [("binary", share, (0.8, 0.1), False) for share in (0.05, 0.1, 0.5)]
    return equal + apart + broken


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--horizon", type=int, default=HORIZON)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    rows = [simulate(*cell, options.runs, options.horizon) for cell in cells()]
    for row in rows:
        print(
            f"{row.rewards:>6}  share {row.share:.2f}  {row.current:.2f} against {row.canary:.2f}{'  swinging' * row.swing}"
            f"  promoted {row.promoted:6.3f}  returned {row.returned:6.3f}  median sessions {row.median_sessions}"
        )
    equal = [row for row in rows if row.current == row.canary]
    false = {"promoted": max(row.promoted for row in equal), "returned": max(row.returned for row in equal)}
    print(f"equal releases: promoted at most {false['promoted']:.3f}, taken back at most {false['returned']:.3f} (bar {ALPHA})")
    result = {
        "what": f"canary on live reports, alpha {ALPHA}, looked at after every session",
        "runs": options.runs,
        "horizon_sessions": options.horizon,
        "false_max": false,
        "rows": [asdict(row) for row in rows],
        "seconds": round(time.perf_counter() - started, 1),
        **machine(),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if max(false.values()) > ALPHA:
        raise SystemExit(f"an error rate is above {ALPHA}: {false}")


if __name__ == "__main__":
    main()
