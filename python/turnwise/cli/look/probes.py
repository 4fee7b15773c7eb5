"""The checks of ``turnwise doctor`` that compute: torch, and turnwise's ops on every backend and device.

Every probe runs in its own process (``python -m turnwise.cli.look.probes NAME``), because torch takes seconds to
import. If a probe raises, the part does not work.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Literal

Status = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class DoctorRow:
    """One row. ``broken`` is a required part that does not work; ``missing`` an optional part that can't be used.

    Example: ``DoctorRow("peft", "missing", "not installed", remedy="pip install 'turnwise[peft]'")``
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def use_torch() -> list[DoctorRow]:
    """Compute a gradient on the CPU, and multiply matrices on every GPU."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    x = torch.ones(2, 2, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]], f"wrong gradient {x.grad}"
    checks = [DoctorRow("torch", "ok", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads, a gradient")]
    if not torch.cuda.is_available():
        reason = "torch sees no GPU" if torch.version.cuda else "torch is a CPU build"
        remedy = "install a CUDA build of torch on a machine with a GPU"
        return [*checks, DoctorRow("torch.cuda", "missing", reason, remedy)]
    for index in range(torch.cuda.device_count()):
        assert (torch.ones(64, 64, device=f"cuda:{index}") @ torch.ones(64, 64, device=f"cuda:{index}")).sum() == 64**3
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [*checks, DoctorRow("torch.cuda", "ok", f"a matrix product on {', '.join(names)}")]


def use_ops() -> list[DoctorRow]:
    """Run one op with every backend, on the CPU and on every GPU, and compare the results with plain PyTorch."""
    checks = []
    try:
        extension = importlib.import_module("turnwise._C")
    except ImportError as error:
        remedy = "reinstall turnwise (from source it needs a C++17 compiler); until then the ops run on plain PyTorch"
        checks.append(DoctorRow("turnwise._C", "broken", f"does not load: {error}", remedy))
        extension = None
    import torch

    from turnwise import ops

    def run_op(backend: str, device: str) -> None:
        rewards, groups = torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([0, 0, 1, 1])
        with ops.backend("torch"):
            expected = ops.group_advantage(rewards, groups)
        with ops.backend(backend):
            found = ops.group_advantage(rewards.to(device), groups.to(device)).cpu()
        assert torch.allclose(found, expected, atol=1e-5), f"{found} on {device}, expected {expected}"

    # Check each backend; a failed comparison raises.
    if extension is not None:
        run_op("native", "cpu")
        checks.append(DoctorRow("turnwise._C", "ok", f"group_advantage on the CPU, instruction set {extension.isa()}"))
        checks.append(check_cuda(extension, lambda index: run_op("native", f"cuda:{index}")))
    run_op("torch", "cpu")
    checks.append(DoctorRow("ops: torch", "ok", "group_advantage on the CPU"))
    # Triton is optional: run it on every GPU, or on the CPU if there is none.
    state = ops.available_backends()["triton"]
    if not state.startswith("available"):
        return [*checks, DoctorRow("ops: triton", "missing", state.removeprefix("unavailable: "))]
    for device in [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]:
        run_op("triton", device)
    return [*checks, DoctorRow("ops: triton", "ok", f"group_advantage; {state}")]


def check_cuda(extension: ModuleType, launch: Callable[[int], None]) -> DoctorRow:
    """Describe the CUDA part of the compiled module, and ``launch`` an op on every device that it finds."""
    if not extension.with_cuda:
        remedy = "build turnwise where nvcc is, with -C cmake.define.TURNWISE_CUDA=ON"
        return DoctorRow("turnwise CUDA", "missing", "this build has CPU kernels only", remedy)
    runtime = ".".join(map(str, extension.cuda_runtime_version()))
    built = f"runtime {runtime}, architectures {extension.cuda_architectures()}"
    driver = "install a current NVIDIA driver if there is a GPU"
    try:
        count = extension.cuda_device_count()
    except RuntimeError as error:  # no driver, or one that is too old
        return DoctorRow("turnwise CUDA", "missing", f"{built}; {error}", driver)
    if not count:
        return DoctorRow("turnwise CUDA", "missing", f"{built}; no device", driver)

    # Launch the op on every device, and describe each device or its problem.
    names, problems = [], 0
    for index in range(count):
        device = extension.cuda_device(index)
        problem = extension.cuda_unsupported_reason(index)
        if not problem:
            try:
                launch(index)
            except (RuntimeError, AssertionError) as error:
                problem = str(error)
        problems += bool(problem)
        name = f"{device['name']} ({device['memory_bytes'] / 1e9:.0f} GB)"
        names.append(f"{name}: {problem or 'group_advantage'}")
    remedy = "install a current NVIDIA driver, or build turnwise for these devices; the ops use Triton or PyTorch there"
    status: Status = "missing" if problems else "ok"
    return DoctorRow("turnwise CUDA", status, f"{built}; {', '.join(names)}", remedy if problems else "")


PROBES = {"torch": use_torch, "ops": use_ops}

if __name__ == "__main__":
    print(json.dumps([asdict(check) for check in PROBES[sys.argv[1]]()]))
