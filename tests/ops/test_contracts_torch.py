"""What every op does inside PyTorch: autograd, autocast, `torch.compile`, `torch.func`, CUDA graphs, odd tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from turnwise import ops
from turnwise.ops import BackendUnavailable
from turnwise.ops.common import layout

from .table import CASES, DIFFERENTIABLE, LOSSES, OPS, PLAIN, Size, draw, outcome

FIRST = {
    name: next(stream for stream in case.axes if stream != "hidden" or case.leaves) for name, case in CASES.items()
}
FALLS_BACK = pytest.mark.filterwarnings("ignore:turnwise.ops runs this call on plain PyTorch")


def value(name: str, given: dict[str, Any], **options: Any) -> Tensor:
    """One number: half of an op's first result, squared, so that a gradient that ignores its factor shows."""
    return CASES[name].call(given, **options)[0].square().sum() / 2


def prepared(target: Any, name: str, **drawn: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The streams of a call on the target, and the first leaf among them."""
    given = target.on(draw(CASES[name], **drawn))
    if not CASES[name].leaves:
        return given, given[FIRST[name]]
    leaf = given[CASES[name].leaves[0]].requires_grad_()
    return given, leaf


# ---------------------------------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "linear_logprob, frozen"])
def test_a_second_derivative_is_rejected_or_right(target, name) -> None:
    given, leaf = prepared(target, name)
    (slope,) = torch.autograd.grad(value(name, given, backend=target.backend), leaf, create_graph=True)
    if target.backend == "torch":
        (second,) = torch.autograd.grad(slope.sum(), leaf)
        assert second.isfinite().all() and second.abs().max() > 0
        return
    with pytest.raises(RuntimeError, match="use backend='torch'"):
        slope.sum().backward()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck_of_every_reference(name) -> None:
    case = CASES[name]
    given = draw(case, Size(2, 3), dtype=torch.float64)
    given = {k: v[:, :4] if "H" in case.axes[k] else v for k, v in given.items()}
    if name == "logprob":
        given = {"logits": given["logits"][..., :9], "targets": given["targets"] % 9}
    leaves = [given[leaf].requires_grad_() for leaf in case.leaves if leaf not in ("weight", "bias")]

    def call(*leaves: Tensor) -> Tensor:
        return case.call({**given, **dict(zip(case.leaves, leaves, strict=False))}, backend="torch")[0].square()

    assert torch.autograd.gradcheck(call, leaves) and torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "linear_logprob, frozen"])
def test_a_graph_is_walked_twice_and_a_loss_changed_in_place(target, name) -> None:
    given, leaf = prepared(target, name)
    made = CASES[name].call(given, backend=target.backend)[0]
    once = torch.autograd.grad(2 * made.sum(), leaf, retain_graph=True)[0]
    again = torch.autograd.grad(2 * made.sum(), leaf, retain_graph=True)[0]
    third = torch.autograd.grad(6 * made.sum(), leaf)[0]
    assert torch.equal(once, again)
    torch.testing.assert_close(third, 3 * once)
    if name in LOSSES:
        changed = CASES[name].call(given, backend=target.backend)[0]
        changed += 1
        changed *= 3
        torch.testing.assert_close(torch.autograd.grad(2 * changed.sum(), leaf)[0], 3 * once)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "linear_logprob, frozen"])
def test_activation_checkpointing_changes_nothing(target, name, reentrant: bool) -> None:
    """It runs the op again in the backward, and hands out each saved tensor once."""
    given, leaf = prepared(target, name)
    key = next(key for key, value in given.items() if value is leaf)

    def call(tensor: Tensor) -> Tensor:
        return CASES[name].call({**given, key: tensor}, backend=target.backend)[0].sum()

    want = torch.autograd.grad(call(leaf), leaf)[0]
    leaf.grad = None
    checkpoint(call, leaf, use_reentrant=reentrant).backward()
    assert torch.equal(leaf.grad, want)


@pytest.mark.parametrize("name", OPS)
def test_what_has_no_gradient_has_no_graph(target, name) -> None:
    """Rewards and advantages never have one, metrics neither, a loss only in grad mode."""
    given = target.on(draw(CASES[name]))
    given = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in given.items()}
    out = CASES[name].call(given, backend=target.backend)
    if name not in ("logprob", "linear_logprob"):
        assert [value.requires_grad for value in out] == [name in LOSSES, *[False] * (len(out) - 1)]
    with torch.no_grad():
        assert not any(value.requires_grad for value in CASES[name].call(given, backend=target.backend))


def test_inference_tensors_serve_as_everything_but_the_parameters(kernel) -> None:
    """What a sampler made under `torch.inference_mode` is trained on. (PyTorch saves the factors of a product.)"""
    for name in LOSSES:
        plain = kernel.on(draw(CASES[name]))
        with torch.inference_mode():
            made = {k: v.clone() for k, v in plain.items()}
            CASES[name].call(made, backend=kernel.backend)
        leaves = {k: plain[k] for k in CASES[name].leaves}
        want, got = (outcome(CASES[name], given | leaves, backend=kernel.backend) for given in (plain, made))
        assert all(map(torch.equal, want, got))


# ---------------------------------------------------------------------------------------------------------------------
# Modes
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*CASES, *PLAIN])
def test_the_default_device_and_dtype_change_nothing(name) -> None:
    """`torch.set_default_device("cuda")` is in many a script; what an op makes is on the device of its inputs."""
    case = (CASES | PLAIN)[name]
    given = draw(case, Size(2, 5))

    def call() -> list[Tensor]:
        return [value.detach() for value in case.call(given)]

    want = call()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = call()
            with ops.backend("torch"):
                reference = call()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, got, want))
    assert [(v.device, v.dtype) for v in reference] == [(v.device, v.dtype) for v in want]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_autocast_rounds_the_head_alone(target, name, dtype) -> None:
    """It casts what a linear layer would get; losses, softmaxes and rewards stay as exact as they were."""
    case, given = CASES[name], target.on(draw(CASES[name]))

    def call(streams: Mapping[str, Tensor], **options: Any) -> list[Tensor]:
        with torch.autocast(target.device, dtype=dtype):
            return case.call(streams, **options)

    got = outcome(case._replace(call=call), given, backend=target.backend)
    narrow = {k: given[k].to(dtype) for k in ("hidden", "weight") if k in given}
    want = outcome(case, given | narrow, backend=target.backend)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["linear_logprob", "linear_policy_loss"])
def test_autocast_leaves_float64_as_linear_does(name) -> None:
    given = draw(CASES[name], dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = CASES[name].call(given)
    assert all(map(torch.equal, got, CASES[name].call(given)))


class Calls(TorchDispatchMode):
    """Records the calls of turnwise's ops with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "turnwise":
            assert not kwargs
            once = not func.name().endswith("_backward")  # the derivative of a backward op raises
            leaves = (a.detach().requires_grad_(once and a.requires_grad) if isinstance(a, Tensor) else a for a in args)
            self.found.append((func, tuple(leaves)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*OPS, "logprob, a matrix", "linear_logprob, frozen"])
def test_opcheck_of_what_each_op_calls(target, monkeypatch, name) -> None:
    """On every backend that registers ops; the losses and heads with their backwards. A compiler sees them so, with
    every op through the dispatcher."""
    if target.simulated:  # registered as the C++ kernels are
        return
    with monkeypatch.context() as patch, Calls() as calls:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        outcome(CASES[name], target.on(draw(CASES[name], Size(2, 5))), backend=target.backend)
    for op, arguments in calls.found:
        torch.library.opcheck(op, arguments)
    called = {op.name().removeprefix("turnwise::") for op, _ in calls.found}
    if target.backend != "torch":
        assert called and (not CASES[name].leaves or any(op.endswith("backward") for op in called))
    if target.backend == "native" and name == "grouped_policy_loss":
        assert called == {"token_reward_sum", "group_advantage", "policy_loss", "policy_loss_backward"}
    if target.backend == "native" and name == "linear_policy_loss":
        assert called == {"policy_loss", "policy_loss_backward", "linear_logprob", "linear_logprob_backward"}


# ---------------------------------------------------------------------------------------------------------------------
# Compiled whole
# ---------------------------------------------------------------------------------------------------------------------
# A packed form has boundaries whose number is no size of another stream.
COMPILED = [*OPS, "token_reward_sum, packed", "gae, packed", "policy_loss, GSPO, packed", "logprob, in place"]
COMPILED += ["linear_logprob, frozen", "aggregate, packed", "loss_normalizer, packed"]


@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_for_batches_of_any_shape(name, backend) -> None:
    """And with `check=True`, which a compiled graph has no room for."""
    case = (CASES | PLAIN)[name]
    options = {} if name in PLAIN else {"backend": backend, "check": True}
    if name == "linear_policy_loss":
        del options["check"]
    names = list(case.axes)
    first = case.leaves[0] if case.leaves else names[0]

    def call(*streams: Tensor) -> list[Tensor]:
        given = dict(zip(names, streams, strict=True))
        given[first] = given[first] * (2 if given[first].is_floating_point() else 1)  # so that it is no leaf
        return list(case.call(given, **options))

    def run(function: Callable[..., list[Tensor]], given: dict[str, Tensor]) -> list[Tensor]:
        given = {k: v.clone().requires_grad_(k in case.leaves) for k, v in given.items()}
        out = function(*given.values())
        if case.leaves:
            sum(v.sum() for v in out if v.requires_grad).backward()
        return [*(v.detach() for v in out), *(given[k].grad for k in case.leaves)]

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed, shape in enumerate((Size(4, 7), Size(6, 9))):
        given = draw(case, shape, seed)
        torch.testing.assert_close(run(compiled, given), run(call, given))
    assert counters["stats"]["unique_graphs"] == 1


NUMBERS: dict[str, tuple[str, Callable[[dict[str, Tensor], float], Any]]] = {
    "kl.coef": (
        "policy_loss, all streams",
        lambda s, x: CASES["policy_loss, all streams"].call(s, kl=ops.KL("k3", x))[0],
    ),
    "clip": ("policy_loss", lambda s, x: CASES["policy_loss"].call(s, clip=ops.Clip(x, x))[0]),
    "normalizer": ("policy_loss", lambda s, x: CASES["policy_loss"].call(s, normalizer=10 * x)[0]),
    "eps": ("group_advantage", lambda s, x: ops.group_advantage(s["rewards"], s["group_ids"], eps=x)),
    "gamma": ("token_returns", lambda s, x: ops.token_returns(s["token_rewards"], x)),
    "temperature": ("logprob", lambda s, x: ops.logprob(s["logits"], s["targets"], temperature=x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_change_from_step_to_step(name) -> None:
    """An adaptive KL coefficient, a temperature that cools."""
    case, call = NUMBERS[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    given, numbers = draw(CASES[case], Size(3, 5)), (0.1, 0.2, 0.35, 0.7)
    made = [compiled(given, number) for number in numbers]
    for number, result in zip(numbers, made, strict=True):
        torch.testing.assert_close(result, call(given, number))
    assert not torch.equal(made[0], made[1])


def test_the_forced_backend_holds_within_a_graph() -> None:
    given = draw(CASES["policy_loss"], Size(3, 5))

    def call(x: Tensor) -> Tensor:
        with ops.backend("torch"):
            return CASES["policy_loss"].call({**given, "logprobs": x})[0]

    torch._dynamo.reset()
    seen: list[str] = []

    def watch(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(call, fullgraph=True, backend=watch)
    torch.testing.assert_close(compiled(given["logprobs"]), call(given["logprobs"]))
    assert seen and not [target for target in seen if "turnwise" in target]


# ---------------------------------------------------------------------------------------------------------------------
# torch.func and forward-mode differentiation: kernels reject, and the reference is right
# ---------------------------------------------------------------------------------------------------------------------
SMOOTH = [*DIFFERENTIABLE, "policy_loss, GSPO, packed"]
CONSTANT = [*(name for name in OPS if name not in DIFFERENTIABLE), "token_returns, packed"]


def function_of(name: str) -> tuple[Callable[..., Tensor], Tensor]:
    """An op as a function of its first stream, and that stream."""
    case = CASES[name]
    given = draw(case, Size(4, 5))
    first = case.leaves[0] if case.leaves else FIRST[name]

    def call(x: Tensor, **options: Any) -> Tensor:
        out = case.call({**given, first: x}, **options)[0]
        return out.square().sum() if case.leaves else out

    return call, given[first]


def copies(x: Tensor) -> Tensor:
    return torch.stack([x * (1 + 0.1 * i) for i in range(3)])


def plain_gradient(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf, backend="torch"), leaf)[0]


@FALLS_BACK
@pytest.mark.parametrize("chosen", [{}, {"backend": "torch"}], ids=["automatic", "torch"])
@pytest.mark.parametrize("name", SMOOTH)
def test_the_reference_is_differentiated_right(name: str, chosen: dict[str, str]) -> None:
    function, x = function_of(name)

    def call(x: Tensor) -> Tensor:
        return function(x, **chosen)

    want = plain_gradient(function, x)
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(grad(call)(x), want)
    torch.testing.assert_close(jvp(call, (x,), (tangent,))[1], (want * tangent).sum(), rtol=1e-4, atol=1e-5)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent)))
    torch.testing.assert_close(out.tangent, (want * tangent).sum(), rtol=1e-4, atol=1e-5)
    many = copies(x)
    torch.testing.assert_close(vmap(call)(many), torch.stack([function(y, backend="torch") for y in many]))
    torch.testing.assert_close(vmap(grad(call))(many), torch.stack([plain_gradient(function, y) for y in many]))
    if chosen:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(grad(call), backend="eager", fullgraph=True)(x), want)


@FALLS_BACK
@pytest.mark.parametrize("name", CONSTANT)
def test_what_has_no_gradient_has_no_tangent_and_can_be_batched(name: str) -> None:
    function, x = function_of(name)
    want = torch.stack([function(y, backend="torch") for y in copies(x)])
    torch.testing.assert_close(vmap(function)(copies(x)), want)
    assert not grad(lambda x: function(x).sum())(x).any()
    assert not jvp(function, (x,), (torch.ones_like(x),))[1].any()


@FALLS_BACK
def test_any_argument_may_be_the_batched_one() -> None:
    given = draw(CASES["grouped_policy_loss"], Size(4, 5))

    def loss(mask: Tensor, ids: Tensor) -> Tensor:
        return CASES["grouped_policy_loss"].call({**given, "mask": mask, "group_ids": ids})[0]

    mask, ids = given["mask"], torch.tensor([0, 1, 0, 1])
    masks, many = torch.stack([mask, ~mask, mask | True]), torch.stack([ids, ids.flip(0), ids * 0])
    torch.testing.assert_close(
        vmap(loss)(masks, many), torch.stack([loss(*pair) for pair in zip(masks, many, strict=True)])
    )
    torch.testing.assert_close(vmap(loss, (0, None))(masks, ids), torch.stack([loss(mask, ids) for mask in masks]))
    with pytest.raises(ValueError, match=r"num_groups=None: expected a count, as torch\.func\.vmap hides"):
        vmap(lambda ids: ops.group_advantage(torch.ones(4), ids))(many)


@pytest.mark.parametrize("name", [*SMOOTH, *CONSTANT])
def test_a_named_backend_refuses_transforms_and_says_what_to_do(kernel: Any, name: str) -> None:
    """What a kernel made of a wrapper would be read from no memory, or lose its tangent."""
    if kernel.device != "cpu":
        pytest.skip("rejected before a device is read")
    function, x = function_of(name)

    def call(x: Tensor) -> Tensor:
        return function(x, backend=kernel.backend).sum()

    message = rf"backend '{kernel.backend}' can't serve this call: it is inside a transform of torch\.func .*torch'"
    for transformed in (grad(call), lambda x: vmap(call)(x[None]), lambda x: jvp(call, (x,), (x,))):
        for given in (x, torch.nn.Parameter(x)):
            with pytest.raises(BackendUnavailable, match=message):
                transformed(given)
    if name in SMOOTH:
        with forward_ad.dual_level(), pytest.raises(BackendUnavailable, match=message):
            call(forward_ad.make_dual(x, torch.ones_like(x)))
    call(x)  # the same outside


def test_the_automatic_choice_says_once_that_it_fell_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_warned", False)
    function, x = function_of("policy_loss")
    with pytest.warns(RuntimeWarning, match=r"on plain PyTorch: it is inside a transform of torch\.func"):
        grad(function)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad(function)(x)
        monkeypatch.setattr(layout, "_warned", False)
        with ops.backend("torch"):  # who says so need not be told
            grad(function)(x)


# ---------------------------------------------------------------------------------------------------------------------
# CUDA graphs
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "factorize"])
def test_a_captured_op_replays_with_the_bits_of_a_plain_call(name, backend) -> None:
    """No op waits for the GPU."""
    case = CASES[name]

    def drawn(seed: int) -> dict[str, Tensor]:
        given = draw(case, Size(5, 133) if len(case.leaves) < 2 else Size(5, 40), seed)
        return {k: v.cuda() for k, v in given.items()}

    held = drawn(0)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what happens once, such as compiling, must not be captured
        for _ in range(2):
            outcome(case, held, backend=backend)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outcome(case, held, backend=backend)
    for seed in (1, 2):
        new = drawn(seed)
        for key, values in held.items():
            values.copy_(new[key])
        graph.replay()
        assert all(map(torch.equal, captured, outcome(case, new, backend=backend)))
