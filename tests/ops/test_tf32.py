"""Three products in TF32 for one in float32, as Triton's ``tf32x3`` makes them: their error against float64.

TF32 has 11 significant bits. A factor is split into its rounding and the rounding of what that left, 22 bits together.
The product of the two small parts, at most 2^-22 of the whole, is left out.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from turnwise.ops import linear_logprob

BOUND = 3 * 2.0**-22  # of a product: what each split leaves, and the product left out


def tf32(x: Tensor) -> Tensor:
    """Round float32 to TF32: to nearest, ties away from zero, as ``cvt.rna.tf32.f32``."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    large = tf32(x)
    return large, tf32(x - large)


def three_products(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``a @ b.T``, small parts first, summed in ``dtype``."""
    (a0, a1), (b0, b1) = split(a), split(b)
    a0, a1, b0, b1 = (x.to(dtype) for x in (a0, a1, b0, b1))
    return a1 @ b0.T + a0 @ b1.T + a0 @ b0.T


def make(seed: int, tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator)
    return hidden, torch.randn(vocabulary, width, generator=generator) * width**-0.5


def test_a_split_by_hand() -> None:
    """1 + 2^-11 + 2^-20: halfway between two TF32 numbers and a little more."""
    x = torch.tensor([1 + 2.0**-11 + 2.0**-20])
    large, small = split(x)
    assert large.item() == 1 + 2.0**-10
    assert small.item() == 2.0**-20 - 2.0**-11


@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_within_its_bound(seed) -> None:
    """Of sums in float64, so that only the splits lose anything; relative to the sum of the products' sizes."""
    hidden, weight = make(seed, 64, 896, 500)
    exact, sizes = hidden.double() @ weight.double().T, hidden.double().abs() @ weight.double().abs().T
    three = (three_products(hidden, weight, torch.float64) - exact).abs() / sizes
    one = (tf32(hidden).double() @ tf32(weight).double().T - exact).abs() / sizes
    assert three.max() < BOUND < 1e-4 < one.max() * 10, f"seed {seed}"
    # Single products come near to the bound, and far beyond it without one of the three.
    a, b = hidden.reshape(-1, 1)[:500], weight.reshape(-1, 1)[:500]
    product, whole = (three_products(a, b, torch.float64), a.double() @ b.double().T)
    assert BOUND / 20 < ((product - whole) / whole).abs().max() < BOUND
    two = split(a)[0].double() @ sum(split(b)).double().T
    assert ((two - whole) / whole).abs().max() > 100 * BOUND


@pytest.mark.parametrize("seed", range(2))
def test_log_probabilities_keep_the_accuracy_of_float32(seed) -> None:
    """In float32 sums of 4,096: at most twice the error of float32's own products, and within the ops' bound."""
    hidden, weight = make(seed, 32, 4096, 1500)
    hidden *= 3
    targets = torch.arange(32)
    want = linear_logprob(hidden.double(), weight.double(), targets, backend="torch")
    errors = {}
    for name, logits in (("three", three_products(hidden, weight)), ("float32", hidden @ weight.T)):
        errors[name] = (torch.log_softmax(logits.double(), 1)[targets, targets] - want).abs().max().item()
    assert errors["three"] < 2 * errors["float32"] + 1e-7, f"seed {seed}: {errors}"
    assert errors["three"] < 2e-6 * want.abs().max().item(), f"seed {seed}: {errors}"
