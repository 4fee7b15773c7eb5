"""RMS norms of a Hugging Face model in one kernel on a CPU, where eager PyTorch takes six, and eleven for gradients.

Llama's norm and its copies in other models (Mistral, Qwen, Phi and more) take the kernel. It computes what they
compute, and rounds where they round, but adds the squares in another order. Other norms, other devices and
``torch.compile`` stay as they are.
"""

from __future__ import annotations

from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from turnwise import _C

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)  # no tensor of FSDP2 or of a compiler


def fuse_norms(model: nn.Module) -> int:
    """Give the norms of ``model`` the kernel, which they take on a CPU. Returns their number; 0 on a GPU."""
    norms = [module for module in model.modules() if is_fusible(module) and not module.weight.is_cuda]
    for norm in norms:
        norm.__dict__["forward"] = partial(_run, norm)
    return len(norms)


def is_fusible(module: nn.Module) -> bool:
    """Return True for a norm that computes as Llama's does."""
    if not type(module).__name__.endswith("RMSNorm"):
        return False
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and _computes(code) == _computes(_llama())


@cache
def _llama() -> CodeType:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm.forward.__code__


def _computes(code: CodeType) -> tuple[Any, ...]:
    """Return what ``code`` does, whatever its variables are called."""
    return code.co_code, code.co_names, code.co_consts[1:]  # behind the docstring


def _run(norm: Any, hidden: Tensor) -> Tensor:
    weight = norm.weight
    if (
        not hidden.is_cpu
        or hidden.dtype is not weight.dtype
        or hidden.dtype not in _TYPES
        or not (type(hidden) in _PLAIN and type(weight) in _PLAIN)
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    ):
        return type(norm).forward(norm, hidden)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return RMSNorm.apply(hidden, weight, norm.variance_epsilon)
    return _normalize(hidden, weight, norm.variance_epsilon, None)


def _normalize(x: Tensor, weight: Tensor, eps: float, inverse: Tensor | None) -> Tensor:
    """Return the normalized ``x [..., H]``, contiguous; write the scales of its rows to ``inverse [n]``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    to = out.detach().view(-1, x.shape[-1])
    _C.rms_norm(_rows(x), weight.detach().contiguous(), eps, to, inverse, torch.get_num_threads())
    return out


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).contiguous()


class RMSNorm(torch.autograd.Function):
    """``weight * (x / sqrt(mean(x**2) + eps))`` of ``x [..., H]`` and ``weight [H]``, with gradients to both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse)
        return _normalize(x, weight, eps, inverse)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("the kernel of RMS norms has no second derivative: delete the norms' own `forward`")
        x, weight, inverse = ctx.saved_tensors
        rows, parts = _rows(x), None
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if ctx.needs_input_grad[1]:
            parts = rows.new_empty((-(-len(rows) // _C.NORM_BLOCK), rows.shape[1]), dtype=torch.float32)
        outs, threads = (out.view(rows.shape), parts), torch.get_num_threads()
        _C.rms_norm_grad(rows, weight.detach().contiguous(), inverse, _rows(upstream), *outs, threads)
        return out, None if parts is None else parts.sum(0).to(weight.dtype), None
