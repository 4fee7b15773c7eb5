"""Counts the GPU kernels' instructions per token in their machine code, and predicts their share of copy bandwidth.

    python bench/sass.py                     # compile for sm_90 and print the table
    python bench/sass.py --report            # all architectures, into bench/results/sass.{md,json}
    python bench/sass.py --module _C.so      # count a built module (``make cuda-build``) instead

No GPU is needed, and nothing here was measured on one. A kernel that issues more instructions than the processor can
in the time that its bytes take cannot reach the memory's speed. The prediction is that bound and no more: it knows
neither latency nor a slower pipe for some instructions.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import sass_code
from sass_code import Kernel

RESULTS = Path(__file__).resolve().parent / "results"
ARCHITECTURES = (80, 90, 100, 120)
WARP = 32


# ---------------------------------------------------------------------------------------------------------------------
# The machines
# ---------------------------------------------------------------------------------------------------------------------
class Limits(NamedTuple):
    """Limits of a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

    warps: int
    blocks: int
    shared: int  # bytes; each block takes 1 KiB more than it asks for


REGISTERS, REGISTER_UNIT, SHARED_UNIT = 65536, 256, 128  # of a multiprocessor; allocated per warp and per block
LIMITS = {
    80: Limits(64, 32, 164 << 10),
    90: Limits(64, 32, 228 << 10),
    100: Limits(64, 32, 228 << 10),
    120: Limits(48, 24, 100 << 10),
}


class GPU(NamedTuple):
    """Issue rate: multiprocessors x 4 schedulers x 32 threads x clock. Copy: bytes read and written."""

    architecture: int
    multiprocessors: int
    gigahertz: float
    copy: float  # bytes per second
    source: str

    @property
    def issue(self) -> float:
        """Thread-instructions per second."""
        return self.multiprocessors * 4 * WARP * self.gigahertz * 1e9


# The H200's copy is the only measured rate (design of the ops). 0.87 of the data sheet's bandwidth, a little less than
# the H200's 4.3 / 4.8, stands for a copy elsewhere.
GPUS = {
    "A100": GPU(80, 108, 1.41, 1.77e12, "data sheet SXM 80 GB: 108 SMs, 1.41 GHz, 0.87 of 2.04 TB/s"),
    "H100": GPU(90, 132, 1.755, 2.9e12, "data sheet SXM: 132 SMs, 1.755 GHz, 0.87 of 3.35 TB/s"),
    "H200": GPU(90, 132, 1.755, 4.3e12, "as H100; copy measured, 4.3 TB/s of 4.8"),
    "B200": GPU(100, 148, 1.98, 6.96e12, "data sheet: 148 SMs, 1.98 GHz, 0.87 of 8 TB/s"),
}


def warps_per_multiprocessor(architecture: int, threads: int, registers: int, shared: int) -> int:
    """Return the warps that one multiprocessor holds at once. ``shared``: bytes per block."""
    limits, warps = LIMITS[architecture], threads // WARP
    per_warp = math.ceil(registers * WARP / REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // 4 // per_warp * 4 // warps  # each of 4 schedulers has a quarter of the registers
    by_shared = limits.shared // (math.ceil((shared + 1024) / SHARED_UNIT) * SHARED_UNIT)
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared) * warps


def predicted_share(gpu: GPU, instructions: float, bytes_moved: float) -> float:
    """Return the share of copy bandwidth that the issue rate leaves, at most 1. Both counts are per token."""
    return min(1.0, bytes_moved / gpu.copy * gpu.issue / instructions)


# ---------------------------------------------------------------------------------------------------------------------
# The assumptions: which path is hot, and how many tokens it does
# ---------------------------------------------------------------------------------------------------------------------
ANY = -1
SHORT = 7  # tokens of a short row


@dataclass(frozen=True)
class HotPath:
    """The longest path with these accesses (``Instruction.access``): through the innermost loop that has one, or with
    ``loop`` False from the kernel's start to its end. Every branch of the computation is taken, so every token trains.

    ``tokens``: what one warp does on it. The instructions per token are 32 threads times its length over ``tokens``; a
    negative number takes them off, where another path holds this one.
    """

    accesses: dict[str, int]
    tokens: float
    loop: bool = True


