"""The backends for the tests of every op, and a policy loss written token by token in Python floats."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from turnwise.ops import KL, Clip, ImportanceCorrection
from turnwise.ops.common import dispatch as backends

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


# ---------------------------------------------------------------------------------------------------------------------
# Backends
# ---------------------------------------------------------------------------------------------------------------------
class Target(NamedTuple):
    """The ``backend`` argument of an op, and the ``device`` for its tensors."""

    backend: str
    device: str
    emulated: bool = False  # CUDA kernels on CPU tensors


def _targets(reference: bool) -> list[Any]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [pytest.param(Target("triton", "cpu"), id="triton-interpreted")]
    targets = [
        pytest.param(Target("native", "cpu"), id="native"),
        pytest.param(Target("native", "cpu", emulated=True), id="cuda-emulated", marks=pytest.mark.slow),
    ]
    targets += [pytest.param(Target("torch", "cpu"), id="torch")] if reference else []
    if torch.cuda.is_available():
        names = {"cuda": "native", "triton": "triton"} | ({"torch-cuda": "torch"} if reference else {})
        targets += [pytest.param(Target(to, "cuda"), id=name, marks=pytest.mark.gpu) for name, to in names.items()]
    return targets


def _use(target: Target, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    if target.emulated:
        monkeypatch.setattr(backends, "emulator", request.getfixturevalue("emulator"))
    return target


@pytest.fixture(params=_targets(reference=True))
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Each backend in turn. ``cuda-emulated`` runs CUDA kernels on the host, a fibre per thread: keep inputs small."""
    return _use(request.param, request, monkeypatch)


