"""Kernels that are as fast as memory ask for all that a thread needs before they look at the first of it: a load that
waits for the one before it leaves the memory idle. Read off the machine code, as no GPU is needed for that."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOAD = re.compile(r"LDG\.E\.EF\S*?(\.64|\.128)? R(\d+), (.*)")  # EF: past the caches, as streams are read
REGISTER = re.compile(r"\bR(\d+)(\.64|\.128)?\b")
WIDTHS = {None: 1, "": 1, ".64": 2, ".128": 4}


class Instruction(NamedTuple):
    place: int
    conditional: bool
    text: str


@functools.cache
def kernels(name: str) -> dict[str, list[Instruction]]:
    """The machine code of each kernel in a file of ``csrc/cuda``, by mangled name."""
    spec = importlib.util.spec_from_file_location("sass_code", ROOT / "bench" / "sass_code.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = bench = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up there
    spec.loader.exec_module(bench)
    command = [bench.tool("cuobjdump"), "-sass", bench.compile_file(name, 90)]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    _, *parts = re.split(r"Function : (\w+)", code)
    return {kernel: instructions(body) for kernel, body in zip(parts[::2], parts[1::2], strict=True)}


def instructions(code: str) -> list[Instruction]:
    found = re.findall(r"/\*([0-9a-f]{4,})\*/ +(@!?U?P\w+ )? *(\S.*?) *;", code)
    return [Instruction(int(place, 16), bool(condition), text) for place, condition, text in found]


def looked_at(line: str) -> set[int]:
    """The registers that an instruction reads. What it writes comes first, where it is no store."""
    operation, _, operands = line.partition(" ")
    if not operation.startswith("ST") and re.match(r"R\d", operands):
        operands = operands.partition(",")[2]
    return {int(first) + i for first, width in REGISTER.findall(operands) for i in range(WIDTHS[width])}


def most_at_once(code: list[Instruction]) -> int:
    """The longest run of streaming loads, of which nothing is looked at before the last, on any way through the code:
    what is whole goes another way than what is not, and their ways join between two loads."""
    index = {instruction.place: i for i, instruction in enumerate(code)}

    def run_from(start: int) -> int:
        ways, seen, most = [(start, frozenset[int](), 0)], set(), 0
        while ways:
            at, asked, loads = ways.pop()
            most = max(most, loads)
            _, conditional, text = code[at]
            if (at, asked) in seen or asked & looked_at(text):
                continue
            seen.add((at, asked))
            if load := LOAD.match(text):
                first, width = int(load[2]), WIDTHS[load[1]]
                asked, loads = asked | set(range(first, first + width)), loads + 1
            jump = re.match(r"BRA\b.* 0x([0-9a-f]+)", text)
            if jump:
                ways.append((index[int(jump[1], 16)], asked, loads))
            if at + 1 < len(code) and (conditional or not (jump or text.startswith("EXIT"))):
                ways.append((at + 1, asked, loads))
        return most

    return max((run_from(i) for i, instruction in enumerate(code) if LOAD.match(instruction.text)), default=0)


# By file, what picks its kernels, and how many loads of theirs stand together.
KERNELS = [
    ("token_rewards", r"sum_kernelI", 8),  # rewards and mask, four packs of each
    ("token_rewards", r"scan_kernelIff", 4),  # rewards and mask, two packs of each
    ("token_rewards", r"scan_kernelI\w+fLb0", 3),  # two-byte rewards, one pack
    ("gae", r"scan_kernelIff", 6),  # values as well
    ("gae", r"scan_kernelI\w+fLb1", 4),
    # Log-probabilities, old, reference, advantages, and a mask in one of two ways; outside the minimal specializations
    # rollout and entropy too.
    ("policy_loss", r"loss_grad_kernelI\w+Lb1ELNS\d_14SpecializationE[24]", 6),
    ("policy_loss", r"loss_grad_kernelI\w+Lb1ELNS\d_14SpecializationE[13]", 8),
    ("policy_loss", r"count_tokens_kernelI\w+Lb1ELb0E", 6),
    ("grouped_policy_loss", r"rewards_to_advantages_kernelI\w+Lb1ELb0E", 6),
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("name", "kernel", "least"), KERNELS)
def test_loads_are_on_their_way_together(name: str, kernel: str, least: int) -> None:
    found = {n: most_at_once(code) for n, code in kernels(name).items() if re.search(kernel, n)}
    assert found and min(found.values()) >= least, found