@dataclass(frozen=True)
class Case:
    """One way through a kernel: its instructions per token are the sum over ``paths``."""

    name: str
    file: str  # of csrc/cuda; of Triton's kernels the module
    kernel: str  # regular expression of the mangled name; of Triton's kernels the index of the compile case
    bytes: float  # read and written per token
    paths: tuple[HotPath, ...]
    threads: int = 256  # per block
    shared: int = 0  # dynamic shared memory per block, bytes
    atomics: float | None = None  # on memory, per token; tests/ops count them in the emulator

    @property
    def of_triton(self) -> bool:
        return self.file.startswith("turnwise.")


FLOATS = {"fp32": ("f", 4), "bf16": (r"N\w*8BFloat16E", 2)}


def _loss_shared(minimal: bool, size: int) -> int:
    """Return the shared memory of loss_grad_kernel for one actor: the scratch, 14 sums for each of 8 warps, and a
    ``RowTable`` for each warp. ``size``: bytes of a float."""
    rows, row = (128 if minimal and size == 2 else 64), (16 if minimal else 48)
    table = (rows + 1) * (row + 8 + 4) + 2 * rows * 4 + 2 * WARP * 16 // size + 2
    return 8 * (256 + 8 * 14) + 8 * (math.ceil(table / 16) * 16)


def _loss(name: str, special: int, dtype: str, streams: int, exps: int, short: bool = False) -> Case:
    """The policy loss of rows with a byte mask and an advantage per row, packed with int32 cu_seqlens.

    ``special``: number of the Specialization. ``streams``: floats that are read. ``exps``: exponentials per token.
    """
    mangled, size = FLOATS[dtype]
    pack = 16 // size
    step = {"stream16": ANY, f"stream{pack}": 1, "store16": 1, "exp": exps * pack}
    paths = [HotPath(step, WARP * pack)]
    if short:
        # Every step finds its rows by a prefix sum, in 5 shuffles. Every few steps the warp reads rows, 32 at a time,
        # until it has those of 3 steps.
        lookup = {**step, "shared4": ANY, "shared8": ANY, "shared16": ANY, "shared1": ANY, "shuffle": 5, "vote": 1}
        reads = math.ceil(3 * WARP * pack / (WARP * SHORT))
        refilled = reads * WARP * SHORT // (WARP * pack) * WARP * pack
        read = {"load4": 3, "load8": ANY, "shared4": ANY, "vote": 1}
        refill = {**lookup, **read, "load4": ANY, "vote": 2}
        paths = [HotPath(lookup, WARP * pack), HotPath(refill, refilled), HotPath(lookup, -refilled)]
        paths += [HotPath(read, refilled / (reads - 1))]
    minimal = special in (2, 4)
    kernel = rf"loss_grad_kernelI{mangled}Lb1E\w*SpecializationE{special}E"
    moved = (streams + 1) * size + 1 + (4 / SHORT if short else 0)
    return Case(
        f"policy loss, {dtype}, {name}",
        "policy_loss",
        kernel,
        round(moved, 2),
        tuple(paths),
        shared=_loss_shared(minimal, size),
    )


def _joins() -> Iterator[Case]:
    """The launch after the sums: a row per lane, none cut by a chunk on the way but one in a warp."""
    path = HotPath({"any": ANY}, WARP * SHORT, loop=False)
    yield Case(f"token reward sum, join, rows of {SHORT}", "token_rewards", "join_kernel", round(4 / SHORT, 2), (path,))


def _counts() -> Iterator[Case]:
    """The first launches: trained tokens per row, and with the rewards of each row. A byte mask, packed rows.

    Of short rows a lane takes one, 8 tokens at a time: the path is that of 32 rows.
    """
    rows = {"vote": 2, "shuffle": ANY, "load1": 8, "load8": ANY, "store4": 1}
    path = HotPath({**rows, "load4": ANY}, WARP * SHORT)
    kernel = "count_tokens_kernelIfLb1ELb1"
    yield Case(f"count tokens, rows of {SHORT}", "policy_loss", kernel, round(1 + 8 / SHORT, 2), (path,))
    long = HotPath({"stream16": ANY, "stream4": 1}, WARP * 4)
    kernel = "rewards_to_advantages_kernelIfLb1ELb"
    yield Case("grouped policy loss, rewards, fp32", "grouped_policy_loss", kernel + "0", 5, (long,))
    path = HotPath({**rows, "load4": 2 + 8}, WARP * SHORT)
    name = f"grouped policy loss, rewards, fp32, rows of {SHORT}"
    yield Case(name, "grouped_policy_loss", kernel + "1", round(5 + 8 / SHORT, 2), (path,))


