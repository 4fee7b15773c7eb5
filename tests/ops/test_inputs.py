"""What holds for every op: tensors of any making, options of the wrong kind, numbers of any library."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise.ops import (
    GSPO,
    KL,
    Clip,
    ClipCov,
    ImportanceCorrection,
    KLCov,
    Variant,
    aggregate,
    backend,
    factorize,
    gae,
    group_advantage,
    grouped_policy_loss,
    linear_logprob,
    linear_policy_loss,
    logprob,
    loss_normalizer,
    policy_loss,
    select_tokens,
    token_returns,
    token_reward_sum,
)

ROWS, WIDTH, HIDDEN, VOCABULARY = 3, 5, 4, 11


def streams() -> dict[str, Tensor]:
    """Tensors of every argument; padded rows, and the head's over one packed stream."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "logprobs": -noise(ROWS, WIDTH).abs(),
        "old": -noise(ROWS, WIDTH).abs(),
        "rewards": noise(ROWS, WIDTH),
        "advantages": noise(ROWS),
        "mask": noise(ROWS, WIDTH) > -1,
        "ids": torch.tensor([0, 0, 1]),
        "hidden": noise(ROWS * WIDTH, HIDDEN),
        "weight": noise(VOCABULARY, HIDDEN),
        "logits": noise(ROWS, WIDTH, VOCABULARY),
        "targets": torch.randint(VOCABULARY, (ROWS, WIDTH), generator=generator),
        "cu_seqlens": torch.arange(ROWS + 1) * WIDTH,
    }


OPS: dict[str, Callable[..., Any]] = {
    "group_advantage": lambda s, **o: group_advantage(s["advantages"], s["ids"], **o),
    "token_reward_sum": lambda s, **o: token_reward_sum(s["rewards"], mask=s["mask"], **o),
    "token_returns": lambda s, **o: token_returns(s["rewards"], 0.9, mask=s["mask"], **o),
    "gae": lambda s, **o: gae(s["rewards"], s["old"], mask=s["mask"], **o)[0],
    "policy_loss": lambda s, **o: policy_loss(s["logprobs"], s["old"], s["advantages"], mask=s["mask"], **o).loss,
    "grouped_policy_loss": lambda s, **o: (
        grouped_policy_loss(s["logprobs"], s["old"], s["rewards"], s["ids"], mask=s["mask"], **o).loss
    ),
    "logprob": lambda s, **o: logprob(s["logits"][:, :-1], s["targets"][:, :-1], **o),
    "linear_logprob": lambda s, **o: linear_logprob(s["hidden"], s["weight"], s["targets"].flatten(), **o),
    "linear_policy_loss": lambda s, **o: (
        linear_policy_loss(
            *(s["hidden"], s["weight"], s["targets"].flatten(), s["old"].flatten(), s["advantages"]),
            **{"cu_seqlens": s["cu_seqlens"], **o},
        ).loss
    ),
    "loss_normalizer": lambda s: loss_normalizer("token-mean", mask=s["mask"]),
    "aggregate": lambda s: aggregate(s["rewards"], mask=s["mask"]),
    "factorize": lambda s: factorize(["a", "b", "a"])[0],
}
LOSSES = ("policy_loss", "grouped_policy_loss", "linear_policy_loss")
FLOAT_OF = {
    "group_advantage": "advantages",
    "token_reward_sum": "rewards",
    "token_returns": "rewards",
    "gae": "rewards",
    "policy_loss": "logprobs",
    "grouped_policy_loss": "logprobs",
    "logprob": "logits",
    "linear_logprob": "hidden",
    "linear_policy_loss": "hidden",
}


# ---------------------------------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPS)
def test_the_default_device_and_dtype_change_nothing(op) -> None:
    """`torch.set_default_device("cuda")` stands in many a script; what an op makes lies where its inputs do."""
    given = streams()
    for stream in ("logprobs", "hidden", "logits"):
        given[stream].requires_grad_()
    want = OPS[op](given)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = OPS[op](given)
            with backend("torch"):
                reference = OPS[op](given)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.device == reference.device == want.device
    assert got.dtype == reference.dtype == want.dtype
    assert torch.equal(got, want)


