"""The long tail of a step: ``rollout.oversample`` on a virtual clock, with log-normal lengths.

A step of 32 groups of 8 episodes waits for the longest of 256 answers. With ``oversample`` a step begins once 32 of
more groups are whole, and the others train by a later step. The loop, the queue and the arena are the real ones; the
durations are modelled (``simulate.py``), so the machine does not matter and each run gives the same numbers.

A row has the step time at its median and 95th percentile, and what trains: the mean length, and the mean of a reward
that is 1 for an answer longer than the model's median. The first and the last two steps are left out, where a queue
fills and empties; over whole runs the trained rollouts are the same. The last row cuts what is not whole, as other
trainers do: the groups that it never trains are the long ones. turnwise doesn't offer that.

The case "queue" limits the calls at the same time to what the engine has room for (96 slots for 128 episodes of four
turns; 192 and 1024 are no limit), so that calls wait in the arena, older episodes first, and not in the engine's queue.

    python bench/bench_long_tail.py
"""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from random import Random
from typing import Any

from common import arguments, finish
from simulate import LatencyModel, simulate

from turnwise.train.config.sampling import LoopConfig

CASES = [(0, 1.0), (1, 1.0), (1, 1.25), (1, 1.5), (1, 2.0), (2, 1.0), (2, 1.25), (2, 2.0), (2, 3.0)]
EDGE = 2
"""Steps at each end that a row leaves out."""


def interval(values: Sequence[float]) -> str:
    """Return the mean of ``values``, one for each step, with its 95% interval."""
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.3g} ± {half:.2g}"


def row(
    name: str, seconds: Sequence[float], lengths: Sequence[Sequence[int]], median: int, **more: Any
) -> dict[str, Any]:
    seconds, lengths = seconds[EDGE:-EDGE], lengths[EDGE:-EDGE]
    times = statistics.quantiles(seconds, n=20)
    return {
        "method": name,
        "step p50 s": times[9],
        "step p95 s": times[18],
        "tokens/s": sum(map(sum, lengths)) / sum(seconds),
        "mean length": interval([statistics.mean(step) for step in lengths]),
        "reward": interval([statistics.mean(count > median for count in step) for step in lengths]),
        **more,
    }


def cut(latency: LatencyModel, groups: int, copies: int, oversample: float, steps: int) -> dict[str, Any]:
    """Begin each step with the groups that are whole first, and never train the others."""
    random, seconds, lengths = Random(0), [], []
    for _ in range(steps):
        drawn = [
            [latency.draw_tokens(random.getrandbits(63)) for _ in range(copies)]
            for _ in range(math.ceil(oversample * groups))
        ]
        kept = sorted(drawn, key=max)[:groups]
        seconds.append(latency.prefill + max(map(max, kept)) * latency.per_token + latency.update + latency.publish)
        lengths.append([count for group in kept for count in group])
    return row(f"cut at {oversample:g}", seconds, lengths, latency.tokens)


def clock_rows(options: Namespace) -> list[dict[str, Any]]:
    latency = LatencyModel(tokens=512, sigma=0.8, max_tokens=8192, slots=4096, update=10.0, publish=1.0)
    rows = []
    for ahead, oversample in CASES[:3] if options.quick else CASES:
        loop = LoopConfig(max_staleness=ahead, in_flight_updates=ahead > 0)
        run = simulate(
            latency,
            loop,
            steps=options.steps,
            episodes=options.groups * options.copies,
            copies=options.copies,
            oversample=oversample,
            max_concurrency=latency.slots,
        )
        lags = {"staleness": f"{run.staleness_mean:.2f}", "most": run.staleness_max, "stale rows": run.dropped_stale}
        name = f"turnwise, max_staleness {ahead}, oversample {oversample:g}"
        rows.append(row(name, run.step_seconds, run.lengths, latency.tokens, **lags))
    rows.append(cut(latency, options.groups, options.copies, 1.25, options.steps))
    return rows


def queue_rows() -> list[dict[str, Any]]:
    latency = LatencyModel(tokens=128, sigma=0.8, max_tokens=4096, slots=96, update=10.0, publish=1.0)
    rows = []
    for ahead, oversample in ((0, 1.0), (1, 1.0), (2, 1.25)):
        for limit in (96, 106, 192, 1024):
            loop = LoopConfig(max_staleness=ahead, in_flight_updates=ahead > 0)
            sizes = {"steps": 44, "episodes": 128, "copies": 8, "turns": 4, "max_concurrency": limit}
            run = simulate(latency, loop, oversample=oversample, **sizes)
            name = f"turnwise, max_staleness {ahead}, oversample {oversample:g}, max_concurrency {limit}"
            rows.append(row(name, run.step_seconds, run.lengths, 4 * latency.tokens, busy=run.slots_busy))
    return rows


def main() -> None:
    options = arguments(__doc__, {"steps": 104, "groups": 32, "copies": 8}, case=("clock", "queue"))
    if options.quick:
        options.case = ["clock"]
        options.steps, options.groups, options.copies = 8, 4, 2
    if "clock" in options.case:
        finish("long_tail", "The long tail of a step, on a virtual clock", clock_rows(options), options)
    if "queue" in options.case:
        finish("long_tail", "Limits that follow the engine's queue", queue_rows(), options)


if __name__ == "__main__":
    main()