def _sums() -> Iterator[Case]:
    """The sum of rewards in fp32 with a byte mask: a warp's unit of 512 tokens, in one long row or in short ones."""
    unit = {"stream16": 4, "stream4": 4, "any": ANY}
    parts = 8 * 40  # UnitParts of 8 warps
    path = HotPath({**unit, "shared4": 0}, 512, loop=False)
    yield Case("token reward sum, fp32, one row", "token_rewards", "sum_kernelIfh", 5, (path,), shared=parts)
    # A lane takes a row, so a pass is 32 rows. The unit's path holds one pass, and a pass one token of each row.
    passes = 512 / (WARP * SHORT)
    one_token = {"shared4": 1}
    paths = (
        HotPath({**unit, "shared4": 1}, 512, loop=False),
        HotPath(
            {"shared4": 1, "vote": 1, "load4": ANY, "load8": ANY, "shuffle": ANY, "store4": ANY}, 512 / (passes - 1)
        ),
        HotPath(one_token, 512 / (passes * (SHORT - 1))),
    )
    name = f"token reward sum, fp32, rows of {SHORT}"
    yield Case(name, "token_rewards", "sum_kernelIfh", round(5 + 8 / SHORT, 2), paths, shared=parts + 8 * 4 * 528)


def _logprobs() -> Iterator[Case]:
    """The log-softmax of a tile of logits without bias, 16 columns a thread at a time: its sums, and its gradient.

    Counts are per logit. The linear ops run the same kernels on tiles of fp32.
    """
    columns = 16 * WARP
    for dtype, (mangled, size) in FLOATS.items():
        path = HotPath({"stream16": size, "exp": ANY}, columns)
        for name, weighted in (("", 0), (" with entropy", 1)):
            kernel = f"scan_kernelI{mangled}Lb{weighted}ELb0E"
            yield Case(f"logprob scan{name}, {dtype}, per logit", "logprob", kernel, size, (path,), shared=256)
    same = r"S\w*_"  # how the mangled name repeats a type
    for name, types, size, out in (
        ("fp32", "ff", 4, 4),
        ("fp32 to bf16", "f" + FLOATS["bf16"][0], 4, 2),
        ("bf16", FLOATS["bf16"][0] + same, 2, 2),
    ):
        path = HotPath({"stream16": size, "store16": out, "exp": ANY}, columns)
        yield Case(f"logprob gradient, {name}, per logit", "logprob", f"grad_kernelI{types}Lb0E", size + out, (path,))
    path = HotPath({"stream16": 4, "store16": 2, "exp": ANY}, columns)
    kernel = rf"weights_kernelI{FLOATS['bf16'][0]}Lb0E"
    yield Case("logprob weights, fp32 to bf16, per logit", "logprob", kernel, 4 + 2, (path,))


def _groups() -> Iterator[Case]:
    """The group advantage of 65,536 fp32 rows in blocks of 512, one row a thread; a token stands for a row.

    The path from start to end goes once round each loop that joins rows: over the lanes of a warp, and then over what
    the warps of a block have. Rows of 8 take 3 steps in a warp and none in the block, for 4 interleaved groups 3 and 4.
    The kernel does both joins twice, for the extremes and for the sums.
    """
    for name, steps, atomics in (("groups of 8", 2 * (3 + 0), 6 / 8), ("4 large groups", 2 * (3 + 4), 6 * 4 / 512)):
        paths = (HotPath({"any": ANY}, WARP, loop=False), HotPath({"shuffle": 6, "vote": 2}, WARP / (steps - 4)))
        yield Case(
            f"group advantage, {name}",
            "group_advantage",
            "group_kernelIfLb0ELb0E",
            4 + 8 + 4,
            paths,
            threads=512,
            shared=512 // WARP * 33 * 60,  # BlockTable
            atomics=round(atomics, 4),
        )