class Wrapper(Tensor):
    """A tensor of a shape and device that has no memory, as a DTensor is one."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} got a wrapper")


@pytest.mark.parametrize("op", FLOAT_OF)
def test_a_wrapper_without_memory_is_refused(target, op) -> None:
    """Not read: there is nothing at its address."""
    for name, tensor in streams().items():
        given = {k: v.to(target.device) for k, v in streams().items()}
        given[name] = Wrapper(tensor.to(target.device))
        try:
            OPS[op](given, backend=target.backend)
        except TypeError as error:
            assert "expected a tensor with memory of its own, not a wrapper such as a DTensor" in str(error)
        except RuntimeError as error:  # the dispatcher's or the wrapper's own
            assert "got a wrapper" in str(error)
        else:
            assert not _reads(op, name), name


def _reads(op: str, name: str) -> bool:
    class Watched(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: str) -> Any:
            seen.add(key)
            return super().__getitem__(key)

    seen: set[str] = set()
    OPS[op](Watched(streams()))
    return name in seen


@pytest.mark.parametrize("op", FLOAT_OF)
def test_what_no_kernel_reads_is_refused_by_every_backend(target, op) -> None:
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        given = streams()
        given[FLOAT_OF[op]] = given[FLOAT_OF[op]].to(dtype)
        given = {k: v.to(target.device) for k, v in given.items()}
        with pytest.raises(TypeError, match=r"has dtype torch\.(complex64|float8_e4m3fn): expected"):
            OPS[op](given, backend=target.backend)


@pytest.mark.parametrize("op", ["token_reward_sum", "token_returns", "gae", "policy_loss", "grouped_policy_loss"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn], ids=str)
def test_a_mask_of_a_type_that_no_kernel_reads_is_named(target, op, dtype) -> None:
    given = {k: v.to(target.device) for k, v in streams().items()}
    given["mask"] = given["mask"].to(dtype)
    with pytest.raises(TypeError, match=rf"^mask has dtype {dtype}: expected one of bool, uint8, .*\. Pass mask != 0$"):
        OPS[op](given, backend=target.backend)


@pytest.mark.parametrize("op", ["logprob", "linear_logprob", "linear_policy_loss"])
def test_no_target_means_ignore(target, op) -> None:
    """As -100 does in `torch.nn.functional.cross_entropy`: on a CPU at once, on a GPU with `check=True`."""
    for wrong, hint in ((-100, "Pass ignore_index=-100 to leave out the tokens with this target"), (VOCABULARY, "")):
        given = {k: v.to(target.device) for k, v in streams().items()}
        given["targets"][1, 2] = wrong
        place = r"1, 2" if op == "logprob" else "7"
        message = rf"^targets\[{place}\]={wrong}: expected an id in \[0, {VOCABULARY}\)(\. {hint})?$"
        with pytest.raises(ValueError, match=message):
            OPS[op](given, backend=target.backend, check=target.device == "cuda")


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("aggregation", ["token-mean", "agent-mean"])
def test_an_actor_beyond_int32_is_no_actor_below(target, op, aggregation) -> None:
    """Not taken modulo 2**32."""
    given = {k: v.to(target.device) for k, v in streams().items()}
    for wrong in (2**32 + 1, 2**31, -(2**32), 2):
        actors = torch.tensor([0, wrong, 1], device=target.device)
        call = {"actor_ids": actors, "num_actors": 2, "aggregation": aggregation, "backend": target.backend}
        with pytest.raises(ValueError, match=rf"^actor_ids\[1\]={wrong}: expected an id in \[0, 2\)$"):
            OPS[op](given, **call, check=True)
    with pytest.raises(ValueError, match=r"num_actors=4294967298: expected a count >= 1 and below 2\*\*31"):
        OPS[op](given, actor_ids=actors, num_actors=2**32 + 2, backend=target.backend)


def test_kernels_narrow_actor_ids_once_they_are_in_range(target, monkeypatch) -> None:
    """As on a GPU, where nothing looks at the ids before; the CPU's kernels do themselves."""
    if target == ("native", "cpu", False) or target.backend == "torch":
        pytest.skip("looks at the ids")
    monkeypatch.setattr(importlib.import_module("turnwise.ops.loss.policy_loss"), "check_call", lambda *_: None)
    given = {k: v.to(target.device) for k, v in streams().items()}
    actors = torch.tensor([0, 2**32 + 1, 1], device=target.device)
    for aggregation in ("token-mean", "agent-mean"):
        call = {"actor_ids": actors, "num_actors": 2, "aggregation": aggregation, "backend": target.backend}
        assert OPS["policy_loss"](given, **call).isnan()


