"""Predicts the LM head's time on a GPU: every path and tile shape, against the bare products. Needs no GPU.

    python bench/head_model.py               # print an H100's table
    python bench/head_model.py --report      # all GPUs, into bench/results/head-model.{md,json}

It counts each path's operations, bytes and launches and divides them by the constants below. ``ASSUMED`` lists the
guesses. ``results/2026-11-27-h200.md`` measured the H200's ``cublas``, and ``TRITON``. The last page of
``make gpu-check`` compares predictions with measured times.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sass import GPUS

from turnwise.ops.logprob.choice import (
    FEW,
    MEMORY,
    Chunks,
    Device,
    Sizes,
    Tiles,
    choose,
    choose_chunks,
    choose_frozen,
    one_pass,
)

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
        return {"bf16": self.bf16 * self.cublas, "fp32": self.fp32 * FP32}[kind]


PEAKS = {
    "A100": Peaks(312e12, 156e12, 19.5e12, 40 << 20, 3.5e12, 0.85),
    "H100": Peaks(989e12, 494e12, 67e12, 50 << 20, 5.5e12, 0.70),
    "H200": Peaks(989e12, 494e12, 67e12, 60 << 20, 5.5e12, 0.76),
    "B200": Peaks(2250e12, 1100e12, 75e12, 126 << 20, 10e12, 0.70),
}
FP32, TRITON, LAUNCH, HOST, RESIDENT, EXPOSED = 0.8, 0.41, 3e-6, 8e-6, 0.5, 0.5
KERNELS = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.7))  # rows, columns, relative speed
SPLITS = (1, 2, 4)
LOSS_CALLS = 14
SCAN, GRAD, WEIGHTS = 13.4, 14.9, 17.6  # instructions per logit: bench/results/sass.json, sm_90
ASSUMED = {
    "cublas": "cuBLAS's large products reach 0.85 of the tensor cores' peak on an A100, 0.70 on an H100 and a B200, "
    "0.76 on an H200",
    "FP32": f"without tensor cores cuBLAS reaches {FP32} of the fp32 peak",
    "TRITON": f"Triton's fused products reach {TRITON} of the tensor cores' peak; one in fp32 is three in TF32",
    "KERNELS": "a multiprocessor makes 128 x 256 results at a time, or at 0.9 of the speed 128 x 128, at 0.7 64 x 128",
    "SPLITS": "cuBLAS may split the inner size in 2 or 4; the parts go through the L2",
    "LAUNCH": f"{LAUNCH * 1e6:.0f} µs pass between two kernels",
    "HOST": f"a call takes {HOST * 1e6:.0f} µs of the CPU, unseen while the GPU has more to do",
    "LOSS_CALLS": f"the loss and its gradient take {LOSS_CALLS} small kernels per chunk",
    "l2_bandwidth": "the L2 gives 3.5 TB/s on an A100, 5.5 on an H100 and an H200, 10 on a B200",
    "RESIDENT": f"a tile of logits of up to {RESIDENT} of the L2 is read from there; of a larger one, less is",
    "EXPOSED": f"{EXPOSED} of the time of a product's reads and writes of its results passes without multiplying",
}


class Case(NamedTuple):
    """One call. ``dtype``: "bf16" or "fp32"; ``what``: one of ``WHATS``."""

    tokens: int
    width: int
    vocabulary: int
    dtype: str
    what: str

    @property
    def sizes(self) -> Sizes:
        return Sizes(*self[:3], {"bf16": 2, "fp32": 4}[self.dtype])

    @property
    def trains_weight(self) -> bool:
        return self.what in ("forward, backward", "loss, backward")


# The first three are linear_logprob, the others linear_policy_loss.
WHATS = ("forward", "forward, backward", "forward, backward, frozen", "loss, backward", "loss, backward, frozen")
CASES = [
    Case(*sizes)
    for sizes in itertools.product(
        (2048, 8192, 65536), (896, 2048, 4096, 8192), (32000, 151936, 256000), ("bf16", "fp32"), WHATS
    )
]


def device(gpu: str) -> Device:
    return Device(GPUS[gpu].multiprocessors, PEAKS[gpu].l2, divmod(GPUS[gpu].architecture, 10))


# ---------------------------------------------------------------------------------------------------------------------
# Costs
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cost:
    """The cost of a path: ``+`` is one after another, ``*`` is again and again."""

    seconds: float = 0.0  # of the GPU
    flops: float = 0.0
    hbm: float = 0.0  # bytes
    l2: float = 0.0  # bytes that only the L2 moves
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


def parts(total: int, size: int) -> list[tuple[int, int]]:
    """The sizes of the parts when ``total`` is cut, with their counts."""
    whole, rest = divmod(total, size)
    return [(n, count) for n, count in ((size, whole), (rest, 1)) if n and count]


@functools.cache
def product(gpu: str, rows: int, columns: int, inner: int, kind: str, out: float, adds: bool = False) -> Cost:
    """cuBLAS's product ``[rows, inner] @ [inner, columns]``, by its fastest kernel.

    ``out``: bytes of a result that go to the memory; with ``adds`` they are read first.
    """
    peaks, units, copy = PEAKS[gpu], GPUS[gpu].multiprocessors, GPUS[gpu].copy
    written = rows * columns * out * (2 if adds else 1)
    ways = []
    for (down, across, speed), split in itertools.product(KERNELS, SPLITS):
        high, wide = -(-rows // down), -(-columns // across)
        rounds = -(-high * wide * split // units)
        compute = rounds * 2 * down * across * (inner / split) / (peaks.rate(kind) / units * speed)
        # The multiprocessors make a block of results at a time; its operands come from the memory.
        tall = min(high, max(1, round(math.sqrt(units / split * across / down))))
        broad = min(wide, max(1, units // split // tall))
        size = 2 if kind == "bf16" else 4
        operands = (tall * down + broad * across) * inner * size * -(-high * wide // (tall * broad))
        joined = rows * columns * 8 * split / peaks.l2_bandwidth if split > 1 else 0.0
        ways.append((max(compute, (operands + written) / copy) + joined, operands))
    seconds, operands = min(ways)
    seconds += EXPOSED * written / copy + LAUNCH
    return Cost(seconds, 2.0 * rows * columns * inner, operands + written, calls=1)


def stream(gpu: str, values: float, instructions: float, moved: float, resident: float = 0.0) -> Cost:
    """A kernel that moves ``moved`` bytes for each value, a share of them in the L2."""
    total = values * moved
    memory = total * (1 - resident) / GPUS[gpu].copy + total * resident / PEAKS[gpu].l2_bandwidth
    seconds = max(memory, values * instructions / GPUS[gpu].issue) + LAUNCH
    return Cost(seconds, 0.0, total * (1 - resident), total * resident, 1)


def residency(gpu: str, tile: float) -> float:
    """The share of a tile of logits that the next kernel finds in the L2."""
    l2 = PEAKS[gpu].l2
    return min(1.0, max(0.0, (l2 - tile) / (l2 - RESIDENT * l2)))


# ---------------------------------------------------------------------------------------------------------------------
# Paths
# ---------------------------------------------------------------------------------------------------------------------
def bare(gpu: str, case: Case) -> Cost:
    """The products alone, as torch makes them: all logits, then one or two gradients."""
    (n, h, v), size = case[:3], case.sizes.size
    total = product(gpu, n, v, h, case.dtype, size)
    if case.what != "forward":
        total += product(gpu, n, h, v, case.dtype, size)
    if case.trains_weight:
        total += product(gpu, v, h, n, case.dtype, size)
    return total


def forward(gpu: str, case: Case, tiles: Tiles) -> Cost:
    """cuBLAS's products by tiles, each scanned by our kernel."""
    total = Cost()
    for (columns, across), (rows, down) in itertools.product(
        parts(case.vocabulary, tiles.columns), parts(case.tokens, tiles.rows)
    ):
        inside = residency(gpu, 4 * rows * columns)
        made = product(gpu, rows, columns, case.width, case.dtype, 4 * (1 - inside))
        total += (made + stream(gpu, rows * columns, SCAN, 4, inside)) * (across * down)
    return total


