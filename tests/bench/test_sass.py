"""The counts of ``bench/sass.py``: its reading of machine code, and every hot path against the committed report."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GROWTH = 1.05  # most instructions per token, relative to the report
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def sass(load: Callable[[str], ModuleType]) -> Any:
    return load("sass")


@pytest.fixture
def kernel(load: Callable[[str], ModuleType]) -> Callable[..., Any]:
    """``kernel(*lines)``: a kernel with these instructions at 0x0, 0x10, ..."""
    code = load("sass_code")

    def make(*lines: str) -> Any:
        text = "\n".join(f"   /*{16 * i:04x}*/   {line} ;  /* 0x00 */" for i, line in enumerate(lines))
        return code.Kernel("made_up", code.Usage(32, 0, 0), code.parse(text))

    return make


LOAD, STORE, SMALL = "LDG.E.EF.128 R4, desc[UR4][R2.64]", "STG.E.EF.128 desc[UR4][R2.64], R4", "LDG.E.U8 R1, [R2.64]"


def test_the_longest_path_through_a_loop_is_counted(kernel: Callable[..., Any]) -> None:
    """A loop from 0x20 to 0xb0. It does tokens in whole packs, in 8 instructions or 6 by the branch at 0x40, or one by
    one."""
    made = kernel(
        "MOV R1, R2", "MOV R3, R2",
        "@P1 BRA 0x0090",  # 0x20, the header: the tokens at an end, one by one
        LOAD, "@P0 BRA 0x0060", "FADD R4, R4, R4", "FMUL R4, R4, R4", STORE, "BRA 0x00b0",
        SMALL, "FADD R1, R1, R1",  # 0x90
        "@P2 BRA 0x0020", "EXIT",
    )  # fmt: skip
    assert list(made.loops) == [0x20]
    assert made.hot({"stream16": 1, "store16": 1}) == 8
    assert made.hot({"load1": 1}) == 4
    assert made.hot({"stream16": 2, "store16": 1}) is None
    assert made.hot({"stream16": -1, "store16": 1}) == 8
    assert made.hot({"store16": 1, "any": -1}) == 8
    # From start to end: what comes before the loop and after it too.
    assert made.longest({"stream16": 1, "store16": 1}) == 11
    # Of nested loops the inner one is hot.
    made = kernel("MOV R1, R2", "MOV R3, R2", LOAD, "@P0 BRA 0x0020", "@P1 BRA 0x0010", "EXIT")
    assert {header: len(body) for header, body in made.loops.items()} == {0x20: 1, 0x10: 3}
    assert made.hot({"stream16": 1}) == 2


def test_occupancy_and_the_bound_by_hand(sass: Any) -> None:
    """256 threads with 80 registers: 2,560 a warp, 6 warps for each of 4 schedulers, 3 blocks."""
    assert sass.warps_per_multiprocessor(90, 256, 80, 2944) == 24
    assert sass.warps_per_multiprocessor(90, 256, 32, 0) == 64
    assert sass.warps_per_multiprocessor(90, 256, 32, 100 << 10) == 16  # two blocks by shared memory
    assert sass.warps_per_multiprocessor(120, 256, 32, 0) == 48
    # 13 bytes a token at 2.9 TB/s leave an H100 time for 133 instructions: 29.65 T/s times 13 / 2.9 T/s.
    h100 = sass.GPUS["H100"]
    assert h100.issue == pytest.approx(29.65e12, rel=1e-3)
    assert sass.predicted_share(h100, 132.9, 13) == pytest.approx(1, rel=1e-3)
    assert sass.predicted_share(h100, 2 * 132.9, 13) == pytest.approx(0.5, rel=1e-3)
    assert sass.predicted_share(h100, 10, 13) == 1


def test_a_case_without_its_kernel_or_path_is_an_error(sass: Any, kernel: Callable[..., Any]) -> None:
    case = sass.Case("a case", "file", "made_up", 1, (sass.HotPath({"stream16": 1}, 32),))
    with pytest.raises(LookupError, match="a case: expected one kernel"):
        sass.count(case, [], 90)
    with pytest.raises(LookupError, match="a case, sm_90: no path with"):
        sass.count(case, [kernel("EXIT")], 90)
    looped = kernel("MOV R1, R2", LOAD, "@P0 BRA 0x0010", "EXIT")
    assert sass.count(case, [looped], 90).instructions == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_no_hot_path_has_grown(sass: Any) -> None:
    """Against ``bench/results/sass.json``, for sm_90. ``python bench/sass.py --report`` writes it again."""
    committed = json.loads((ROOT / "bench" / "results" / "sass.json").read_text())["rows"]
    before = {row["name"]: row["instructions"] for row in committed if row["architecture"] == 90}
    now = {row.name: row.instructions for row in sass.count_all([90])}
    assert now.keys() == before.keys()
    grown = {name: (before[name], count) for name, count in now.items() if count > GROWTH * before[name]}
    assert not grown, f"instructions per token, before and now: {grown}"


# ---- Loads that stand together ---------------------------------------------------------------------------------------
# Kernels that are as fast as memory ask for all that a thread needs before they look at the first of it: a load that
# waits for the one before it leaves the memory idle.
REGISTER = re.compile(r"\bR(\d+)(\.64|\.128)?\b")
WIDTHS = {"": 1, ".64": 2, ".128": 4}


def looked_at(line: str) -> set[int]:
    """The registers that an instruction reads. What it writes comes first, where it is no store."""
    operation, _, operands = line.partition(" ")
    if not operation.startswith("ST") and re.match(r"R\d", operands):
        operands = operands.partition(",")[2]
    return {int(first) + i for first, width in REGISTER.findall(operands) for i in range(WIDTHS[width])}


def most_at_once(code: list[Any]) -> int:
    """The longest run of streaming loads, of which nothing is looked at before the last, on any way through the code:
    what is whole goes another way than what is not, and their ways join between two loads."""
    index = {instruction.place: i for i, instruction in enumerate(code)}
    streams = [i for i, instruction in enumerate(code) if instruction.access.startswith("stream")]

    def run_from(start: int) -> int:
        ways, seen, most = [(start, frozenset[int](), 0)], set(), 0
        while ways:
            at, asked, loads = ways.pop()
            most = max(most, loads)
            if at == len(code) or (at, asked) in seen or asked & looked_at(code[at].text):
                continue
            seen.add((at, asked))
            instruction = code[at]
            if instruction.access.startswith("stream"):
                first, size = int(instruction.text.split(" R")[1].split(",")[0]), int(instruction.access[6:])
                asked, loads = asked | set(range(first, first + max(size // 4, 1))), loads + 1
            jumps = instruction.operation.startswith("BRA")
            if jumps:
                ways.append((index[instruction.target], asked, loads))
            if instruction.guard or not (jumps or instruction.operation.startswith("EXIT")):
                ways.append((at + 1, asked, loads))
        return most

    return max(map(run_from, streams), default=0)


# By file, what picks its kernels, and how many loads of theirs stand together.
TOGETHER = {
    # Rewards and mask: four packs of each, two packs, or one pack of two-byte rewards.
    "token_rewards": {r"sum_kernelI": 8, r"scan_kernelIff": 4, r"scan_kernelI\w+fLb0": 3},
    "gae": {r"scan_kernelIff": 6, r"scan_kernelI\w+fLb1": 4},  # values as well
    # Log-probabilities, old, reference, advantages, and a mask in one of two ways; outside the minimal specializations
    # rollout and entropy too.
    "policy_loss": {
        r"loss_grad_kernelI\w+Lb1ELNS\d_14SpecializationE[24]": 6,
        r"loss_grad_kernelI\w+Lb1ELNS\d_14SpecializationE[13]": 8,
        r"count_tokens_kernelI\w+Lb1ELb0E": 6,
    },
    "grouped_policy_loss": {r"rewards_to_advantages_kernelI\w+Lb1ELb0E": 6},
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", TOGETHER)
def test_loads_are_on_their_way_together(load: Callable[[str], ModuleType], name: str) -> None:
    code = load("sass_code")
    kernels = code.read(code.compile_file(name, 90))
    for pattern, least in TOGETHER[name].items():
        found = {each.name: most_at_once(each.code) for each in kernels if re.search(pattern, each.name)}
        assert found and min(found.values()) >= least, found
