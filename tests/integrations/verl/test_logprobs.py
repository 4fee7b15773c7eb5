"""The engine's log-probabilities, against verl's function in float32 and against float64 in bfloat16."""

from __future__ import annotations

import pytest
import torch
from verl.utils.torch_functional import logprobs_from_logits as theirs
from verl.workers.engine.fsdp import transformer_impl

from turnwise.integrations.verl import logprobs


def draw(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits ``[N, V]``, labels ``[N]`` and the gradient of their log-probabilities."""
    g = torch.Generator().manual_seed(0)
    return 3 * torch.randn(50, 97, generator=g).to(dtype), torch.randint(97, (50,), generator=g), torch.randn(50)


def test_the_engine_calls_it() -> None:
    assert transformer_impl.logprobs_from_logits is logprobs.logprobs_from_logits


@pytest.mark.parametrize("inplace", [False, True])
def test_like_verls_own(inplace: bool) -> None:
    logits, labels, grad = draw(torch.float32)
    mine, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got, expected = logprobs.logprobs_from_logits(mine * 1.0, labels, inplace), theirs(other, labels)
    torch.testing.assert_close(got, expected)
    got.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(mine.grad, other.grad)


def test_bfloat16_logits_keep_exact_log_probabilities() -> None:
    """verl rounds them to bfloat16 where flash-attn is missing: errors of up to 2**-7 at -4."""
    logits, labels, _ = draw(torch.bfloat16)
    exact = logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(logprobs.logprobs_from_logits(logits, labels).double(), exact, rtol=0, atol=1e-5)
    assert (theirs(logits, labels).double() - exact).abs().max() > 1e-3