@pytest.fixture(params=_targets(reference=False))
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Each backend except PyTorch, for tests that compare with PyTorch in float64."""
    return _use(request.param, request, monkeypatch)


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


# The emulated build of CMakeLists.txt compiles kernels with these, which add a call before every access to memory.
SETTINGS = ("instrumentation-with-call-threshold=0", "stack=0", "globals=0")
BOUNDS_FLAGS = {
    "GNU": ["-fsanitize=kernel-address", *(f"--param=asan-{setting}" for setting in SETTINGS)],
    "Clang": ["-fsanitize=kernel-address", *(part for s in SETTINGS for part in ("-mllvm", f"-asan-{s}"))],
}


def bounds_flags() -> list[str]:
    said = subprocess.run([str(COMPILER), "--version"], capture_output=True, text=True, check=True).stdout
    return BOUNDS_FLAGS["Clang" if "clang" in said.lower() else "GNU"]


def _compile_and_run(program: Path, given: str = "") -> list[str]:
    emulation = ROOT / "tests" / "cpp" / "cuda_emulation"
    flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-DTURNWISE_EMULATE_CUDA"]
    include = [f"-I{ROOT / 'csrc'}", f"-I{emulation}"]
    sources = [str(emulation / "cuda_emulation.cpp"), str(ROOT / "csrc" / "core" / "check.cpp")]
    kernels, binary = program.with_suffix(".o"), program.with_suffix("")
    for command in (
        [str(COMPILER), *flags, *bounds_flags(), *include, "-c", str(program), "-o", str(kernels)],
        [str(COMPILER), *flags, *include, str(kernels), *sources, "-o", str(binary)],
    ):
        subprocess.run(command, check=True, timeout=300)
    done = subprocess.run([str(binary)], input=given, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def compile_and_run() -> Callable[..., list[str]]:
    """``compile_and_run(program, given="")``: the lines that a C++ file with kernels prints, built as the emulator's
    kernels are. ``given`` is its standard input."""
    return _compile_and_run


@pytest.fixture
def in_threads() -> Callable[..., list[Any]]:
    """``in_threads(work)`` runs ``work(0)`` to ``work(7)`` at once, each in its own thread, and returns the results.

    It raises the error of any of them.
    """

    def run(work: Callable[[int], Any], threads: int = 8) -> list[Any]:
        start = threading.Barrier(threads)

        def begin(index: int) -> Any:
            start.wait()
            return work(index)

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(begin, range(threads)))

    return run


# ---------------------------------------------------------------------------------------------------------------------
# The policy loss by its definition
# ---------------------------------------------------------------------------------------------------------------------


def clamp(x: float, bound: float) -> float:
    return max(-bound, min(bound, x))


def kl_value(d: float, kind: str) -> float:
    match kind.rstrip("+"):
        case "k1":
            return -d
        case "abs":
            return abs(d)
        case "k2":
            return d * d / 2
        case _:
            d = clamp(d, 20)
            return clamp(math.exp(d) - d - 1, 10)


@dataclass
class Batch:
    """Padded rows ``[B, T]`` and the options of one call, in float64."""

    logprobs: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    actors: Tensor
    num_actors: int = 3
    max_length: int = 40
    options: dict[str, Any] = field(default_factory=dict)

    def padded(self, dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, Any]:
        """Return the arguments of ``policy_loss`` in padded form."""
        options = {**self.options, **changes}
        arguments = {
            "logprobs": self.logprobs.to(dtype),
            "old_logprobs": self.old.to(dtype),
            "advantages": self.advantages.to(dtype),
            "mask": self.mask,
            "actor_ids": self.actors,
            "num_actors": self.num_actors,
            "max_length": self.max_length,
            **options,
        }
        if options.get("kl"):
            arguments["ref_logprobs"] = self.ref.to(dtype)
        if options.get("correction"):
            arguments["rollout_logprobs"] = self.rollout.to(dtype)
        return arguments

    def packed(self, dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, Any]:
        """Return the arguments as packed streams. A row ends with its last trained token; masked ones before stay."""
        arguments = self.padded(dtype, **changes)
        lengths = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in self.mask]
        keep = torch.arange(self.mask.shape[1])[None] < torch.tensor(lengths)[:, None]
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.shape == self.mask.shape:
                arguments[name] = value[keep]
        arguments["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
        return arguments

    def expected(self, aggregation: str) -> tuple[float, dict[str, float]]:
        """Compute loss and metrics by their definition."""
        clip: Clip = self.options.get("clip", Clip())
        kl: KL | None = self.options.get("kl")
        correction: ImportanceCorrection | None = self.options.get("correction")
        tokens: list[list[dict[str, float]]] = []
        for b, row in enumerate(self.mask.tolist()):
            places = [t for t, trains in enumerate(row) if trains]
            mismatch = {t: (self.old[b, t] - self.rollout[b, t]).item() for t in places}
            tokens.append([])
            for t in places:
                a = (self.advantages[b] if self.advantages.dim() == 1 else self.advantages[b, t]).item()
                log_ratio = clamp((self.logprobs[b, t] - self.old[b, t]).item(), 20)
                ratio = math.exp(log_ratio)
                loss = max(-a * ratio, -a * max(1 - clip.low, min(1 + clip.high, ratio)))
                dual = clip.dual_clip is not None and a < 0 and loss > -a * clip.dual_clip
                loss = -a * clip.dual_clip if dual else loss
                if correction:
                    sequence = correction.level == "sequence"
                    total = sum(mismatch.values()) if sequence else mismatch[t]
                    loss *= min(math.exp(clamp(total, 20)), correction.cap)
                d = (self.ref[b, t] - self.logprobs[b, t]).item()
                if kl:
                    loss += kl.coef * (ratio if kl.importance_weighted else 1) * kl_value(d, kl.estimator)
                tokens[-1].append(
                    {
                        "loss": loss,
                        "clip_fraction_low": a < 0 and ratio < 1 - clip.low,
                        "clip_fraction_high": a > 0 and ratio > 1 + clip.high,
                        "dual_clip_fraction": dual,
                        "approx_kl_k1": -log_ratio,
                        "approx_kl_k3": ratio - 1 - log_ratio,
                        "ratio_mean": ratio,
                        **({"kl": kl_value(d, kl.estimator)} if kl else {}),
                        **(
                            {"mismatch_kl": -mismatch[t], "weight": math.exp(clamp(mismatch[t], 20))}
                            if correction
                            else {}
                        ),
                    }
                )
        return self._aggregate(tokens, aggregation), self._metrics([t for row in tokens for t in row])

    def _aggregate(self, tokens: list[list[dict[str, float]]], aggregation: str) -> float:
        sums = [sum(t["loss"] for t in row) for row in tokens]
        sizes = [len(row) for row in tokens]
        rows = max(sum(size > 0 for size in sizes), 1)
        match aggregation:
            case "token-mean":
                return sum(sums) / max(sum(sizes), 1)
            case "seq-mean-token-sum":
                return sum(sums) / rows
            case "seq-mean-token-mean":
                return sum(s / max(n, 1) for s, n in zip(sums, sizes, strict=True)) / rows
            case "seq-mean-token-sum-norm":
                return sum(sums) / self.max_length
        by_actor: dict[int, list[float]] = {}
        for actor, total, size in zip(self.actors.tolist(), sums, sizes, strict=True):
            entry = by_actor.setdefault(actor, [0.0, 0.0])
            entry[0] += total
            entry[1] += size
        means = [total / size for total, size in by_actor.values() if size]
        return sum(means) / max(len(means), 1)

    def _metrics(self, tokens: list[dict[str, float]]) -> dict[str, float]:
        n = max(len(tokens), 1)
        names = [name for name in (tokens[0] if tokens else {}) if name not in ("loss", "weight")]
        metrics = {name: sum(t[name] for t in tokens) / n for name in names}
        metrics["tokens"] = float(len(tokens))
        metrics["ratio_max"] = max((t["ratio_mean"] for t in tokens), default=0.0)
        metrics |= {"rejected": 0.0} if tokens and "weight" in tokens[0] else {}
        if tokens and "weight" in tokens[0]:
            weights = [t["weight"] for t in tokens]
            metrics["ess"] = sum(weights) ** 2 / (n * sum(w * w for w in weights))
        return metrics


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """``make_batch(seed, rows, width, **options)``: rows of any length; some are empty, have holes or are far off."""

    def make(
        seed: int, rows: int = 9, width: int = 37, *, spread: float = 0.5, per_token: bool = False, **options: Any
    ) -> Batch:
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        logprobs = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 4
        lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
        mask = (torch.arange(width)[None] < lengths) & (torch.rand(rows, width, generator=generator) < 0.8)
        if rows > 2:
            mask[1] = False
        return Batch(
            logprobs=logprobs,
            old=logprobs + spread * noise(rows, width),
            ref=logprobs + spread * noise(rows, width),
            rollout=logprobs + 0.3 * noise(rows, width),
            advantages=noise(rows, width) if per_token else noise(rows),
            mask=mask,
            actors=torch.randint(0, 3, (rows,), generator=generator),
            options=options,
        )

    return make


# ---------------------------------------------------------------------------------------------------------------------
# The registered ops under a function
# ---------------------------------------------------------------------------------------------------------------------
class _Calls(TorchDispatchMode):
    """Records the calls of turnwise's ops with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "turnwise":
            assert not kwargs
            once = not func.name().endswith("_backward")  # the derivative of a backward op raises
            leaves = (a.detach().requires_grad_(once and a.requires_grad) if isinstance(a, Tensor) else a for a in args)
            self.found.append((func, tuple(leaves)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def opcheck_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], set[str]]:
    """``opcheck_calls(function)`` runs it as a compiler would see it, with every op through the dispatcher.

    It checks each op that was called, with the arguments of that call, with ``torch.library.opcheck``. Returns the ops'
    names.
    """

    def check(function: Callable[[], Any]) -> set[str]:
        importlib.import_module("torch._dynamo")  # which remembers the functions of torch.compiler that it finds
        with monkeypatch.context() as patch, _Calls() as calls:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            function()
        for op, arguments in calls.found:
            torch.library.opcheck(op, arguments)
        return {op.name().removeprefix("turnwise::") for op, _ in calls.found}

    return check


# ---------------------------------------------------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Any]]:
    """``run_ranks(file, world)`` starts ``python file folder world rank`` per rank, and loads each ``rank.pt``."""

    def run(file: str, world: int) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        command = [sys.executable, "-P", file, str(folder), str(world)]
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
