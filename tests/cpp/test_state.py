"""Compiles and runs ``test_state.cpp`` and ``test_archive.cpp``: the state store without Python, under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

BUILDS = {
    "plain": ["-O2"],
    "address": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-O1", "-g", "-fsanitize=thread", "-DTURNWISE_STATE_THREADS"],
}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(not CSRC.exists(), reason="the C++ sources are not here")
@pytest.mark.parametrize(
    "build",
    [
        pytest.param("plain", marks=pytest.mark.slow),
        pytest.param("address", marks=[pytest.mark.slow, pytest.mark.representative]),
        pytest.param("thread", marks=pytest.mark.slow),
    ],
)
def test_state(build: str, tmp_path: Path) -> None:
    flags = [str(COMPILER), "-std=c++17", "-pthread", f"-I{CSRC}", *BUILDS[build]]
    if build != "plain":
        empty = tmp_path / "empty.cpp"
        empty.write_text("int main() { return 0; }\n", encoding="utf-8")
        program = tmp_path / "empty"
        known = subprocess.run([*flags, str(empty), "-o", str(program)], capture_output=True, timeout=60)
        if known.returncode or subprocess.run([str(program)], capture_output=True, timeout=60).returncode:
            pytest.skip(f"{COMPILER} has no {build} sanitizer here")
    store = list(map(str, sorted(CSRC.glob("state/*.cpp"))))
    subprocess.run([*flags, "-c", *store], check=True, timeout=300, cwd=tmp_path)
    objects = list(map(str, sorted(tmp_path.glob("*.o"))))
    assert len(objects) == len(store)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    for name in ("test_state", "test_archive"):
        program = tmp_path / name
        # The store is optimised, the tests themselves aren't: their compilation would be the longest part.
        unoptimised = ["-O0"] if build == "plain" else []
        source = str(HERE / f"{name}.cpp")
        subprocess.run([*flags, *unoptimised, source, *objects, "-o", str(program)], check=True, timeout=300)
        result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, env=environment)
        assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
