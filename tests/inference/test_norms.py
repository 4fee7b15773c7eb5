"""The norms' kernel against float64, and models whose norms it computes against the same models as they come."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from turnwise import _C
from turnwise.inference.common import norms
from turnwise.inference.common.norms import RMSNorm, fuse_norms, is_fusible
from turnwise.tasks.tiny import build_model, build_tokenizer

EXACT = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
"""Largest difference from float64, over the largest number."""


def expected(x: Tensor, weight: Tensor, given: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The norm and its gradients in float64."""
    x, weight = (each.detach().double().requires_grad_() for each in (x, weight))
    out = weight * (x / (x.square().mean(-1, keepdim=True) + eps).sqrt())
    return out.detach(), *torch.autograd.grad(out, (x, weight), given.double())


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("width", [2, 3, 16, 37, 64, 576])
def test_the_kernel_equals_its_definition(width: int, dtype: torch.dtype) -> None:
    told = f"seed {torch.seed()}"
    threads, results = torch.get_num_threads(), []
    x = (3 * torch.randn(2, 333, width)).to(dtype).transpose(0, 1).requires_grad_()
    weight, given = torch.randn(width).to(dtype).requires_grad_(), torch.randn(333, 2, width).to(dtype)
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            out = RMSNorm.apply(x, weight, 1e-5)
            results.append((out.detach(), *torch.autograd.grad(out, (x, weight), given)))
        finally:
            torch.set_num_threads(threads)
    assert all(map(torch.equal, *results)), told
    for got, exact in zip(results[0], expected(x, weight, given, 1e-5), strict=True):
        assert got.dtype is dtype and (got - exact).abs().max() <= EXACT[dtype] * exact.abs().max(), told


def outcome(model: Any, tokens: Tensor) -> list[Tensor]:
    """Logits, their sum's gradients, and the logits without gradients."""
    model.zero_grad()
    logits = model(tokens).logits
    logits.float().square().mean().backward()
    with torch.no_grad():
        alone = model(tokens).logits
    return [logits.detach(), alone, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_computes_the_same(frozen: bool) -> None:
    plain = build_model(build_tokenizer(["ab"]), seed=0)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not frozen or "norm" not in name)
    fused = copy.deepcopy(plain)
    assert fuse_norms(fused) == sum("norm" in name for name, _ in plain.named_parameters()) > 0
    tokens = torch.arange(12).view(2, 6) % 4
    for other in (fused, copy.deepcopy(fused)):  # whose norms are its own
        assert all(norm.__dict__["forward"].args == (norm,) for norm in other.modules() if is_fusible(norm))
        for got, want in zip(outcome(other, tokens), outcome(plain, tokens), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "fits"), [("qwen3", True), ("mistral", True), ("gemma2", False), ("gpt_oss", False)]
)
def test_only_norms_that_compute_as_llamas_are_fused(family: str, fits: bool) -> None:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kinds = [kind for name, kind in vars(module).items() if name.endswith("RMSNorm")]
    assert kinds and all(is_fusible(kind(8)) is fits for kind in kinds)
    assert not is_fusible(nn.LayerNorm(8))


def test_what_the_kernel_does_not_compute_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, x = LlamaRMSNorm(8), torch.randn(3, 8)
    fuse_norms(norm)
    calls: list[int] = []
    run = norms._normalize
    monkeypatch.setattr(norms, "_normalize", lambda *a: calls.append(1) or run(*a))
    norm(x), norm(x.double()), norm(x.bfloat16())
    assert len(calls) == 1
    slope = torch.func.jvp(norm, (x,), (torch.ones_like(x),))[1]
    assert len(calls) == 1 and torch.isfinite(slope).all()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(norm(x.requires_grad_()).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.ones(4)}, r"weight.*expected \[5\]"),
        ({"weight": torch.ones(5).double()}, "weight.dtype=float64: expected float32"),
        ({"out": torch.ones(2, 5)}, r"out.*expected \[3, 5\]"),
        ({"inverse": torch.ones(2)}, r"inverse.*expected \[3\]"),
        ({"x": torch.ones(3, 10)[:, ::2]}, "x: expected contiguous rows"),
        ({"x": torch.ones(15)}, r"x.*expected \[n, h\]"),
    ],
)
def test_the_kernel_reads_no_other_memory(changed: dict[str, Tensor], message: str) -> None:
    call = {"x": torch.ones(3, 5), "weight": torch.ones(5), "out": torch.ones(3, 5), "inverse": torch.ones(3)}
    _C.rms_norm(**call, eps=0.0, threads=1)
    with pytest.raises(ValueError, match=message):
        _C.rms_norm(**call | changed, eps=0.0, threads=1)
    upstream = {"x": torch.ones(3, 5), "weight": torch.ones(5), "inverse": torch.ones(3), "upstream": torch.ones(3, 5)}
    with pytest.raises(ValueError, match=r"grad_weight.*expected \[1, 5\]"):
        _C.rms_norm_grad(**upstream, grad_x=torch.ones(3, 5), grad_weight=torch.ones(2, 5), threads=1)
