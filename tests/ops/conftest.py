"""The backends for the tests of every op, and which of the slow cases CI runs.

An op's tests take the fixture `target`, or `kernel`, and run on every backend that this machine has. Without a GPU the
kernels for one run too, as slow cases: CUDA's in an emulator, Triton's in its interpreter. CI runs a representative of
each (see `pytest_collection_modifyitems`), `make test-all` runs all.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from turnwise.ops.common import dispatch as backends

from ..conftest import axes, covering
from .definition import Batch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# How many parameters of a test meet in each combination of their values; 9 runs the whole products.
TOGETHER = int(os.environ.get("TURNWISE_OPS_TOGETHER", "2"))
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


# ---------------------------------------------------------------------------------------------------------------------
# Backends
# ---------------------------------------------------------------------------------------------------------------------
class Target(NamedTuple):
    """The ``backend`` argument of an op, and the ``device`` for its tensors."""

    backend: str
    device: str
    emulated: bool = False  # CUDA kernels on CPU tensors

    @property
    def simulated(self) -> bool:
        """True for a GPU's kernels on the host, thousands of times slower: keep inputs small."""
        return self.emulated or self.interpreted

    @property
    def interpreted(self) -> bool:
        return self.backend == "triton" and self.device == "cpu"

    @property
    def quick(self) -> bool:
        return self.backend == "native" and not self.emulated

    @property
    def on_gpu(self) -> bool:
        """True if the op looks at no values unless ``check=True`` asks for it."""
        return self.device == "cuda" or self.simulated

    def on(self, given: Any) -> Any:
        """Move tensors, and those in a dict or sequence, to the device."""
        if isinstance(given, dict):
            return {name: self.on(value) for name, value in given.items()}
        if isinstance(given, (list, tuple)):
            return type(given)(self.on(value) for value in given)
        return given.to(self.device) if isinstance(given, Tensor) else given


TARGETS = {"native": Target("native", "cpu"), "torch": Target("torch", "cpu")}
SIMULATED = {"cuda-emulated": Target("native", "cpu", emulated=True)}
GPU: dict[str, Target] = {}
if torch.cuda.is_available():
    GPU = {"cuda": Target("native", "cuda"), "triton": Target("triton", "cuda"), "torch-cuda": Target("torch", "cuda")}
else:
    SIMULATED["triton-interpreted"] = Target("triton", "cpu")


def _targets(reference: bool) -> list[Any]:
    marked = ((TARGETS, ()), (SIMULATED, pytest.mark.slow), (GPU, pytest.mark.gpu))
    found = [pytest.param(target, id=name, marks=mark) for table, mark in marked for name, target in table.items()]
    return [param for param in found if reference or param.values[0].backend != "torch"]


