"""Compiles and runs ``test_core.cpp``: the C++ core needs neither Python nor torch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(not CSRC.exists(), reason="the C++ sources are not here")
def test_core(tmp_path: Path) -> None:
    flags = [str(COMPILER), "-std=c++17", "-O1", "-pthread", f"-I{CSRC}"]
    sources = [HERE / "test_core.cpp", *sorted(CSRC.glob("core/*.cpp")), *sorted(CSRC.glob("ops/*.cpp"))]
    for kernel in CSRC.glob("ops/*_kernel.cpp"):  # each exports a function that its build names
        sources.remove(kernel)
        sources.append(tmp_path / f"{kernel.stem}.o")
        name = f"-DTW_ISA={kernel.stem}s_baseline"
        subprocess.run([*flags, name, "-c", str(kernel), "-o", str(sources[-1])], check=True, timeout=300)
    program = tmp_path / "test_core"
    subprocess.run([*flags, *map(str, sources), "-o", str(program)], check=True, timeout=300)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_core_knows_no_python_and_no_torch() -> None:
    for source in [*CSRC.glob("core/*"), *CSRC.glob("ops/*"), *CSRC.glob("cuda/*")]:
        text = source.read_text(encoding="utf-8")
        assert not any(name in text for name in ("Python.h", "pybind11", "torch/", "ATen")), source
