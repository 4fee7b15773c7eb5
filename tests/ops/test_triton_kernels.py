"""Every Triton kernel compiles for an H100 on a machine without a GPU, and gives right results in Triton's interpreter.

The interpreter needs a process of its own: what it has touched can't be compiled any more.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise import ops

HERE = Path(__file__).parent
OPS = Path(ops.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(OPS).with_suffix("").parts)
    for path in OPS.rglob("*triton.py")
    if "COMPILE_CASES" in path.read_text()
)
OF_TARGETS = sorted(path for path in HERE.rglob("test_*.py") if re.search(r"\btarget\b", path.read_text()))
PARTS = 6  # to be shared by the processes that run the tests

COMPILE = """
import importlib, sys
from triton.backends.compiler import GPUTarget
module = importlib.import_module("turnwise.ops." + sys.argv[1])
assert module.COMPILE_CASES
for case in module.COMPILE_CASES:
    compiled = case.compile(GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 0
    missing = [i for i in case.instructions if i not in compiled.asm["ptx"]]
    assert not missing, f"{case.name}: no {missing} in the PTX"
    present = [i for i in case.without if i in compiled.asm["ptx"]]
    assert not present, f"{case.name}: {present} in the PTX"
    shared = compiled.metadata.shared
    assert shared <= 99 << 10, f"{case.name}: {shared} bytes, more shared memory than a block of capability 8.6 has"
    print(case.name)
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=1200, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_compiles_ahead_of_time(module: str, tmp_path: Path) -> None:
    result = run("-P", "-c", COMPILE, module, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("\n") >= 1


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's run")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("together", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_op_in_the_interpreter(part: int, together: int) -> None:
    """Of products of parameters, the cases that contain each value (each pair): an op takes seconds here."""
    files = map(str, OF_TARGETS[part::PARTS])
    options = ("-q", "-x", "-p", "no:cacheprovider", "-k", "triton-interpreted", "-m", "not slow")
    result = run(
        "-m", "pytest", *options, *files, TRITON_INTERPRET="1", TURNWISE_TESTS_TOGETHER=str(together)
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    passed = result.stdout.splitlines()[-1]
    assert "passed" in passed
    print(passed)


def test_importing_the_ops_does_not_import_triton() -> None:
    code = "import sys, turnwise.ops; print('triton' in sys.modules)"
    assert run("-P", "-c", code).stdout.strip() == "False"