def _use(target: Target, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    if target.emulated:
        monkeypatch.setattr(backends, "emulator", request.getfixturevalue("emulator"))
    elif target.simulated:
        request.getfixturevalue("interpreter")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(backends, "interpreted", True)
    return target


@pytest.fixture(params=_targets(reference=True))
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Each backend in turn."""
    return _use(request.param, request, monkeypatch)


@pytest.fixture(params=_targets(reference=False))
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Each backend except PyTorch, for tests that compare with PyTorch in float64."""
    return _use(request.param, request, monkeypatch)


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Imports Triton, and the kernels, as functions of its interpreter with blocks that suit it. They can't be compiled
    in this process any more; without a GPU nothing asks for that."""
    for name in [*sys.modules]:
        ours = name.startswith("turnwise.ops.") and "triton" in name.split(".")[-1]
        if ours or (name.partition(".")[0] == "triton" and not name.startswith("triton._C")):
            module = sys.modules.pop(name)
            package, _, stem = name.rpartition(".")
            if getattr(sys.modules.get(package), stem, None) is module:
                delattr(sys.modules[package], stem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(backends, "interpreted", True)
        for name in triton_modules():
            importlib.import_module(f"turnwise.ops.{name}")


def triton_modules() -> list[str]:
    """The modules with Triton kernels, below ``turnwise.ops``."""
    package = Path(backends.__file__).parents[1]
    files = [path for path in package.rglob("*triton.py") if "COMPILE_CASES" in path.read_text(encoding="utf-8")]
    return sorted(".".join(path.relative_to(package).with_suffix("").parts) for path in files)


@pytest.fixture(scope="session")
def emulator() -> Any:
    """``turnwise._C`` built so that its CUDA kernels run on CPU tensors."""
    folder = ROOT / "build" / "emulated"
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    programs = sysconfig.get_path("scripts")
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    settings = ["-DTURNWISE_CUDA=EMULATED", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
    # pybind11 sets link-time optimisation otherwise, which takes half a minute.
    settings += ["-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF"]
    settings += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # the tests' other processes build it too
        for command in (
            ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *settings],
            ["cmake", "--build", str(folder), "--target", "_C"],
        ):
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stdout + result.stderr
    (module,) = folder.glob("_C*.so")
    loader = ExtensionFileLoader("_C", str(module))
    spec = importlib.util.spec_from_loader("_C", loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    assert loaded.emulates_cuda
    return loaded


# ---------------------------------------------------------------------------------------------------------------------
# What CI runs of the slow cases
# ---------------------------------------------------------------------------------------------------------------------
@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py thins out products of parameters
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark one slow case of each kind as `representative`, which CI runs too.

    - Of a simulated GPU: for each op of the table its first layout (`test_contracts.py` calls it ``one``).
    - Of tests that compile a program or ask for the emulator themselves, and of peers: each function's first case.

    The cases of a function cover each pair of its parameters on every backend; the rest of their product exists only
    with ``TURNWISE_OPS_TOGETHER=9``.
    """
    products: dict[tuple[str, object], list[pytest.Function]] = {}
    seen: set[str] = set()
    for item in items:
        if not isinstance(item, pytest.Function) or not item.path.is_relative_to(HERE):
            continue
        given = item.callspec.params if hasattr(item, "callspec") else {}
        target = given.get("target") or given.get("kernel")
        function = f"{item.path}::{item.originalname}"
        if hasattr(item, "callspec"):
            products.setdefault((function, target), []).append(item)
        if isinstance(target, Target) and target.simulated:
            if given.get("layouts") == "one":
                item.add_marker(pytest.mark.representative)
        elif item.get_closest_marker("slow") or {"emulator", "compile_and_run"} & {*item.fixturenames}:
            item.add_marker(pytest.mark.slow)
            if function not in seen:
                item.add_marker(pytest.mark.representative)
            seen.add(function)
    dropped: set[pytest.Item] = set()
    for cases in products.values():
        chosen = covering([axes(case) for case in cases], TOGETHER)
        dropped |= {case for index, case in enumerate(cases) if index not in chosen}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


# ---------------------------------------------------------------------------------------------------------------------
# Programs with kernels
# ---------------------------------------------------------------------------------------------------------------------
# The emulated build of CMakeLists.txt compiles kernels with these, which add a call before every access to memory.
SETTINGS = ("instrumentation-with-call-threshold=0", "stack=0", "globals=0")
BOUNDS_FLAGS = {
    "GNU": ["-fsanitize=kernel-address", *(f"--param=asan-{setting}" for setting in SETTINGS)],
    "Clang": ["-fsanitize=kernel-address", *(part for s in SETTINGS for part in ("-mllvm", f"-asan-{s}"))],
}


@pytest.fixture
def compile_and_run() -> Callable[..., list[str]]:
    """``compile_and_run(program, given="")``: the lines that a C++ file with kernels prints, built as the emulator's
    kernels are. ``given`` is its standard input."""

    def run(program: Path, given: str = "") -> list[str]:
        said = subprocess.run([str(COMPILER), "--version"], capture_output=True, text=True, check=True).stdout
        bounds = BOUNDS_FLAGS["Clang" if "clang" in said.lower() else "GNU"]
        emulation = ROOT / "tests" / "cpp" / "cuda_emulation"
        flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-DTURNWISE_EMULATE_CUDA"]
        include = [f"-I{ROOT / 'csrc'}", f"-I{emulation}"]
        sources = [str(emulation / "cuda_emulation.cpp"), str(ROOT / "csrc" / "core" / "check.cpp")]
        kernels, binary = program.with_suffix(".o"), program.with_suffix("")
        for command in (
            [str(COMPILER), *flags, *bounds, *include, "-c", str(program), "-o", str(kernels)],
            [str(COMPILER), *flags, *include, str(kernels), *sources, "-o", str(binary)],
        ):
            subprocess.run(command, check=True, timeout=300)
        done = subprocess.run([str(binary)], input=given, capture_output=True, text=True, timeout=300, check=True)
        return done.stdout.splitlines()

    return run


# ---------------------------------------------------------------------------------------------------------------------
# Processes, batches
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Any]]:
    """``run_ranks(file, world)``: the results of the ``work(rank, world)`` of a file, in a process for each rank."""

    def run(file: str, world: int) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        command = [sys.executable, "-P", str(HERE / "ranks.py"), file, str(folder), str(world)]
        workers = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(world)
        ]
        try:
            said = [worker.communicate(timeout=500)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        assert [worker.returncode for worker in workers] == [0] * world, "\n".join(said)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]

    return run


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """``make_batch(seed, rows, width, **options)``: rows of any length; some are empty, have holes or are far off."""
    return Batch.draw