def _cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _loss("lean", 2, dtype, 2, 1)
        yield _loss("KL", 2, dtype, 3, 2)
        yield _loss("KL times ratio", 4, dtype, 3, 2)
        yield _loss("rollout, entropy", 1, dtype, 4, 2)
        yield _loss("rollout, entropy, KL", 1, dtype, 5, 3)
        yield _loss(f"lean, rows of {SHORT}", 2, dtype, 2, 1, short=True)
        yield _loss(f"KL, rows of {SHORT}", 2, dtype, 3, 2, short=True)
    yield from _sums()
    yield from _joins()
    yield from _counts()
    yield from _logprobs()
    yield from _groups()
    # Scans: 8 tokens a thread, one long row. Scaling a gradient in place.
    scan = (HotPath({"any": ANY}, WARP * 8, loop=False),)
    yield Case("token returns, fp32", "token_rewards", "scan_kernelIfhLb0", 9, scan, threads=512, shared=920)
    yield Case("gae, fp32", "gae", "scan_kernelIfhLb1", 17, scan, threads=512, shared=920)
    pack = (HotPath({"stream16": 1, "store16": 1}, WARP * 4),)
    yield Case("scale, fp32", "scale", "scale_kernelIf", 8, pack)
    # Triton: a program does a tile, from start to end.
    for index, (dtype, (_, size)) in enumerate(FLOATS.items()):
        path = HotPath({"any": ANY}, WARP, loop=False)
        yield Case(f"Triton policy loss, {dtype}, KL", "turnwise.ops.loss.triton", str(index), 4 * size + 1, (path,))
    path = HotPath({"any": ANY}, WARP, loop=False)
    yield Case("Triton token reward sum, fp32", "turnwise.ops.rewards.triton", "0", 5, (path,))


CASES = tuple(_cases())


# ---------------------------------------------------------------------------------------------------------------------
# Counting
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """What was counted of one case on one architecture. Per token: ``instructions``, ``bytes``, ``atomics``."""

    name: str
    architecture: int
    instructions: float
    registers: int
    spills: int  # bytes per thread
    shared: int  # bytes per block
    warps: int  # on a multiprocessor at once
    bytes: float
    shares: dict[str, float]  # of copy bandwidth, by GPU
    atomics: float | None = None


def count(case: Case, kernels: Sequence[Kernel], architecture: int) -> Row:
    """Count one case. Raises ``LookupError`` if no kernel or no path fits: then the table of cases is out of date."""
    found = [k for k in kernels if case.of_triton or re.search(case.kernel, k.name)]
    if len(found) != 1:
        raise LookupError(f"{case.name}: expected one kernel that matches {case.kernel!r}, found {len(found)}")
    (kernel,) = found
    total = 0.0
    for path in case.paths:
        length = kernel.hot(path.accesses) if path.loop else kernel.longest(path.accesses)
        if length is None:
            raise LookupError(f"{case.name}, sm_{architecture}: no path with {path.accesses}")
        total += length * WARP / path.tokens
    usage = kernel.usage
    shared = max(usage.shared - 1024 * (architecture >= 90), 0) + case.shared  # from 9.0 on it names the system's 1 KiB
    return Row(
        case.name,
        architecture,
        round(total, 2),
        usage.registers,
        usage.spills,
        shared,
        warps_per_multiprocessor(architecture, case.threads, usage.registers, shared),
        case.bytes,
        {n: round(predicted_share(g, total, case.bytes), 3) for n, g in GPUS.items() if g.architecture == architecture},
        case.atomics,
    )


def triton_kernel(case: Case, architecture: int, folder: Path) -> tuple[Case, list[Kernel]]:
    """Compile a Triton kernel ahead of time. Returns the case with what the compiler chose, and the kernel."""
    import importlib

    from triton.backends.compiler import GPUTarget

    chosen = importlib.import_module(case.file).COMPILE_CASES[int(case.kernel)]
    compiled = chosen.compile(GPUTarget("cuda", architecture, WARP))
    cubin = folder / "triton.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    threads = WARP * chosen.options.get("num_warps", 4)
    paths = tuple(replace(p, tokens=chosen.constexprs["BLOCK"] * WARP / threads) for p in case.paths)
    return replace(case, paths=paths, threads=threads, shared=compiled.metadata.shared), sass_code.read(cubin)


