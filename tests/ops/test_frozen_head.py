"""The LM head with a frozen weight: one look at the logits gives log-probabilities and the slope of hidden."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.ops import GSPO, linear_logprob, linear_policy_loss
from turnwise.ops.common import dispatch as backends
from turnwise.ops.logprob import choice, linear_frozen, linear_native
from turnwise.ops.logprob.choice import Tiles

NATIVE = pytest.mark.skipif(backends.interpreted, reason="native backends, in their own process")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
WIDTH = 40


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 24 tokens, tiles of 256 columns, and on a GPU spans of 48 tokens."""
    for name, size in (("_CPU_ROWS", 24), ("_CPU_FORWARD", 1), ("_CPU_BACKWARD", 1)):
        monkeypatch.setattr(choice, name, size)
    monkeypatch.setattr(linear_native, "choose", lambda *_: Tiles(24, 256, 24, 96))
    monkeypatch.setattr(linear_frozen, "choose_frozen", lambda *_: Tiles(24, 256, 24, 48))


@pytest.fixture
def logits_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of logits of each product of hidden states and weights that the test makes."""
    made: list[int] = []
    plain = linear_native.Products.logits

    def counted(self: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        made.append(len(hidden) * len(weight))
        return plain(self, hidden, weight)

    monkeypatch.setattr(linear_native.Products, "logits", counted)
    return made


def make(seed: int, tokens: int = 60, vocabulary: int = 700, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden": noise(tokens, WIDTH).to(dtype),
        "weight": (0.4 * noise(vocabulary, WIDTH)).to(dtype),
        "targets": torch.randint(vocabulary, (tokens,), generator=generator),
        "upstream": noise(tokens),
    }


def run(given: dict[str, Tensor], target: Any = None, frozen: bool = True, **options: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities and the gradient of hidden; float64 of the same numbers without ``target``."""
    device, dtype = ("cpu", torch.float64) if target is None else (target.device, None)
    hidden, weight = (given[name].to(device, dtype, copy=True) for name in ("hidden", "weight"))
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    backend = "torch" if target is None else target.backend
    logprob = linear_logprob(
        hidden.requires_grad_(),
        weight.requires_grad_(not frozen),
        given["targets"].to(device),
        backend=backend,
        **options,
    )
    (logprob * given["upstream"].to(device)).sum().backward()
    return logprob.detach().cpu(), hidden.grad.cpu()


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    for actual, expected in zip(got, want, strict=True):
        largest = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance * largest)


