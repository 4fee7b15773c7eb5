"""Every Triton kernel compiles for an H100 on a machine without a GPU.

In processes of their own, as what Triton's interpreter has imported can't be compiled: see the fixture `interpreter`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import triton_modules

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
@pytest.mark.parametrize("module", triton_modules())
def test_compiles_ahead_of_time(module: str, tmp_path: Path) -> None:
    result = run("-P", "-c", COMPILE, module, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("\n") >= 1
