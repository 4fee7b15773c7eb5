"""Kernels that are as fast as memory ask for all that a thread needs before they look at the first of it: a load that
waits for the one before it leaves the memory idle. Read off what nvcc makes of them, as no GPU is needed for that."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc")
REGISTER = re.compile(r"%[a-z]+\d+")


def kernels(name: str, folder: Path) -> dict[str, str]:
    """The PTX of each kernel in a file of ``csrc/cuda``, by mangled name."""
    ptx = folder / "kernels.ptx"
    command = [str(NVCC), "-std=c++17", "-O3", "-arch=sm_90", "-I", str(ROOT / "csrc"), "-ptx", "-o", str(ptx)]
    subprocess.run([*command, str(ROOT / "csrc" / "cuda" / f"{name}.cu")], check=True)
    _, *parts = re.split(r"\.entry (\w+)\(", ptx.read_text())
    return dict(zip(parts[::2], parts[1::2], strict=True))


def most_at_once(body: str) -> int:
    """The longest run of streaming loads, of which nothing is looked at before the last. Moves don't count as looks."""
    best, asked, run = 0, set(), 0
    for line in body.splitlines():
        registers = REGISTER.findall(line)
        if "ld.global.cs" in line:
            results = set(REGISTER.findall(line.split("[")[0].split("ld.global.cs")[1]))
            asked, run = asked | results, run + 1
            best = max(best, run)
        elif re.match(r"\s*mov\.", line) and len(registers) == 2:
            (to, source) = registers
            asked = asked | {to} if source in asked else asked - {to}
        elif asked & set(registers):
            asked, run = set(), 0
    return best


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("name", "kernel", "least"),
    [
        # Rewards and mask, four packs of each.
        ("token_rewards", r"sum_kernelIff", 8),
        ("token_rewards", r"sum_kernelIfh", 5),
        # Log-probabilities, old, reference, advantages and mask, as PPO reads them.
        ("policy_loss", r"main_kernelIfLb1ELNS\d_4FormE2E", 5),
    ],
)
def test_loads_are_on_their_way_together(name: str, kernel: str, least: int, tmp_path: Path) -> None:
    found = {n: most_at_once(body) for n, body in kernels(name, tmp_path).items() if re.search(kernel, n)}
    assert found and min(found.values()) >= least, found


def test_a_look_between_two_loads_is_seen() -> None:
    load = "ld.global.cs.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\nld.global.cs.f32 %f5, [%rd2];"
    assert most_at_once(load + "\nadd.f32 %f6, %f1, %f5;") == 2
    assert most_at_once(load.replace("\n", "\nmov.f32 %f7, %f1;\n")) == 2
    assert most_at_once(load.replace("\n", "\nadd.f32 %f7, %f1, %f1;\n")) == 1