def count_all(architectures: Sequence[int], module: Path | None = None, only: str = "") -> Iterator[Row]:
    """Count every case whose name matches ``only``, in files compiled here or in a built module."""
    cases = [case for case in CASES if re.search(only, case.name)]
    with tempfile.TemporaryDirectory() as folder:
        for architecture in architectures:
            kernels: dict[str, list[Kernel]] = {}
            for case in cases:
                if case.of_triton:
                    yield count(*triton_kernel(case, architecture, Path(folder)), architecture)
                    continue
                key = str(module) if module else case.file
                if key not in kernels:
                    options = ("-arch", f"sm_{architecture}") if module else ()
                    binary = module or sass_code.compile_file(case.file, architecture)
                    kernels[key] = sass_code.read(binary, *options)
                yield count(case, kernels[key], architecture)


# ---------------------------------------------------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------------------------------------------------
def table(rows: Sequence[Row]) -> str:
    """Return the rows as one table per architecture."""
    parts = []
    for architecture in dict.fromkeys(row.architecture for row in rows):
        gpus = [name for name, gpu in GPUS.items() if gpu.architecture == architecture]
        head = [
            "path",
            "instructions/token",
            "registers",
            "spills B",
            "shared B",
            "warps/SM",
            "bytes/token",
            "atomics/token",
        ]
        head += [f"share of copy, {name}" for name in gpus]
        parts += [f"## sm_{architecture}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for row in rows:
            if row.architecture != architecture:
                continue
            cells = [row.name, f"{row.instructions:.1f}", row.registers, row.spills, row.shared, row.warps, row.bytes]
            cells.append("" if row.atomics is None else row.atomics)
            cells += [f"{row.shares[name]:.2f}" for name in gpus]
            parts.append(f"| {' | '.join(map(str, cells))} |")
        parts.append("")
    return "\n".join(parts)


def versions() -> str:
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    import triton

    release = re.search(r"V([\d.]+)", nvcc)
    return f"nvcc {release[1] if release else 'unknown'}, Triton {triton.__version__}"


def report(rows: Sequence[Row], folder: Path) -> None:
    """Write ``sass.md`` and ``sass.json``, which ``tests/bench/test_sass.py`` compares with."""
    machines = "\n".join(
        f"- {name}: sm_{gpu.architecture}, {gpu.issue / 1e12:.1f} T thread-instructions/s, "
        f"copy {gpu.copy / 1e12:.2f} TB/s ({gpu.source})."
        for name, gpu in GPUS.items()
    )
    text = f"""# Instructions per token of the GPU kernels

Counted in the machine code; nothing here was measured on a GPU. `python bench/sass.py --report` wrote this with
{versions()}.
A share of copy bandwidth is the bound that the issue rate sets: bytes / copy * issue / instructions, at most 1.
A token of the group advantage is a row; its atomics are counted in emulated kernels.

{machines}

{table(rows)}"""
    (folder / "sass.md").write_text(text)
    content = {"versions": versions(), "rows": [asdict(row) for row in rows]}
    (folder / "sass.json").write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--architectures", type=int, nargs="+", choices=ARCHITECTURES, default=[90])
    parser.add_argument("--only", default="", help="regular expression: count the cases whose names match")
    parser.add_argument("--module", type=Path, help="a built turnwise._C with CUDA; default: compile csrc/cuda here")
    parser.add_argument("--report", action="store_true", help="all architectures, into sass.md and sass.json of --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    options = parser.parse_args(arguments)
    if options.report and options.only:
        parser.error("--only: a report holds every case")
    rows = []
    for row in count_all(ARCHITECTURES if options.report else options.architectures, options.module, options.only):
        rows.append(row)
        print(f"sm_{row.architecture} {row.name}: {row.instructions}", file=sys.stderr, flush=True)
    print(table(rows))
    if options.report:
        report(rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