@pytest.mark.parametrize("name", ["old_logprobs", "advantages", "mask", "ref_logprobs", "rollout_logprobs", "entropy"])
def test_float64_beside_float32_logprobs_is_computed_in_float32(name) -> None:
    """Advantages from numpy are float64: they are no reason to leave the kernels."""
    s = streams()
    given = {"old_logprobs": s["old"], "advantages": s["advantages"], "mask": s["mask"].float()}
    given |= {"ref_logprobs": s["old"], "rollout_logprobs": s["old"], "entropy": s["rewards"]}
    want = policy_loss(s["logprobs"], **given, kl=KL(), backend="native")
    got = policy_loss(s["logprobs"], **{**given, name: given[name].double()}, kl=KL(), backend="native")
    assert torch.equal(got.loss, want.loss)


def test_inference_tensors_serve_as_everything_but_the_parameters(target) -> None:
    """What a sampler made under `torch.inference_mode` is trained on."""

    def on_device() -> dict[str, Tensor]:
        return {k: v.to(target.device) for k, v in streams().items()}

    with torch.inference_mode():
        made = {k: v.clone() for k, v in on_device().items()}
        for op in FLOAT_OF:
            OPS[op](made, backend=target.backend)
    for op in LOSSES:
        leaf = FLOAT_OF[op]
        if target.backend == "torch":
            continue  # PyTorch saves the factors of a product
        grads = []
        for rest in (on_device(), made):
            given = {**rest, leaf: on_device()[leaf].requires_grad_()}
            loss = OPS[op](given, backend=target.backend)
            loss.backward(retain_graph=True)
            loss.backward()
            grads.append(given[leaf].grad)
        assert torch.equal(*grads)


# ---------------------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"clip": 0.2}, TypeError, r"clip=0\.2: expected a Clip"),
        ({"clip": (0.2, 0.28)}, TypeError, r"clip=\(0\.2, 0\.28\): expected a Clip"),
        ({"clip": Clip}, TypeError, r"clip=.*expected a Clip"),
        ({"clip": GSPO()}, TypeError, r"clip=GSPO.*expected a Clip"),
        ({"kl": 0.1}, TypeError, r"kl=0\.1: expected a KL"),
        ({"kl": "k3"}, TypeError, "kl='k3': expected a KL"),
        ({"correction": 2.0}, TypeError, r"correction=2\.0: expected an ImportanceCorrection"),
        ({"variant": GSPO}, TypeError, "variant=.*expected one of the option objects"),
        ({"variant": Variant()}, TypeError, "variant=.*expected one of the option objects"),
        ({"aggregation": ["token-mean"]}, ValueError, r"aggregation=\['token-mean'\]: expected one of"),
        ({"normalizer": "tokens"}, TypeError, "normalizer: expected a number or a tensor, got str"),
        ({"normalizer": True}, TypeError, "normalizer: expected a number or a tensor, got bool"),
        ({"aggregation": "seq-mean-token-sum-norm", "max_length": "5"}, ValueError, "max_length='5'"),
        ({"aggregation": "seq-mean-token-sum-norm", "max_length": float("inf")}, ValueError, "max_length=inf"),
        ({"actor_ids": torch.zeros(3).long(), "num_actors": 2.0}, ValueError, r"num_actors=2\.0: expected a count"),
        ({"actor_ids": torch.zeros(3).long(), "num_actors": True}, ValueError, "num_actors=True: expected a count"),
        ({"actor_ids": [0, 0, 1], "num_actors": 2}, TypeError, "actor_ids: expected a tensor, got list"),
    ],
)
def test_options_of_the_wrong_kind_are_named(op, change, error, message) -> None:
    given = streams()
    with pytest.raises(error, match=message):
        OPS[op](given, **change)


@pytest.mark.parametrize("op", LOSSES)
def test_numbers_may_be_those_of_numpy(op) -> None:
    given, actors = streams(), {"actor_ids": torch.tensor([0, 1, 1])}
    want = OPS[op](given, clip=Clip(0.25, 0.5), normalizer=7, num_actors=2, **actors)
    with pytest.raises(ValueError, match="num_actors"):  # and what was wrong once does not stick
        OPS[op](given, num_actors=2.0, **actors)
    clip = Clip(np.float32(0.25), np.float64(0.5))
    got = OPS[op](given, clip=clip, normalizer=np.float32(7), num_actors=np.int64(2), **actors)
    assert torch.equal(got, want)
    assert torch.equal(OPS[op](given, clip=clip, normalizer=7, num_actors=torch.tensor(2), **actors), want)
    assert torch.equal(OPS[op](given, clip=clip, normalizer=7, num_actors=2, **actors), want)


