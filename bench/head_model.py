"""Predicts the LM head's time on a GPU: every path and tile shape, against the bare products. Needs no GPU.

    python bench/head_model.py               # print an H100's table
    python bench/head_model.py --report      # all GPUs, into bench/results/head-model.{md,json}

It counts each path's FLOPs, bytes and launches and divides them by the constants below. Nothing here was measured on a
GPU. ``ASSUMED`` lists the guesses; the last page of ``make gpu-check`` compares the predictions with measured times.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sass import GPUS

from turnwise.ops.logprob.choice import FEW, MEMORY, Device, Head, Tiles

RESULTS = Path(__file__).resolve().parent / "results"


# ---------------------------------------------------------------------------------------------------------------------
# Constants
# ---------------------------------------------------------------------------------------------------------------------
class Peaks(NamedTuple):
    """Dense products of a GPU in FLOP/s, and the bytes of its L2: NVIDIA's data sheets. The last two are assumed."""

    bf16: float
    tf32: float
    fp32: float
    l2: int
    l2_bandwidth: float  # bytes per second
    cublas: float  # share of the tensor cores' peak that large products reach

    def rate(self, kind: str) -> float:
        return {"bf16": self.bf16 * self.cublas, "tf32": self.tf32 * self.cublas, "fp32": self.fp32 * FP32}[kind]


FP32, TRITON, LAUNCH, HOST, RESIDENT, EXPOSED = 0.8, 0.45, 3e-6, 8e-6, 0.5, 0.5
KERNELS = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.7))  # rows, columns, relative speed
SPLITS = (1, 2, 4)
PEAKS = {
    "A100": Peaks(312e12, 156e12, 19.5e12, 40 << 20, 3.5e12, 0.85),
    "H100": Peaks(989e12, 494e12, 67e12, 50 << 20, 5.5e12, 0.70),
    "H200": Peaks(989e12, 494e12, 67e12, 60 << 20, 5.5e12, 0.70),
    "B200": Peaks(2250e12, 1100e12, 75e12, 126 << 20, 10e12, 0.70),
}
SCAN, GRAD = 13.4, 17.0


class Case(NamedTuple):
    """One call: tokens, hidden size, vocabulary, dtype, what is computed."""

    tokens: int
    width: int
    vocabulary: int
    dtype: str  # "bf16" or "fp32"
    what: str

    @property
    def size(self) -> int:
        return {"bf16": 2, "fp32": 4}[self.dtype]

    @property
    def backward(self) -> bool:
        return self.what != "forward"

    @property
    def trains_weight(self) -> bool:
        return self.backward and "frozen" not in self.what


# "forward" and the next two: linear_logprob; the last two: linear_policy_loss with its backward.
WHATS = ("forward", "forward, backward", "forward, backward, frozen", "loss", "loss, frozen")
TOKENS, WIDTHS, VOCABULARIES = (2048, 8192, 65536), (896, 2048, 4096, 8192), (32000, 151936, 256000)


# ---------------------------------------------------------------------------------------------------------------------
# Costs
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cost:
    """The cost of a path; ``+`` runs one after another, ``*`` repeats."""

    seconds: float = 0.0  # of the GPU
    flops: float = 0.0
    hbm: float = 0.0  # bytes
    l2: float = 0.0  # bytes that the L2 serves alone
    calls: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.flops + other.flops,
            self.hbm + other.hbm,
            self.l2 + other.l2,
            self.calls + other.calls,
        )

    def __mul__(self, count: int) -> Cost:
        return Cost(self.seconds * count, self.flops * count, self.hbm * count, self.l2 * count, self.calls * count)

    @property
    def time(self) -> float:
        """Seconds; the CPU queues the calls."""
        return max(self.seconds, self.calls * HOST)


NOTHING = Cost()


def parts(total: int, size: int) -> list[tuple[int, int]]:
    """The sizes of the parts when ``total`` is cut, with their counts."""
    whole, rest = divmod(total, size)
    return [(n, count) for n, count in ((size, whole), (rest, 1)) if n and count]