def backward(gpu: str, case: Case, tiles: Tiles, fused: bool = False) -> Cost:
    """Logits again by tiles, their gradients, and the products with them. ``fused``: gradients by Triton's kernel."""
    total, size, narrow = Cost(), case.sizes.size, case.sizes.narrow
    spans = parts(case.tokens, tiles.span)
    for (span, count), (columns, across) in itertools.product(spans, parts(case.vocabulary, tiles.columns)):
        groups, tile = parts(span, tiles.group), Cost()
        several = sum(n for _, n in groups) > 1
        for group, times in groups:
            if fused:
                one = triton_tile(gpu, case, group, columns, GRAD, size)
            else:
                one = Cost()
                for rows, down in parts(group, tiles.rows):
                    inside = residency(gpu, 4 * rows * columns)
                    made = product(gpu, rows, columns, case.width, case.dtype, 4 * (1 - inside))
                    one += (made + stream(gpu, rows * columns, GRAD, 4 + size, inside)) * down
            one += product(gpu, group, case.width, columns, case.dtype, 4, adds=True)
            if case.trains_weight:
                adds = several or sum(n for _, n in spans) > 1
                one += product(gpu, columns, case.width, group, case.dtype, 4 if several else size, adds=adds)
            tile += one * times
        if several and case.trains_weight and narrow:
            tile += stream(gpu, columns * case.width, 2, 6)
        total += tile * (across * count)
    return total + stream(gpu, case.tokens * case.width, 2, 6) if narrow else total


