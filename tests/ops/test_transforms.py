"""Inside `torch.func` and under forward-mode differentiation: the kernels refuse, and the reference is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from turnwise import ops
from turnwise.ops import BackendUnavailable
from turnwise.ops.common import layout as streams

ROWS, WIDTH, HIDDEN, VOCABULARY, COPIES = 4, 5, 3, 11, 3


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OLD, REF, MASK = -noise(ROWS, WIDTH, seed=1).abs(), -noise(ROWS, WIDTH, seed=2).abs(), noise(ROWS, WIDTH, seed=3) > -1
ADVANTAGES, REWARDS, IDS = noise(ROWS, seed=4), noise(ROWS, WIDTH, seed=5), torch.tensor([0, 1, 0, 1])
TARGETS = torch.arange(ROWS * WIDTH) % VOCABULARY
BOUNDARIES, WEIGHT = torch.arange(ROWS + 1) * WIDTH, noise(VOCABULARY, HIDDEN, seed=6)

Op = Callable[..., Tensor]
SMOOTH: dict[str, tuple[Op, Tensor]] = {
    "policy_loss": (
        lambda x, **o: ops.policy_loss(x, OLD, ADVANTAGES, mask=MASK, kl=ops.KL(), ref_logprobs=REF, **o).loss,
        -noise(ROWS, WIDTH).abs(),
    ),
    "policy_loss, packed": (
        lambda x, **o: (
            ops.policy_loss(x, OLD.flatten(), ADVANTAGES, cu_seqlens=BOUNDARIES, variant=ops.GSPO(), **o).loss
        ),
        -noise(ROWS * WIDTH).abs(),
    ),
    "grouped_policy_loss": (
        lambda x, **o: ops.grouped_policy_loss(x, OLD, REWARDS, IDS, num_groups=2, mask=MASK, **o).loss,
        -noise(ROWS, WIDTH).abs(),
    ),
    "logprob": (
        lambda x, **o: ops.logprob(x, TARGETS, **o).square().sum(),  # type: ignore[union-attr]
        noise(ROWS * WIDTH, VOCABULARY),
    ),
    "linear_logprob": (
        lambda x, **o: ops.linear_logprob(x, WEIGHT, TARGETS, **o).square().sum(),  # type: ignore[union-attr]
        noise(ROWS * WIDTH, HIDDEN),
    ),
    "linear_policy_loss": (
        lambda x, **o: (
            ops.linear_policy_loss(
                *(x, WEIGHT, TARGETS, OLD.flatten(), ADVANTAGES), cu_seqlens=BOUNDARIES, mask=MASK.flatten(), **o
            ).loss
        ),
        noise(ROWS * WIDTH, HIDDEN),
    ),
}
CONSTANT: dict[str, tuple[Op, Tensor]] = {
    "group_advantage": (
        lambda x, **o: ops.group_advantage(x, IDS, lengths=x.abs(), valid=MASK[:, 0], center="length_weighted", **o),
        ADVANTAGES,
    ),
    "token_reward_sum": (lambda x, **o: ops.token_reward_sum(x, mask=MASK, **o), REWARDS),
    "token_returns": (lambda x, **o: ops.token_returns(x, 0.9, mask=MASK, **o), REWARDS),
    "token_returns, packed": (
        lambda x, **o: ops.token_returns(x, 0.9, cu_seqlens=BOUNDARIES, **o),
        REWARDS.flatten(),
    ),
    "gae": (lambda x, **o: ops.gae(x, OLD, mask=MASK, **o)[0], REWARDS),
}
EVERY = {**SMOOTH, **CONSTANT}


def copies(x: Tensor) -> Tensor:
    return torch.stack([x * (1 + 0.1 * i) for i in range(COPIES)])


def plain_gradient(function: Op, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf, backend="torch"), leaf)[0]


@pytest.mark.filterwarnings("ignore:turnwise.ops runs this call on plain PyTorch")
@pytest.mark.parametrize("chosen", [{}, {"backend": "torch"}], ids=["automatic", "torch"])
@pytest.mark.parametrize("name", SMOOTH)
def test_the_reference_is_differentiated_right(name: str, chosen: dict[str, str]) -> None:
    function, x = SMOOTH[name]

    def call(x: Tensor) -> Tensor:
        return function(x, **chosen)

    want, tangent = plain_gradient(function, x), noise(*x.shape, seed=9)
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(grad(call)(x), want)
    torch.testing.assert_close(jvp(call, (x,), (tangent,))[1], (want * tangent).sum(), rtol=1e-4, atol=1e-5)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent)))
    torch.testing.assert_close(out.tangent, (want * tangent).sum(), rtol=1e-4, atol=1e-5)
    many = copies(x)
    torch.testing.assert_close(vmap(call)(many), torch.stack([function(y, backend="torch") for y in many]))
    torch.testing.assert_close(vmap(grad(call))(many), torch.stack([plain_gradient(function, y) for y in many]))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(grad(call), backend="eager", fullgraph=True)(x), want)


@pytest.mark.filterwarnings("ignore:turnwise.ops runs this call on plain PyTorch")
@pytest.mark.parametrize("name", CONSTANT)
def test_what_has_no_gradient_has_no_tangent_and_can_be_batched(name: str) -> None:
    function, x = CONSTANT[name]
    want = torch.stack([function(y, backend="torch") for y in copies(x)])
    torch.testing.assert_close(vmap(function)(copies(x)), want)
    assert not grad(lambda x: function(x).sum())(x).any()
    assert not jvp(function, (x,), (torch.ones_like(x),))[1].any()


@pytest.mark.filterwarnings("ignore:turnwise.ops runs this call on plain PyTorch")
def test_any_argument_may_be_the_batched_one() -> None:
    logprobs = -noise(ROWS, WIDTH).abs()
    masks = torch.stack([MASK, ~MASK, MASK | True])

    def loss(mask: Tensor, ids: Tensor) -> Tensor:
        return ops.grouped_policy_loss(logprobs, OLD, REWARDS, ids, num_groups=2, mask=mask).loss

    ids = torch.stack([IDS, IDS.flip(0), IDS * 0])
    want = torch.stack([loss(*pair) for pair in zip(masks, ids, strict=True)])
    torch.testing.assert_close(vmap(loss)(masks, ids), want)
    torch.testing.assert_close(vmap(loss, (0, None))(masks, IDS), torch.stack([loss(mask, IDS) for mask in masks]))
    with pytest.raises(ValueError, match=r"num_groups=None: expected a count, as torch\.func\.vmap hides"):
        vmap(lambda ids: ops.group_advantage(ADVANTAGES, ids))(ids)


@pytest.mark.parametrize("name", EVERY)
def test_a_named_backend_refuses_and_says_what_to_do(target: Any, name: str) -> None:
    """What a kernel made of a wrapper would be read from no memory, or lose its tangent."""
    if target.backend == "torch" or target.device != "cpu":
        pytest.skip("refused by no kernel, or before a device is looked at")
    function, x = EVERY[name]

    def call(x: Tensor) -> Tensor:
        return function(x, backend=target.backend).sum()

    message = rf"backend '{target.backend}' can't serve this call: it is inside a transform of torch\.func .*torch'"
    for transformed in (grad(call), lambda x: vmap(call)(x[None]), lambda x: jvp(call, (x,), (x,))):
        with pytest.raises(BackendUnavailable, match=message):
            transformed(x)
        with pytest.raises(BackendUnavailable, match=message):
            transformed(torch.nn.Parameter(x))
    if name in SMOOTH:
        with forward_ad.dual_level(), pytest.raises(BackendUnavailable, match=message):
            call(forward_ad.make_dual(x, torch.ones_like(x)))
    call(x)  # the same outside


def test_the_automatic_choice_says_once_that_it_fell_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_warned", False)
    function, x = SMOOTH["policy_loss"]
    with pytest.warns(RuntimeWarning, match=r"on plain PyTorch: it is inside a transform of torch\.func"):
        grad(function)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad(function)(x)
        monkeypatch.setattr(streams, "_warned", False)
        with ops.backend("torch"):  # who says so need not be told
            grad(function)(x)


@pytest.mark.filterwarnings("ignore:turnwise.ops runs this call on plain PyTorch")
def test_per_sample_gradients_of_a_model() -> None:
    """The way `torch.func` is mostly used: parameters in a dict, a loss per sequence."""
    head = torch.nn.Linear(HIDDEN, VOCABULARY)
    parameters = {name: value.detach() for name, value in head.named_parameters()}
    states, ids = noise(ROWS, WIDTH, HIDDEN), TARGETS.reshape(ROWS, WIDTH)

    def loss(parameters: dict[str, Tensor], states: Tensor, ids: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        logprobs = ops.logprob(functional_call(head, parameters, (states,)), ids)
        return ops.policy_loss(logprobs[None], old[None], advantage[None]).loss  # type: ignore[index]

    samples = vmap(grad(loss), (None, 0, 0, 0, 0))(parameters, states, ids, OLD, ADVANTAGES)
    for i in range(ROWS):
        head.zero_grad()
        loss(dict(head.named_parameters()), states[i], ids[i], OLD[i], ADVANTAGES[i]).backward()
        torch.testing.assert_close(samples["weight"][i], head.weight.grad, rtol=1e-4, atol=1e-6)