# ---------------------------------------------------------------------------------------------------------------------
# Against float64
# ---------------------------------------------------------------------------------------------------------------------
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 3.0, "temperature": 0.8},
    "bias": {"bias": torch.linspace(-3, 3, 700)},
    "ignored": {"ignore_index": 7},
    "positions": {"positions": torch.arange(60) * 13 % 31},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_equals_float64(target, dtype, options) -> None:
    given = make(1, dtype=dtype)
    given["targets"][[0, 20, 59]] = 7
    assert_close(run(given, target, **options), run(given, **options), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("tokens", "vocabulary"), [(0, 9), (1, 1), (1, 31), (24, 256), (49, 257), (100, 1025)], ids=str
)
def test_sizes(target, tokens, vocabulary) -> None:
    given = make(2, tokens, vocabulary)
    assert_close(run(given, target), run(given), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_maximum_that_grows_from_tile_to_tile(target, dtype) -> None:
    """Sums of earlier tiles shrink when a later one has logits that are larger by 20 to 60."""
    given = make(3, dtype=dtype)
    bias = 20.0 * (torch.arange(700) // 256)
    assert_close(run(given, target, bias=bias), run(given, bias=bias), 3 * TOLERANCE[dtype])
    assert_close(run(given, target, bias=bias.flip(0)), run(given, bias=bias.flip(0)), 3 * TOLERANCE[dtype])


def test_a_first_tile_of_banned_tokens(target) -> None:
    given = make(4)
    given["targets"] = given["targets"] % 100 + 600
    bias = torch.zeros(700).index_fill_(0, torch.arange(300), -torch.inf)
    assert_close(run(given, target, bias=bias), run(given, bias=bias), 3e-6)


@NATIVE
def test_a_likely_target_keeps_its_digits(kernel) -> None:
    """At p[t] > 0.997 the gradient is a small difference of weight rows. In bfloat16 it would drown in the rounding of
    p[t], as that of a trained weight does, if the target were one of the softmax weights."""
    given = make(5, dtype=torch.bfloat16)
    logits = given["hidden"].double() @ given["weight"].double().T
    bias = torch.zeros(700)
    bias[0] = 10.0 + logits.max()
    given["targets"] = torch.zeros(60, dtype=torch.int64)
    (_, got), (logprob, want) = run(given, kernel, bias=bias), run(given, bias=bias)
    assert (1 - logprob.exp()).max() < 3e-3
    assert ((got.double() - want).norm(dim=1) / want.norm(dim=1)).max() < 0.25  # a CPU rounds logits to bfloat16


# ---------------------------------------------------------------------------------------------------------------------
# What a caller may count on
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_log_probabilities_have_the_bits_of_a_call_without_gradients(target, dtype) -> None:
    given = make(6, dtype=dtype)
    got, _ = run(given, target)
    with torch.no_grad():
        sampled = linear_logprob(
            *(given[k].to(target.device) for k in ("hidden", "weight", "targets")), backend=target.backend
        )
    assert torch.equal(got, sampled.cpu())


@NATIVE
def test_the_logits_are_made_once(logits_made: list[int]) -> None:
    given = make(7)
    logprob = linear_logprob(given["hidden"].requires_grad_(), given["weight"], given["targets"])
    assert sum(logits_made) == 60 * 700
    logprob.sum().backward()
    assert sum(logits_made) == 60 * 700
    given["hidden"].grad = None
    given["weight"].requires_grad_()
    linear_logprob(given["hidden"], given["weight"], given["targets"]).sum().backward()
    assert sum(logits_made) == 3 * 60 * 700


def test_a_token_that_does_not_train_passes_no_nan_on(kernel) -> None:
    given = make(8)
    given["hidden"][5] = torch.nan
    given["upstream"][5] = 0
    _, grad = run(given, kernel)
    assert (grad[5] == 0).all()
    want = run({**given, "hidden": given["hidden"].nan_to_num(0)})[1]
    assert_close((grad,), (want,), TOLERANCE[torch.float32])


def test_the_gradient_of_an_entropy(target) -> None:
    """It needs the logits again; log-probabilities alone don't, though the entropy was asked for."""
    given = make(9)
    grads = []
    for dtype, backend, device in ((torch.float64, "torch", "cpu"), (torch.float32, target.backend, target.device)):
        hidden = given["hidden"].to(device, dtype, copy=True).requires_grad_()
        weight, targets, upstream = (
            given["weight"].to(device, dtype),
            given["targets"].to(device),
            given["upstream"].to(device),
        )
        logprob, entropy = linear_logprob(hidden, weight, targets, entropy=True, backend=backend)
        both = torch.autograd.grad((logprob * upstream).sum() + (entropy**2).sum(), hidden, retain_graph=True)[0]
        one = torch.autograd.grad((logprob * upstream).sum(), hidden, retain_graph=True)[0]
        other = torch.autograd.grad((entropy**2).sum(), hidden)[0]
        grads.append([g.cpu() for g in (both, one, other)])
    assert_close(tuple(grads[1]), tuple(grads[0]), 5e-6)


# ---------------------------------------------------------------------------------------------------------------------
# The policy loss
# ---------------------------------------------------------------------------------------------------------------------
def loss_of(given: dict[str, Tensor], frozen: bool, **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    hidden, weight = given["hidden"].clone().requires_grad_(), given["weight"].clone().requires_grad_(not frozen)
    old, advantages = given["upstream"] - 6, torch.tensor([1.0, -0.5, 2.0])
    cu_seqlens = torch.tensor([0, 20, 30, 60])
    result = linear_policy_loss(hidden, weight, given["targets"], old, advantages, cu_seqlens=cu_seqlens, **options)
    result.loss.backward()
    return result.loss.detach(), hidden.grad, result.metrics


@NATIVE
@pytest.mark.parametrize("options", [{}, {"variant": GSPO()}, {"entropy": True}], ids=["PPO", "GSPO", "entropy"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_that_of_a_trained_weight(options, masked) -> None:
    given = make(13)
    if masked:
        options = {**options, "mask": torch.arange(60) % 3 != 0}
    loss, grad, metrics = loss_of(given, True, **options)
    want_loss, want_grad, want_metrics = loss_of(given, False, **options)
    assert_close((loss, grad), (want_loss, want_grad), 5e-6)
    torch.testing.assert_close(metrics, want_metrics, rtol=1e-5, atol=1e-6)


@NATIVE
@pytest.mark.parametrize("options", [{}, {"variant": GSPO()}], ids=["PPO", "GSPO"])
def test_masked_tokens_cost_nothing_on_a_cpu(logits_made: list[int], options) -> None:
    loss_of(make(14), True, mask=torch.arange(60) < 10, **options)
    assert sum(logits_made) == 10 * 700


@NATIVE
@pytest.mark.parametrize("wrong", [-1, 700])
def test_a_wrong_id_of_a_masked_token_is_refused(wrong) -> None:
    """Masked tokens are left out by an id that no token has; a wrong id must not pass for it."""
    given = make(15)
    given["targets"][3] = wrong
    with pytest.raises(ValueError, match=rf"targets\[3\]={wrong}"):
        loss_of(given, True, mask=torch.arange(60) != 3)


def test_two_ops_are_faster_where_the_weight_is_frozen() -> None:
    module = sys.modules["turnwise.ops.loss.linear_policy_loss"]
    hidden, weight = torch.zeros(4, 8, requires_grad=True), torch.zeros(9, 8)
    assert not module._is_faster(hidden, weight, None, 4, False, None)
    assert module._is_faster(hidden, weight.clone().requires_grad_(), None, 4, False, None)
    assert module._is_faster(hidden, weight, torch.zeros(9, requires_grad=True), 4, False, None)
    assert module._is_faster(hidden.half(), weight.half(), None, 4, False, None)  # its softmax weights would underflow


@pytest.mark.parametrize(("capability", "frozen"), [((8, 0), False), ((9, 0), False), ((10, 0), True)])
def test_tf32_must_be_far_ahead_for_a_frozen_weight(monkeypatch: pytest.MonkeyPatch, capability, frozen) -> None:
    """Triton makes three products in TF32 where cuBLAS makes two in float32."""
    monkeypatch.setattr(choice, "device_of", lambda tensor: choice.Device(capability=capability))
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert choice.prefers_triton(on_gpu)
    assert choice.prefers_triton(on_gpu, frozen=True) is frozen