def slopes(gpu: str, case: Case, tiles: Tiles) -> Cost:
    """A frozen weight: the forward makes each tile's softmax weights too, and multiplies them out."""
    total, size = Cost(), case.sizes.size
    for (span, count), (columns, across) in itertools.product(
        parts(case.tokens, tiles.span), parts(case.vocabulary, tiles.columns)
    ):
        for rows, down in parts(span, tiles.rows):
            inside = residency(gpu, 4 * rows * columns)
            one = product(gpu, rows, columns, case.width, case.dtype, 4 * (1 - inside))
            one += stream(gpu, rows * columns, SCAN, 4, inside)
            one += stream(gpu, rows * columns, WEIGHTS, 4 + size, inside)
            one += product(gpu, rows, case.width, columns, case.dtype, 4, adds=True)
            total += one * (count * across * down)
    # The slope from its sums and the target's row of the weight; the backward scales it.
    ends = stream(gpu, case.tokens * case.width, 4, 16 + 2 * size) + stream(gpu, case.tokens * case.width, 3, 2 * size)
    return total + ends


def triton_tile(gpu: str, case: Case, rows: int, columns: int, instructions: float, written: int) -> Cost:
    """Triton's kernel: a product whose logits stay on the chip, then ``instructions`` per logit."""
    rate = (PEAKS[gpu].bf16 if case.sizes.narrow else PEAKS[gpu].tf32 / 3) * TRITON
    logits = -(-rows // 128) * -(-columns // 128) * 128.0 * 128.0
    seconds = 2 * logits * case.width / rate + logits * instructions / GPUS[gpu].issue
    seconds += EXPOSED * rows * columns * written / GPUS[gpu].copy + LAUNCH
    return Cost(seconds, 2 * logits * case.width, rows * columns * written, calls=1)


def chunks_path(gpu: str, case: Case, chunks: Chunks, wide: bool = False) -> Cost:
    """The loss in one pass: a chunk's logits stay in memory until the loss has its gradient.

    ``wide``: the weight's gradient is summed in float32.
    """
    total, size = Cost(), case.sizes.size
    for rows, count in parts(case.tokens, chunks.rows):
        one = Cost(LOSS_CALLS * LAUNCH, calls=LOSS_CALLS)
        for columns, across in parts(case.vocabulary, chunks.columns):
            tile = product(gpu, rows, columns, case.width, case.dtype, 4)
            tile += stream(gpu, rows * columns, SCAN, 4, residency(gpu, 4 * rows * columns))
            tile += stream(gpu, rows * columns, GRAD, 4 + size)
            tile += product(gpu, rows, case.width, columns, case.dtype, 4, adds=True)
            if case.trains_weight:
                tile += product(gpu, columns, case.width, rows, case.dtype, 4 if wide else size, adds=True)
            one += tile * across
        total += one * count
    return total


def liger(gpu: str, case: Case) -> Cost:
    """Liger's fused linear way: chunks of a power of two tokens, logits in the input's dtype, one kernel for both."""
    chunk = 1 << (-(-case.tokens // -(-case.vocabulary // case.width)) - 1).bit_length()
    size, total = case.sizes.size, Cost()
    for rows, count in parts(case.tokens, chunk):
        one = product(gpu, rows, case.vocabulary, case.width, case.dtype, size)
        one += stream(gpu, rows * case.vocabulary, SCAN + GRAD, 3 * size)
        one += product(gpu, rows, case.width, case.vocabulary, case.dtype, size)
        if case.trains_weight:
            one += product(gpu, case.vocabulary, case.width, rows, case.dtype, 4, adds=True)
        total += one * count
    return total


class Found(NamedTuple):
    """A path with its predicted cost, the bytes that it needs beside gradients, and how it cuts the work."""

    cost: Cost
    memory: int
    cut: str


def shape(tiles: Tiles) -> str:
    return f"{tiles.rows} x {tiles.columns}, group {tiles.group}, span {tiles.span}"


def in_two_passes(gpu: str, case: Case, tiles: tuple[Tiles, Tiles]) -> Found:
    """``linear_logprob`` on cuBLAS's products, with given tiles of the forward and of the backward."""
    cost, memory = forward(gpu, case, tiles[0]), tiles[0].forward_memory(case.sizes)
    if case.what == "forward":
        return Found(cost, memory, f"{tiles[0].rows} x {tiles[0].columns}")
    memory = max(memory, tiles[1].backward_memory(case.sizes))
    return Found(cost + backward(gpu, case, tiles[1]), memory, shape(tiles[1]))


def our_tiles(gpu: str, case: Case) -> tuple[Tiles, Tiles]:
    return choose(case.sizes, device(gpu), backward=False), choose(case.sizes, device(gpu), backward=True)


def by_triton(gpu: str, case: Case) -> Found:
    cost = triton_tile(gpu, case, case.tokens, case.vocabulary, SCAN, 0)
    tiles = our_tiles(gpu, case)[1]
    if case.what == "forward":
        return Found(cost, 0, "")
    return Found(cost + backward(gpu, case, tiles, fused=True), tiles.backward_memory(case.sizes), shape(tiles))


def whole_logits(gpu: str, case: Case) -> Found:
    """All float32 logits by one product and one kernel, kept for the backward."""
    n, _, v, *_ = case
    cost = product(gpu, n, v, case.width, case.dtype, 4) + stream(gpu, n * v, SCAN, 4)
    if case.what != "forward":
        size = case.sizes.size
        cost += stream(gpu, n * v, GRAD, 4 + size) + product(gpu, n, case.width, v, case.dtype, size)
        cost += product(gpu, v, case.width, n, case.dtype, size) if case.trains_weight else Cost()
    return Found(cost, (4 + case.sizes.size * case.sizes.narrow) * n * v, "")


def paths(gpu: str, case: Case) -> dict[str, Found]:
    """Every path of a case by its name. Only those within the memory, with float32 logits, can be chosen."""
    found = {
        "tiles": in_two_passes(gpu, case, our_tiles(gpu, case)),
        "Triton": by_triton(gpu, case),
        "whole logits": whole_logits(gpu, case),
    }
    if case.what.endswith("frozen"):
        tiles = choose_frozen(case.sizes, device(gpu))
        cut = f"{tiles.rows} x {tiles.columns}, span {tiles.span}"
        found["slopes"] = Found(slopes(gpu, case, tiles), tiles.slope_memory(case.sizes), cut)
    if case.what.startswith("loss"):
        chunks, sizes = choose_chunks(case.sizes, device(gpu)), case.sizes
        cut = f"{chunks.rows} x {chunks.columns}"
        wide = sizes.narrow and sizes.tokens > FEW * chunks.rows
        memory = chunks.memory(sizes, case.trains_weight)
        found["one pass"] = Found(chunks_path(gpu, case, chunks, wide), memory, cut)
        chunk = 1 << (-(-case.tokens // -(-case.vocabulary // case.width)) - 1).bit_length()
        extra = 4 * case.vocabulary * case.width * case.trains_weight * sizes.narrow
        found["Liger"] = Found(liger(gpu, case), sizes.size * chunk * case.vocabulary + extra, str(chunk))
    return found


def chosen(case: Case, gpu: str) -> str:
    """The path that turnwise takes with Triton installed."""
    if case.what.endswith("frozen") and (case.sizes.narrow or device(gpu).capability < (10, 0)):
        return "slopes"
    if case.what.startswith("loss"):
        chunks = choose_chunks(case.sizes, device(gpu))
        if one_pass(case.sizes, chunks, device(gpu), case.trains_weight, triton=not case.sizes.narrow):
            return "one pass"
    return "tiles" if case.sizes.narrow else "Triton"


def eligible(name: str, case: Case, found: Found) -> bool:
    """True if a path fits in the memory, drops its logits before it returns, and keeps them in float32."""
    return found.memory <= MEMORY and name != "whole logits" and not (name == "Liger" and case.sizes.narrow)


def shapes(gpu: str, case: Case) -> Iterator[tuple[Tiles, Tiles]]:
    """Other tiles within the memory, for the same rows and columns forward and backward."""
    n, units = case.tokens, GPUS[gpu].multiprocessors
    for rows, rounds in itertools.product((1024, 1536, 2048, 4096), (1, 2, 3, 4, 6, 8)):
        rows = min(rows, n)
        columns = max(1, rounds * units // -(-rows // 128)) * 256
        for group in {rows, 2 * rows, 4 * rows, 8 * rows}:
            for span in {group, 2 * group, 4 * group, n}:
                tiles = Tiles(rows, columns, group, max(span, group))
                if tiles.backward_memory(case.sizes) <= MEMORY and tiles.forward_memory(case.sizes) <= MEMORY:
                    yield tiles, tiles


def best_tiles(gpu: str, case: Case) -> Found:
    """The fastest of ``shapes``; for a backward the forward's own fastest first."""
    ahead = case._replace(what="forward")
    fastest = min({t[0][:2]: t for t in shapes(gpu, case)}.values(), key=lambda t: forward(gpu, ahead, t[0]).time)[0]
    if case.what == "forward":
        return in_two_passes(gpu, case, (fastest, fastest))
    return min((in_two_passes(gpu, case, (fastest, t[1])) for t in shapes(gpu, case)), key=lambda f: f.cost.time)


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------
def row(gpu: str, case: Case) -> dict[str, Any]:
    found, floor = paths(gpu, case), bare(gpu, case).time
    path = chosen(case, gpu)
    mine = found[path]
    fits = {name: f.cost.time for name, f in found.items() if eligible(name, case, f)}
    best = min(fits, key=lambda name: fits[name])
    return {
        "gpu": gpu,
        **case._asdict(),
        "bare ms": round(floor * 1e3, 3),
        "ms": {name: round(f.cost.time * 1e3, 3) for name, f in found.items()},
        "path": path,
        "cut": mine.cut,  # tokens x columns of a tile
        "MiB": round(mine.memory / 2**20),
        "share": round(floor / mine.cost.time, 3),
        "best": best,
        "best share": round(floor / fits[best], 3),
        "TFLOP": round(mine.cost.flops / 1e12, 2),
        "GB": round(mine.cost.hbm / 1e9, 2),
        "GB of L2": round(mine.cost.l2 / 1e9, 2),
    }


def rows_of(gpus: Sequence[str]) -> list[dict[str, Any]]:
    return [row(gpu, case) for gpu in gpus for case in CASES]


NAMES = ("tiles", "slopes", "one pass", "Triton", "whole logits", "Liger")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of one GPU and one kind of call as a markdown table."""
    head = ["tokens", "H", "V", "dtype", "bare ms", *(f"{n} ms" for n in NAMES if n in rows[0]["ms"])]
    head += ["path", "cut", "MiB", "share", "best"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in rows:
        times = [f"{r['ms'][n]:.2f}" for n in NAMES if n in r["ms"]]
        other = "" if r["best"] == r["path"] else f"{r['best']} {r['best share']:.2f}"
        cells = [r["tokens"], r["width"], r["vocabulary"], r["dtype"], f"{r['bare ms']:.2f}", *times]
        lines.append(
            "| " + " | ".join(map(str, [*cells, r["path"], r["cut"], r["MiB"], f"{r['share']:.2f}", other])) + " |"
        )
    return "\n".join(lines)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Least and median share of the bare products, by GPU, dtype and kind of call."""
    lines = [
        "| GPU | dtype | call | least share | median | most | of H >= 4,096 at least |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((r["gpu"], r["dtype"], r["what"]) for r in rows):
        mine = [r for r in rows if (r["gpu"], r["dtype"], r["what"]) == key]
        shares = sorted(r["share"] for r in mine)
        wide = min(r["share"] for r in mine if r["width"] >= 4096)
        cells = [*key, *(f"{x:.2f}" for x in (shares[0], shares[len(shares) // 2], shares[-1], wide))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def text(rows: Sequence[dict[str, Any]]) -> str:
    machines = "\n".join(
        f"- {name}: {p.bf16 / 1e12:.0f} TFLOP/s bf16, {p.tf32 / 1e12:.0f} TF32, {p.fp32 / 1e12:g} fp32 (dense); "
        f"L2 {p.l2 >> 20} MiB; {GPUS[name].multiprocessors} multiprocessors, copy {GPUS[name].copy / 1e12:.2f} TB/s."
        for name, p in PEAKS.items()
    )
    parts_ = [
        "# Predicted times of the LM head on a GPU",
        "",
        "Counted, not measured: `python bench/head_model.py --report` wrote this. Share: time of the bare products",
        "over the predicted time. `best` names the fastest path where turnwise takes another. It must fit in 256 MiB",
        "beside gradients, drop its logits before it returns (`whole logits` does not), and keep them in float32:",
        "Liger's way rounds them to bf16, so it counts in fp32 alone. A backward that makes the logits again takes",
        "four products for three: its share is at most 0.75. With a frozen weight `slopes` takes two for two, where",
        "`tiles` takes three.",
        "",
        machines,
        "- Source: NVIDIA's data sheets (SXM); the H200's 60 MiB of L2 and copy rate are those of the design page.",
        "",
        "Assumed:",
        "",
        *(f"- `{name}`: {value}." for name, value in ASSUMED.items()),
        "",
        "## Shares",
        "",
        summary(rows),
        "",
    ]
    for what in WHATS:
        parts_ += [f"## H100, {what}", "", table([r for r in rows if r["gpu"] == "H100" and r["what"] == what]), ""]
    return "\n".join(parts_)


def as_json(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as JSON, one per line: the names of the columns once, then values."""
    lines = ",\n".join(json.dumps(list(r.values()), separators=(",", ":")) for r in rows)
    return f'{{"columns": {json.dumps(list(rows[0]))},\n"rows": [\n{lines}\n]}}\n'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", nargs="+", choices=PEAKS, default=["H100"])
    parser.add_argument(
        "--report", action="store_true", help="all GPUs, into head-model.md and head-model.json of --out"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    options = parser.parse_args(arguments)
    rows = rows_of(list(PEAKS) if options.report else options.gpus)
    print(summary(rows))
    if options.report:
        (options.out / "head-model.md").write_text(text(rows))
        (options.out / "head-model.json").write_text(as_json(rows))
    return 0


if __name__ == "__main__":
    main()