@functools.cache
def product(gpu: str, rows: int, columns: int, inner: int, kind: str, out: float, adds: bool = False) -> Cost:
    """cuBLAS's product ``[rows, inner] @ [inner, columns]``.

    ``out``: bytes of a result that go to the memory; with ``adds`` it is read first.
    """
    peaks, units, copy = PEAKS[gpu], GPUS[gpu].multiprocessors, GPUS[gpu].copy
    size = 2 if kind == "bf16" else 4
    written = rows * columns * out * (2 if adds else 1)
    ways = []
    for down, across, speed in KERNELS:
        high, wide = -(-rows // down), -(-columns // across)
        for split in SPLITS:
            waves = -(-high * wide * split // units)
            compute = waves * 2 * down * across * (inner / split) / (peaks.rate(kind) / units * speed)
            # The multiprocessors work on a block of results at a time, whose operands come from the memory.
            tall = min(high, max(1, round(math.sqrt(units / split * across / down))))
            broad = min(wide, max(1, units // split // tall))
            operands = (tall * down + broad * across) * inner * size * -(-high * wide // (tall * broad))
            joined = rows * columns * 8 * split / peaks.l2_bandwidth if split > 1 else 0.0
            ways.append((max(compute, (operands + written) / copy) + joined, operands))
    seconds, operands = min(ways)
    exposed = EXPOSED * written / copy
    return Cost(seconds + exposed + LAUNCH, 2.0 * rows * columns * inner, operands + written, 0.0, 1)


def stream(gpu: str, values: float, instructions: float, moved: float, resident: float = 0.0) -> Cost:
    """A kernel over ``values`` logits, each with ``moved`` bytes, of which a share is in the L2."""
    at = values * moved
    memory = at * (1 - resident) / GPUS[gpu].copy + at * resident / PEAKS[gpu].l2_bandwidth
    return Cost(
        max(memory, values * instructions / GPUS[gpu].issue) + LAUNCH, 0.0, at * (1 - resident), at * resident, 1
    )


def residency(gpu: str, tile: float) -> float:
    """The share of a tile that the next kernel finds in the L2."""
    full = RESIDENT * PEAKS[gpu].l2
    return min(1.0, max(0.0, (PEAKS[gpu].l2 - tile) / (PEAKS[gpu].l2 - full)))


# ---------------------------------------------------------------------------------------------------------------------
# Paths
# ---------------------------------------------------------------------------------------------------------------------
def kind_of(case: Case) -> str:
    return "bf16" if case.dtype == "bf16" else "fp32"


def bare(gpu: str, case: Case) -> float:
    """Seconds of the products alone, as torch makes them: logits, then one or two gradients."""
    n, h, v, kind = case.tokens, case.width, case.vocabulary, kind_of(case)
    total = product(gpu, n, v, h, kind, case.size)
    if case.backward:
        total += product(gpu, n, h, v, kind, case.size)
    if case.trains_weight:
        total += product(gpu, v, h, n, kind, case.size)
    return total.seconds


def forward(gpu: str, case: Case, tiles: Tiles) -> Cost:
    total = NOTHING
    for columns, across in parts(case.vocabulary, tiles.columns):
        for rows, down in parts(case.tokens, tiles.rows):
            inside = residency(gpu, 4 * rows * columns)
            made = product(gpu, rows, columns, case.width, kind_of(case), 4 * (1 - inside))
            total += (made + stream(gpu, rows * columns, SCAN, 4, inside)) * (across * down)
    return total


def backward(gpu: str, case: Case, tiles: Tiles) -> Cost:
    total, kind, narrow = NOTHING, kind_of(case), case.size < 4
    for span, spans in parts(case.tokens, tiles.span):
        for columns, across in parts(case.vocabulary, tiles.columns):
            tile = NOTHING
            groups = parts(span, tiles.group)
            several = sum(n for _, n in groups) > 1
            for group, count in groups:
                one = NOTHING
                for rows, down in parts(group, tiles.rows):
                    inside = residency(gpu, 4 * rows * columns)
                    made = product(gpu, rows, columns, case.width, kind, 4 * (1 - inside))
                    moved = 4 + case.size
                    one += (made + stream(gpu, rows * columns, GRAD, moved, inside)) * down
                one += product(gpu, group, case.width, columns, kind, 4, adds=True)
                if case.trains_weight:
                    wide = several or not narrow
                    adds = several or spans > 1
                    one += product(gpu, columns, case.width, group, kind, 4 if wide else 2, adds=adds)
                tile += one * count
            if several and case.trains_weight and narrow:
                tile += stream(gpu, columns * case.width, 2, 6)
            total += tile * (across * spans)
        if narrow:
            total += stream(gpu, span * case.width, 2, 6) * spans
    return total


if __name__ == "__main__":
    import itertools

    for gpu in ("H100", "A100", "B200"):
        for n, h, v in itertools.product((2048, 8192, 65536), WIDTHS, (32000, 151936)):
            f = Case(n, h, v, "bf16", "forward")
            b = Case(n, h, v, "bf16", "forward, backward")
            z = Case(n, h, v, "bf16", "forward, backward, frozen")
            units = GPUS[gpu].multiprocessors
            out = []
            fs, bs = [], []
            for rows in sorted({min(n, r) for r in (1024, 1408, 1536, 2048, 4096)}):
                for k in (1, 2, 3, 4, 6, 8, 12):
                    w = max(1, k * units // (-(-rows // 128))) * 256
                    fs.append((forward(gpu, f, Tiles(rows, w, rows, n)).time, rows, w, k))
                    for group in sorted({rows, min(n, 2 * rows), min(n, 4 * rows), min(n, 8192 // rows * rows)}):
                        for span in sorted({group, min(n // group * group + group, 32768 * 1024 // h // group * group)}):
                            t = Tiles(rows, w, group, max(span, group))
                            m = t.memory(Head(n, h, v, 2), True)
                            bs.append(
                                (
                                    backward(gpu, b, t).time if m <= MEMORY else 9,
                                    rows, w, k, t.group, t.span, m >> 20,
                                )
                            )
            old = Tiles(2048, 8192, 8192, n)
            fo = forward(gpu, f, old).time
            bo = backward(gpu, b, old).time
            fb, bb = min(fs), min(bs)
            bf, b3 = bare(gpu, f), bare(gpu, b)
            print(
                gpu, n, h, v, f"fwd bare {bf*1e3:.2f} old {bf/fo:.3f} best {bf/fb[0]:.3f} {fb[1:]}",
                f"| both bare {b3*1e3:.2f} old {b3/(fo+bo):.3f} best {b3/(fb[0]+bb[0]):.3f} {bb[1:]}", flush=True,
            )
