"""Rows with shared prefixes: training steps over their trie, padded, packed and by PrefixGrouper.

It first verifies that the gradients are equal. Then it times whole steps (forward, loss, backward, clipping, AdamW) in
turns. "padded" is plain PyTorch, as in TRL: padded rows, logits of the completions. "packed" is our stream with
separate rows. "prefix_grouper" is the package of that name: each prompt once for its siblings, all in one pass, with
our head on the completions. "turnwise trie" is what `sequence_layout = "auto"` uses if rows share enough. "ideal" is
tokens over unique tokens. "peak MB" is the memory that a new process needs above the loaded model in its first two
steps. Below 1,000 and from 20,000 tokens on the model has one layer instead of four; from 20,000 on memory is not
measured.

    python bench/bench_trie.py                       # the cases with goals, and one of 4 turns
    python bench/bench_trie.py --prompt 256 --turns 1 2 --shared yes   # all that these make, with every other option
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from common import arguments, finish, peer
from train_cases import Trained, peak_of_two_steps, seconds_per_step
from trie_cases import LARGE, Case, make_batch, make_trained, unique_tokens

from turnwise.train.model.prefix_tree import PrefixTree

TOLERANCE = 1e-4  # of the gradient's norm
GRID: dict[str, tuple[Any, ...]] = {
    "prompt": (256, 1024, 4096),
    "completion": (32, 128, 512),
    "siblings": (4, 8, 16),
    "turns": (1, 2, 4),
    "shared": ("yes", "no"),
}
QUICK = Case(64, 16, 4, 2)
MAIN, LONG, APART = Case(1024, 128, 8, 1), Case(4096, 128, 16, 1), Case(1024, 128, 4, 1, "no")
CASES = [MAIN, LONG, APART, Case(256, 32, 4, 4)]
LEAST_SPEED = {MAIN: 3.4, LONG: 9.0}  # × padded's, and × packed's
MAX_MEMORY = 0.4  # of padded's, in the first
MAX_TIME = 1.05  # of packed's, where nothing is shared
MAX_SECONDS = 1.0  # for the trie of 10,000 rows of 2,000 tokens


def methods_of(case: Case) -> list[str]:
    """Return the methods for ``case``: PrefixGrouper only if it is installed, and only ours if rows share nothing."""
    if case.shared == "no":
        return ["packed", "turnwise trie", "turnwise auto"]
    names = ["padded", "packed", "prefix_grouper", "turnwise trie"]
    return [name for name in names if name != "prefix_grouper" or peer(name) is not None]


def verify(case: Case, trained: dict[str, Trained]) -> None:
    """Stop the bench unless all methods have the same gradient."""
    expected: torch.Tensor | None = None
    for name, one in trained.items():
        found = one.gradient()
        expected = found if expected is None else expected
        off = float((found - expected).norm() / expected.norm())
        assert off < TOLERANCE, f"{name}, {case}: the gradient is off by {off:.3g} of its norm"


def measure(case: Case, rounds: int, threads: int) -> list[dict[str, Any]]:
    names, large = methods_of(case), case.tokens >= LARGE
    trained = {name: make_trained(name, case) for name in names}
    verify(case, trained)
    seconds = seconds_per_step(trained, 1 if large else rounds, warm=0 if large else 1)  # `verify` has warmed it up
    del trained
    weighed = [] if large else names[-1:] if case == QUICK else names  # a process each
    peaks = {name: peak_of_two_steps(make_trained, name, case, threads) for name in weighed}
    unique = unique_tokens(make_batch(case))
    return [
        {
            **{key: getattr(case, key) for key in GRID},
            "layers": case.layers,
            "tokens": case.tokens,
            "ideal": case.tokens / unique,
            "method": name,
            "s per step": seconds[name],
            **{f"× {other}": ratio(seconds, other, name) for other in ("padded", "packed", "prefix_grouper")},
            "peak MB": peaks[name] / 1e6 if peaks.get(name) else None,
            "× padded's memory": ratio(peaks, name, "padded"),
        }
        for name in names
    ]


def ratio(values: Mapping[str, float | None], above: str, below: str) -> float | None:
    first, second = values.get(above), values.get(below)
    return first / second if first and second else None


def build(quick: bool) -> dict[str, Any]:
    """Time the best of three builds of a trie, whose families of 16 rows share three quarters of their tokens."""
    rows, length = (160, 200) if quick else (10_000, 2_000)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (rows, length))
    for first in range(0, rows, 16):
        tokens[first : first + 16, : length * 3 // 4] = tokens[first, : length * 3 // 4]
    stream, cuts = tokens.ravel(), np.arange(rows + 1) * length
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        trie = PrefixTree(stream, cuts)
        taken.append(time.perf_counter() - start)
    assert len(trie) == rows * length - (rows - rows // 16) * (length * 3 // 4), "every shared token stands once"
    return {
        "method": "turnwise PrefixTree",
        "rows": rows,
        "tokens": rows * length,
        "unique": len(trie),
        "s": min(taken),
    }


def goals(rows: list[dict[str, Any]], built: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per goal whose case was run."""
    found: list[dict[str, Any]] = []

    def add(case: str, method: str, goal: str, figure: float | None, least: float | None, most: float | None) -> None:
        if figure is None:
            return
        met = figure >= least if least is not None else most is not None and figure <= most
        wanted = f"≥ {least}" if least is not None else f"≤ {most}"
        row = {"case": case, "method": method, "goal": goal, "figure": figure, "wanted": wanted}
        found.append({**row, "met": "yes" if met else "NO"})

    for row in rows:
        case, method = Case(*(row[key] for key in GRID)), row["method"]
        apart = "" if case.shared == "yes" else ", nothing shared"
        name = f"{case.prompt} + {case.completion}, {case.siblings} rows{apart}"
        if case in LEAST_SPEED and method == "turnwise trie":
            for other in ("× padded", "× packed"):
                add(name, method, f"{other}'s speed", row[other], LEAST_SPEED[case], None)
        if case == MAIN and method == "turnwise trie":
            add(name, method, "× padded's memory", row["× padded's memory"], None, MAX_MEMORY)
        if case == APART and method != "packed" and row["× packed"]:
            add(name, method, "× packed's time", 1 / row["× packed"], None, MAX_TIME)
    if built["rows"] == 10_000:
        add("a trie of 10,000 rows of 2,000 tokens", built["method"], "s", built["s"], None, MAX_SECONDS)
    return found


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the cases with goals and one more; if options are given, all their combinations."""
    if options.quick:
        return [QUICK]
    if all(tuple(getattr(options, key)) == values for key, values in GRID.items()):
        return CASES
    cases = [Case(*values) for values in product(*(getattr(options, key) for key in GRID))]
    return [case for case in cases if case.shared == "yes" or case.turns == 1]


def main() -> None:
    options = arguments(__doc__, **GRID)
    options.device = "cpu"  # on a GPU attention over a trie has not been tried yet
    built = build(options.quick)
    finish("trie", "The trie of a batch", [built], options)
    every = []
    for case in chosen(options):
        rows = measure(case, min(options.rounds, 3), options.threads)
        title = f"The training step, {case.siblings} rows of {case.prompt} + {case.completion}, {case.turns} turns"
        finish("trie", title, rows, options)  # what is done stays
        every += rows
    if met := goals(every, built):
        finish("trie", "The training step over a trie: goals", met, options)


if __name__ == "__main__":
    main()
