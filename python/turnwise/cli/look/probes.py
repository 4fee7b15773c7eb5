"""The checks of ``turnwise doctor`` that import a package: each uses it once and describes what it did.

Every probe runs in its own process (``python -m turnwise.cli.look.probes NAME``), because some packages take seconds to
import, hang, or break others. If a probe raises, the part does not work.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

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


# ---------------------------------------------------------------------------------------------------------------------
# torch, and turnwise's own ops
# ---------------------------------------------------------------------------------------------------------------------
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


# ---------------------------------------------------------------------------------------------------------------------
# Packages: each function returns a description of what it did
# ---------------------------------------------------------------------------------------------------------------------
def use_numpy() -> str:
    import numpy

    assert numpy.arange(4).sum() == 6
    return "added numbers"


def use_transformers() -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size: dict[str, Any] = {
        "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1,
    }  # fmt: skip
    logits = LlamaForCausalLM(LlamaConfig(**size))(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, 16) and logits.isfinite().all()
    return "ran a small Llama"


def use_tokenizers() -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    assert Tokenizer(WordLevel({"word": 3}, unk_token="word")).encode("word").ids == [3]
    return "encoded a word"


def use_safetensors() -> str:
    import numpy
    from safetensors.numpy import load, save

    assert load(save({"a": numpy.ones(3)}))["a"].sum() == 3
    return "saved and loaded a tensor"


def use_pydantic() -> str:
    from pydantic import TypeAdapter

    assert TypeAdapter(int).validate_python("3") == 3
    return "validated a number"


def use_rich() -> str:
    from rich.console import Console

    file = io.StringIO()
    Console(file=file).print("[bold]text[/]")
    assert file.getvalue() == "text\n"
    return "printed a line"


def use_triton() -> str:
    """Compile a kernel of turnwise for an H100, without a GPU; the row ``ops: triton`` shows if kernels run here."""
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    from triton.backends.compiler import GPUTarget

    from turnwise.ops.advantage.triton import COMPILE_CASES

    assert COMPILE_CASES[0].compile(GPUTarget("cuda", 90, 32)).asm["cubin"]
    return "compiled a kernel for an H100"


def use_aiohttp() -> str:
    from aiohttp import ClientSession, web

    async def request() -> str:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(text="hello")

        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as response:
            text = await response.text()
        await runner.cleanup()
        return text

    assert asyncio.run(request()) == "hello"
    return "served and requested a page"


def use_vllm() -> str:
    from turnwise.inference.vllm.worker import vllm_or_raise

    vllm_or_raise()
    import vllm

    assert vllm.SamplingParams(max_tokens=3).max_tokens == 3
    return "imported the engine and made sampling parameters; no model was loaded"


def use_peft() -> str:
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"]))
    assert model(torch.ones(1, 4)).shape == (1, 4)
    return "ran an adapter"


def use_tensorboard() -> str:
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            writer.add_scalar("a", 1.0, 0)
        assert any(path.stat().st_size for path in Path(folder).iterdir())
    return "wrote an event file"


def use_wandb() -> str:
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
        run.log({"a": 1})
        run.finish()
        assert any(Path(folder).rglob("*.wandb"))
    return "logged an offline run"


def use_matplotlib() -> str:
    from matplotlib.figure import Figure

    file = io.BytesIO()
    figure = Figure()
    figure.subplots().plot([1, 2])
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")
    return "drew a curve"


def use_bm25s() -> str:
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(["red fox", "blue whale"], show_progress=False), show_progress=False)
    found, _ = index.retrieve(bm25s.tokenize(["whale"], show_progress=False), k=1, show_progress=False)
    assert found[0][0] == 1
    return "found a document"


def use_datasets() -> str:
    from datasets import Dataset

    assert Dataset.from_dict({"a": [1, 2]})[1] == {"a": 2}
    return "read a row"


def probe_of(name: str) -> Callable[[], Any]:
    """Return the probe of a package, here or in ``peer_probes``."""
    from turnwise.cli.look import peer_probes

    here = sys.modules[__name__]
    found: Callable[[], Any] = getattr(here if hasattr(here, f"use_{name}") else peer_probes, f"use_{name}")
    return found


def main(name: str) -> None:
    """Run the probe ``name`` and print its sentence, or its rows, as JSON in the last line."""
    found = probe_of(name)()
    print(json.dumps(found if isinstance(found, str) else [asdict(check) for check in found]))


if __name__ == "__main__":
    main(sys.argv[1])
