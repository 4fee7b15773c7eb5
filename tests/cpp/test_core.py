"""Compiles and runs ``test_core.cpp``: the C++ core needs neither Python nor torch."""

from __future__ import annotations

import graphlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.representative
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(not CSRC.exists(), reason="the C++ sources are not here")
def test_core(tmp_path: Path) -> None:
    program = tmp_path / "test_core"
    sources = map(str, [HERE / "test_core.cpp", *sorted(CSRC.glob("core/*.cpp"))])
    command = [str(COMPILER), "-std=c++17", "-O0", "-pthread", f"-I{CSRC}", *sources, "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# A folder may include those named here, and itself.
FLOORS = {
    "core": set(),
    "ops": {"core"},
    "cuda": {"core", "ops"},
    "state": {"core"},
    "pack": {"core"},
    "bindings": {"core", "ops", "cuda", "state", "pack"},
}


def includes() -> dict[str, set[str]]:
    """What each unit of csrc includes; a unit is a header and the source file of the same stem."""
    units: dict[str, set[str]] = {}
    for source in [p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu")]:
        unit = str(source.relative_to(CSRC).with_suffix(""))
        found = {name.rpartition(".")[0] for name in INCLUDE.findall(source.read_text(encoding="utf-8"))}
        units.setdefault(unit, set()).update(found - {unit, "cuda_emulation"})
    return units


def test_csrc_has_no_circle_of_includes() -> None:
    graphlib.TopologicalSorter(includes()).prepare()  # raises CycleError, with the circle


def test_folders_of_csrc_include_lower_ones_alone() -> None:
    for unit, found in includes().items():
        folder = unit.partition("/")[0]
        assert {name.partition("/")[0] for name in found} <= FLOORS[folder] | {folder}, unit


def test_only_the_bindings_know_python_and_nothing_knows_torch() -> None:
    for source in [path for path in CSRC.rglob("*") if path.is_file()]:
        text = source.read_text(encoding="utf-8")
        assert not any(name in text for name in ("torch/", "ATen")), source
        if source.relative_to(CSRC).parts[0] != "bindings":
            assert not any(name in text for name in ("Python.h", "PyObject", "pybind11")), source


KERNELS = {"factorize", "gae", "group_advantage", "grouped_policy_loss", "logprob", "policy_loss", "token_rewards"}
MODEL_KERNELS = {
    "draw_tokens",
    "path_attention",
    "rms_norm",
    "tree_attention",
}  # of the sampler's and the trainer's model; no public op has them
DRIVERS = {"linear_logprob", "linear_policy_loss"}  # Python that drives the kernels of other ops


def test_an_op_has_one_stem_from_kernel_to_bench() -> None:
    root = CSRC.parent
    package, tests, benches = root / "python/turnwise/ops", root / "tests/ops", list(root.glob("bench/bench_*.py"))
    assert {p.stem for p in CSRC.glob("ops/*.h")} & {
        p.stem for p in CSRC.glob("bindings/*.cpp")
    } == KERNELS | MODEL_KERNELS
    assert {p.stem for p in CSRC.glob("cuda/*.cu")} - {"device", "probe", "scale"} == KERNELS - {"factorize"}
    for stem in KERNELS | DRIVERS:
        assert len(list(package.rglob(f"{stem}.py"))) == 1 and list(tests.rglob(f"test_{stem}.py")), stem
    timed = {p.stem.removeprefix("bench_") for p in benches if "from turnwise.ops import" in p.read_text("utf-8")}
    assert timed <= KERNELS | DRIVERS