def test_bounds_from_a_file_of_settings() -> None:
    """Lists, as JSON and TOML have them, are as good as tuples."""
    listed: Any = ImportanceCorrection(bounds=[0.5, 5.0])  # type: ignore[arg-type]
    assert listed == ImportanceCorrection(bounds=(0.5, 5.0)) and hash(listed) == hash(
        ImportanceCorrection(bounds=(0.5, 5))
    )
    s = streams()
    policy_loss(s["logprobs"], s["old"], s["advantages"], rollout_logprobs=s["old"], correction=listed)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_selecting_variant_looks_at_its_streams_first(backend) -> None:
    s = streams()
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(3, 4\): expected \(3, 5\)"):
        policy_loss(s["logprobs"], s["old"][:, 1:], s["advantages"], variant=ClipCov(), backend=backend)
    packed = s["logprobs"].flatten(), s["old"].flatten(), s["advantages"]
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\]=14: expected 15"):
        select_tokens(*packed, KLCov(), cu_seqlens=torch.tensor([0, 5, 10, 14]))
    with pytest.raises(ValueError, match=r"mask\[0, 0\]=0\.5: expected 0 or 1"):
        select_tokens(s["logprobs"], s["old"], s["advantages"], KLCov(), mask=torch.full((3, 5), 0.5))
    with pytest.raises(TypeError, match=r"variant=0\.2: expected one that singles out tokens"):
        select_tokens(s["logprobs"], s["old"], s["advantages"], 0.2)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["token_reward_sum", "token_returns", "gae"])
def test_rewards_that_are_no_numbers_are_named(target, op) -> None:
    """On the CPU at once, on a GPU with `check=True`; where a token doesn't train, they may be anything."""
    checks = target.device == "cuda" or target.emulated or target.backend == "triton"
    name = "rewards" if op == "gae" else "token_rewards"
    for wrong in (torch.nan, torch.inf):
        given = {k: v.to(target.device) for k, v in streams().items()}
        place = given["mask"].nonzero()[3].tolist()
        given["rewards"][~given["mask"]] = wrong
        OPS[op](given, backend=target.backend, check=True)
        given["rewards"][tuple(place)] = wrong
        with pytest.raises(ValueError, match=rf"{name}\[{place[0]}, {place[1]}\]={wrong}: expected a finite number"):
            OPS[op](given, backend=target.backend, check=checks)
    packed = {k: given[k].flatten() for k in ("rewards", "old")}
    call = {"token_reward_sum": token_reward_sum, "token_returns": lambda r, **o: token_returns(r, 0.9, **o)}
    use = call.get(op, lambda r, **o: gae(r, packed["old"], **o))
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\]=14: expected 15"):
        boundaries = torch.tensor([0, 14], device=target.device)
        use(packed["rewards"].nan_to_num(), cu_seqlens=boundaries, backend=target.backend, check=checks)


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 1.0])
def test_a_reward_that_is_no_number_is_found_in_a_long_row(gamma) -> None:
    for place in (0, 1, 1500, 2999):
        for wrong in (torch.nan, torch.inf):
            rewards = torch.zeros(2, 3000)
            rewards[1, place] = wrong
            with pytest.raises(ValueError, match=rf"token_rewards\[1, {place}\]={wrong}: expected a finite number"):
                token_returns(rewards, gamma)
            with pytest.raises(ValueError, match=rf"rewards\[1, {place}\]={wrong}: expected a finite number"):
                gae(rewards, torch.ones(2, 3000), gamma=gamma, lam=0.5)


