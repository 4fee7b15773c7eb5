"""How costs grow with the length of a conversation, and with what a run has gathered.

Each axis doubles one kind of work, and has a bound for the exponent of its costs: 1.1 for what is written or held once,
1.15 for the time of a conversation (a turn costs a power of 0.15), 0.2 where only a little has changed. Exponents are
fits to the three largest sizes. Times are CPU time, the least of several rounds in forked children; memory is the peak
of Python's allocations; "rendered" (characters that pass through the tokenizer), "written", "on disk", "sent" and
"characters" are counts, equal in each run. The exit code is 1 if an exponent, or the bound of a count, does not hold. A
time alone fails nothing, and an exponent of times only if it is too large in three times as many rounds.
``--quick`` has smaller sizes, for CI.

    python bench/bench_growth.py
    python bench/bench_growth.py --quick
    python bench/bench_growth.py --axis gateway "State.diff"
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import growth_chats
import growth_stores
from common import arguments, finishing
from growth import CPU, MEMORY, Axis, exponent, measure
from growth_stores import COMMAND

AXES = {axis.name: axis for axis in (*growth_chats.AXES, *growth_stores.AXES)}
ROUNDS, QUICK_ROUNDS = 5, 2
UNITS = {
    CPU: (1e3, "CPU ms"),
    MEMORY: (1e-6, "memory MB"),
    "on disk": (1e-6, "MB on disk"),
    "written": (1e-6, "MB written"),
}


def rows_of(axis: Axis, sizes: Sequence[int], found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each bound of ``axis``: its cost at the smallest and the largest size, and the exponent."""
    rows = []
    for name, bound in {**axis.bounds, **axis.most}.items():
        scale, cost = UNITS.get(name, (1.0, name))
        least, most = scale * found[name][0], scale * found[name][-1]
        grows = exponent(sizes, found[name]) if name in axis.bounds else None
        rows.append(
            {
                "method": "turnwise",
                "axis": axis.name,
                "cost": cost,
                "sizes": f"{sizes[0]} to {sizes[-1]} {axis.unit}",
                "smallest": least,
                "largest": most,
                "exponent": grows,
                "bound": f"{'' if grows is not None else 'largest '}≤ {bound:g}",
                "met": "yes" if (most if grows is None else grows) <= bound else "NO",
            }
        )
    return rows


def run(options: argparse.Namespace) -> int:
    rounds = min(options.rounds, QUICK_ROUNDS if options.quick else ROUNDS)
    with finishing("growth", "How costs grow", options) as rows:
        for name in options.axis:
            axis, began = AXES[name], time.perf_counter()
            sizes = axis.small if options.quick else axis.sizes
            rows += rows_of(axis, sizes, measure(axis, sizes, rounds))
            met = ", ".join(row["met"] for row in rows if row["axis"] == name)
            print(f"{name}: {met} ({time.perf_counter() - began:.0f} s)", file=sys.stderr, flush=True)
    missed = [row for row in rows if row["met"] == "NO" and row["cost"] != COMMAND]
    for row in missed:
        figure = row["largest"] if row["exponent"] is None else row["exponent"]
        print(f"{row['axis']}, {row['cost']}: expected {row['bound']}, got {figure:.2f}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, axis=list(AXES))))
