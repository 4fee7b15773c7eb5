"""The emulator that CUDA kernels are tested in, and the smallest kernel there is: a gradient scaled in place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from turnwise.ops.common import dispatch as backends

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(
    params=[pytest.param("cuda-emulated", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def core(request):
    """``(module, device)``."""
    return (
        (request.getfixturevalue("emulator"), "cpu")
        if request.param == "cuda-emulated"
        else (backends.extension, "cuda")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 3, 8, 1023, 20_001])
def test_scale(core, dtype, size) -> None:
    module, device = core
    values = torch.linspace(-3, 3, size + 1, device=device).to(dtype)
    for start in (0, 1):  # 1: an address that is no multiple of 16
        for factor in (1.0, -0.5, 0.0):
            mine = values.clone()
            part = mine[start : start + size]
            module.cuda_scale(part, torch.tensor(factor, device=device), backends.stream_of(part))
            assert torch.equal(part, (values[start : start + size].float() * factor).to(dtype))
            assert torch.equal(mine[start + size :], values[start + size :])


def test_scale_refuses(core) -> None:
    module, device = core
    values = torch.zeros(4, device=device)
    with pytest.raises(ValueError, match="factor"):
        module.cuda_scale(values, torch.zeros(2, device=device), 0)
    with pytest.raises(ValueError, match=r"values\.dtype=int32: expected float32"):
        module.cuda_scale(values.int(), torch.zeros((), device=device), 0)
    with pytest.raises(ValueError, match="contiguous"):
        module.cuda_scale(torch.zeros(4, 4, device=device).t(), torch.zeros((), device=device), 0)


def test_a_build_without_cuda_says_so() -> None:
    if not backends.extension.with_cuda:
        with pytest.raises(TypeError, match="expected a CUDA tensor"):
            backends.extension.cuda_scale(torch.zeros(1), torch.zeros(()), 0)


def test_tensors_of_two_devices_are_rejected(tmp_path, compile_and_run) -> None:
    """Before a kernel reads the memory of another device, after which no call works any more."""
    program = tmp_path / "devices.cpp"
    program.write_text(
        '#include <cstdio>\n#include "cuda/gae.cu"\n#include "cuda/scale.cu"\nusing namespace turnwise;\n'
        "int main() {\n  float memory[64] = {};\n"
        "  auto view = [&](int device) {\n"
        "    View v; v.data = memory; v.dims = 2; v.shape[0] = v.shape[1] = v.stride[0] = 2; v.stride[1] = 1;\n"
        "    v.device = device; return v;\n  };\n"
        "  View one = view(-1); one.dims = 0;\n  View space = view(-1); space.dtype = DType::u8; space.dims = 1;\n"
        "  space.shape[0] = 128; space.stride[0] = 1;\n"
        "  auto report = [&](auto run) {\n"
        '    try { run(); std::puts("ran"); } catch (const InvalidInput& e) { std::puts(e.what()); }\n  };\n'
        "  for (int other : {-1, 1}) {\n"
        "    report([&] { cuda::scale(view(other), one, {}); });\n"
        "    report([&] { cuda::gae({view(-1), view(other), {}, {}}, 1, 1, view(-1), view(-1), space, {}); });\n"
        "  }\n}\n"
    )
    refused = ["expected all tensors on one device"] * 2
    assert compile_and_run(program) == ["ran", "ran", *refused]


# What a kernel can do wrong, and what the emulator must say of it.
KERNELS = {
    "sum": ("float v = threadIdx.x; v = block_sum(v, shared<float>()); if (threadIdx.x == 0) *out = v;", None),
    "grid": (
        "if (threadIdx.x == 0) atomicAdd(total, 1); grid_barrier(); if (threadIdx.x == 7) out[blockIdx.x] = *total;",
        None,
    ),
    "no barrier": (
        "float* s = shared<float>(); s[threadIdx.x] = threadIdx.x; *out = s[(threadIdx.x + 1) % 64];"
        'if (!(*out == (threadIdx.x + 1) % 64)) throw std::runtime_error("garbage");',
        "garbage",
    ),
    "half a warp": ("if (threadIdx.x < 16) *out = warp_sum(1.0f);", "never reach"),
    "half a block": ("if (threadIdx.x < 32) return; if (threadIdx.x == 40) return; __syncwarp();", "never reach"),
    "too much shared memory": ("shared<float>()[32] = 0;", "past the shared memory"),
    "a read before the buffer": ("total[0] = int(out[-1]);", "an access of 4 bytes outside every buffer"),
    "a write past the buffer": (
        "if (threadIdx.x == 40) out[8] = 1;",
        "an access of 4 bytes outside every buffer: 32 bytes into one of 32, by thread 40 of block 0",
    ),
    "a pack past the buffer": (
        "load_streaming<float, 4>(out + 8);",
        "an access of 16 bytes outside every buffer: 32 bytes into one of 32",
    ),
    "a pack half past the buffer": (
        "Pack<float, 2> two{}; memcpy(out + 7, &two, sizeof two);",
        "an access of 8 bytes outside every buffer: 28 bytes into one of 32",
    ),
    "an atomic past the buffer": ("atomicAdd(total + 1, 1);", "an access of 4 bytes outside every buffer: 4 bytes"),
    "memory of no argument": ("*reinterpret_cast<volatile int*>(16);", "an access of 4 bytes outside every buffer"),
    "misaligned": ("load_streaming<float, 4>(out + 1);", "misaligned"),
    "part of a warp": ("__shfl_sync(0xffffu, 1, 0);", "part of the warp"),
}


@pytest.mark.slow
def test_bounds_are_checked_in_every_kernel(emulator) -> None:
    """Every file of kernels is compiled with the calls that check its accesses."""
    commands = (ROOT / "build" / "emulated" / "build.ninja").read_text().split("\nbuild ")
    compiled = {
        Path(match[1]).name: command
        for command in commands
        if (match := re.match(r"\S*csrc/cuda/(\w+\.cu)\.o:", command))
    }
    assert compiled.keys() == {file.name for file in (ROOT / "csrc" / "cuda").glob("*.cu")} - {"device.cu"}
    for name, command in compiled.items():
        assert "-fsanitize=kernel-address" in command and "call-threshold=0" in command, name


def test_the_emulator_finds_what_is_wrong(tmp_path, compile_and_run) -> None:
    kernels = "\n".join(
        f"__global__ void kernel{i}(float* out, int* total) {{ {body} }}"
        for i, (body, _) in enumerate(KERNELS.values())
    )
    calls = "\n".join(
        f"report([&] {{ *total = 0; {'launch_cooperative' if name == 'grid' else 'launch'}"
        f"(kernel{i}, {4 if name == 'grid' else 1}, 64, 128, Stream{{}}, out, total); }});"
        for i, name in enumerate(KERNELS)
    )
    program = tmp_path / "kernels.cpp"
    program.write_text(
        '#include <cstdio>\n#include <new>\n#include "cuda/block.h"\n'
        "using namespace turnwise;\nusing namespace turnwise::cuda;\n"
        f"{kernels}\nint main() {{\n"
        "  auto* out = new (std::align_val_t(64)) float[8](); auto* total = new int();\n"
        "  auto report = [&](auto run) {\n"
        "    emulation::allow(out, 32); emulation::allow(total, 4);\n"
        '    try { run(); std::printf("%g %g %g\\n", out[0], out[3], double(*total)); }\n'
        '    catch (const std::exception& error) { std::printf("%s\\n", error.what()); }\n  };\n'
        f"{calls}\n}}\n"
    )
    lines = compile_and_run(program)
    assert lines[:2] == ["2016 0 0", "4 4 4"]
    for line, (name, (_, message)) in zip(lines, KERNELS.items(), strict=True):
        if message is not None:
            assert message in line, name