def test_lengths_hide_what_lies_behind_them(target) -> None:
    rewards = torch.tensor([[1.0, torch.nan], [2.0, 3.0]], device=target.device)
    call = {"backend": target.backend, "check": True}
    lengths = torch.tensor([1, 2], device=target.device)
    assert token_reward_sum(rewards, lengths=lengths, **call).tolist() == [1.0, 5.0]
    with pytest.raises(ValueError, match=r"token_rewards\[0, 1\]=nan"):
        token_reward_sum(rewards, lengths=lengths.flip(0), **call)
    with pytest.raises(ValueError, match=r"lengths\[1\]=3: expected a number in \[0, 2\]"):
        token_reward_sum(rewards, lengths=lengths + 1, **call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 5, 10, 14])}, r"cu_seqlens\[-1\]=14: expected 15"),
        ({"actor_ids": torch.tensor([0, 1, 2]), "num_actors": 2}, r"actor_ids\[2\]=2: expected an id"),
        ({"mask": torch.full((15,), 0.5)}, r"mask\[0\]=0\.5: expected 0 or 1"),
        ({"normalizer": torch.tensor(-1.0)}, "normalizer=-1.0: expected counts >= 0"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_check_reaches_the_loss_behind_the_head(target, change, message) -> None:
    given = {k: v.to(target.device) for k, v in streams().items()}
    given["hidden"].requires_grad_()
    change = {k: v.to(target.device) if isinstance(v, Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        OPS["linear_policy_loss"](given, **change, backend=target.backend, check=True)


# ---------------------------------------------------------------------------------------------------------------------
# Autograd, autocast, torch.library
# ---------------------------------------------------------------------------------------------------------------------
DIFFERENTIABLE = (*LOSSES, "logprob", "linear_logprob")


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_second_derivative_is_refused_or_right(target, op) -> None:
    given = {k: v.to(target.device) for k, v in streams().items()}
    leaf = given[FLOAT_OF[op]].requires_grad_()

    def slope() -> Tensor:
        # 0.7: a gradient that is scaled goes another way
        total = 0.7 * OPS[op](given, backend=target.backend).square().sum()
        return torch.autograd.grad(total, leaf, create_graph=True)[0]

    if target.backend == "torch":
        (second,) = torch.autograd.grad(slope().sum(), leaf)
        assert second.isfinite().all() and second.abs().max() > 0
        return
    with pytest.raises(RuntimeError, match="use backend='torch'"):
        slope().sum().backward()


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradcheck_of_every_reference(op) -> None:
    given = {k: v.double() if v.is_floating_point() else v for k, v in streams().items()}
    name = FLOAT_OF[op]

    def call(leaf: Tensor) -> Tensor:
        return OPS[op]({**given, name: leaf}, backend="torch")

    leaf = given[name].requires_grad_()
    assert torch.autograd.gradcheck(call, leaf)
    assert torch.autograd.gradgradcheck(call, leaf)


@pytest.mark.parametrize("op", FLOAT_OF)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_rounds_the_head_alone(target, op, dtype) -> None:
    """It casts what a linear layer would get; losses, softmaxes and rewards stay as exact as they were."""
    given = {k: v.to(target.device) for k, v in streams().items()}
    with torch.autocast(target.device, dtype=dtype):
        got = OPS[op](given, backend=target.backend)
    if op.startswith("linear"):
        given |= {k: given[k].to(dtype) for k in ("hidden", "weight")}
    want = OPS[op](given, backend=target.backend)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("op", FLOAT_OF)
def test_opcheck_of_what_each_op_calls(target, opcheck_calls, op) -> None:
    """On every backend that registers ops; the losses and heads with their backwards."""
    if target.emulated:
        pytest.skip("slow in emulation, and registered as the C++ kernels are")

    def run() -> None:
        given = {k: v.to(target.device) for k, v in streams().items()}
        if op in DIFFERENTIABLE:
            given[FLOAT_OF[op]].requires_grad_()
        made = OPS[op](given, backend=target.backend)
        if made.requires_grad:
            made.sum().backward()

    called = opcheck_calls(run)
    if target.backend != "torch":
        assert called and (op not in DIFFERENTIABLE or any(name.endswith("backward") for name in called))


def test_advantages_that_could_be_per_token_are_said_to_count_per_sequence() -> None:
    """Two rows, of which one is empty, and two tokens: the shape can't say what is meant."""
    logprobs, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0])
    hidden, weight, targets = torch.randn(2, 3), torch.randn(5, 3), torch.tensor([1, 2])
    for cu, warns in (([0, 2, 2], True), ([0, 1, 2], False)):
        cu_seqlens = torch.tensor(cu)
        for call in (
            lambda: policy_loss(logprobs, logprobs, advantages, cu_seqlens=cu_seqlens),  # noqa: B023
            lambda: linear_policy_loss(hidden, weight, targets, logprobs, advantages, cu_seqlens=cu_seqlens),  # noqa: B023
        ):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                call()
            assert any("count as one per sequence" in str(each.message) for each in said) == warns
