"""Parts that the Triton kernels share, and the description of a kernel to compile ahead of time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

# Signatures as Triton writes them.
TYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float64": "fp64"}

FUSED = {"enable_fp_fusion": True}  # named, because Triton 3.10 changes the default to False


@triton.jit
def _probe_kernel() -> None:
    pass


def load_probe(index: int) -> None:
    """Compile an empty kernel for a CUDA device (-1: the current one) and load it there without launching it.

    Passes on Triton's error if there is no driver or no C compiler, or if Triton has no code for the device.
    """
    with torch.cuda.device(index):
        _probe_kernel.warmup(grid=(1,), **FUSED)[(1,)]


@dataclass(frozen=True)
class CompileCase:
    """One kernel with the types of one call, to compile ahead of time.

    ``signature``: type of each parameter by name, ``"*fp32"``, ``"i32"``, ``"constexpr"``. ``constexprs``: values of
    the constants. ``aligned``: the parameters (pointers, strides) that are multiples of 16, as a launch would find
    them. ``instructions``: text that the PTX must contain, for example ``"ld.global.v4"`` or ``"wgmma"``. ``without``:
    text that it must not contain.

    Example: ``CompileCase(kernel, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 1024}, ("x",))``
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # num_warps, num_stages, enable_fp_fusion
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        types = "-".join(t for t in self.signature.values() if t != "constexpr")
        values = "-".join(f"{key}={value}" for key, value in self.constexprs.items())
        return f"{self.kernel.__name__}[{types}]{values}"

    def compile(self, target: Any) -> Any:
        """Compile the kernel; the result holds ``.asm["ptx"]`` and ``.asm["cubin"]``. Needs no GPU."""
        assert os.environ.get("TRITON_INTERPRET") != "1", "interpreted kernels can't be compiled here"
        names = list(self.kernel.arg_names)
        missing = [name for name in names if name not in self.signature]
        assert not missing, f"{self.kernel.__name__}: no type for {missing}"
        source = ASTSource(
            fn=self.kernel,
            signature={name: self.signature[name] for name in names},
            constexprs={(names.index(name),): value for name, value in self.constexprs.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned},
        )
        return triton.compile(source, target=target, options=dict(self.options))
