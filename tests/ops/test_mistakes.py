"""Mistakes are named: the argument, what it is, and what was expected. Every stream of every op, then options."""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turnwise import ops
from turnwise.ops.logprob import linear_chunks

from .table import CASES, LOSSES, PLAIN, VOCABULARY, Case, Size, draw

PACKED = [name for name in CASES if name.count(",") < 2 and name != "factorize"]
IDS = ("targets", "positions", "actor_ids", "group_ids")
ANY_NUMBER = ("rewards", "token_rewards", "values", "mask", "valid", "lengths", "normalizer")  # integers, too


class Wrapper(Tensor):
    """A tensor of a shape and device that has no memory, as a DTensor is one."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} got a wrapper")


# ---------------------------------------------------------------------------------------------------------------------
# Streams
# ---------------------------------------------------------------------------------------------------------------------
def wrong_kinds(case: Case, name: str, good: Tensor) -> dict[str, tuple[Any, type[Exception], str]]:
    """By what is wrong, a value, the error and what it says; ``%`` is the stream's name."""
    axes = case.axes[name]
    wrong: dict[str, tuple[Any, type[Exception], str]] = {
        "a list": (good.tolist(), TypeError, "%.*: expected .*tensor"),
        "complex": (good.to(torch.complex64), TypeError, "% has dtype torch.complex64: exp|^%: expected .*complex64"),
    }
    if axes in ("B", "A") or list(case.axes.values()).count(axes) > 1:  # the first stream gives the shape
        wrong["too long"] = torch.cat([good, good[..., -1:]], -1), ValueError, r"% has shape \(|, as %|lengths has"
    wrong["too deep"] = good[..., None, None], ValueError, r"% has shape \(|, as %"
    if name == "mask":
        for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn):
            wrong[str(dtype)] = good.to(dtype), TypeError, rf"^% has dtype {dtype}: expected one of bool, uint8.*!= 0$"
        wrong["a half"] = torch.full(good.shape, 0.5), ValueError, r"%\[0(, 0)?\]=0\.5: expected 0 or 1"
        wrong["NaN"] = torch.full(good.shape, math.nan), ValueError, r"%\[0(, 0)?\]=nan: expected 0 or 1"
    elif name == "cu_seqlens":
        wrong["not from 0"] = good + 1, ValueError, r"%\[0\]=1: expected 0"
        wrong["going back"] = good[[0, 2, 1, 3]], ValueError, r"%\[2\]=5: expected at least 10"
        wrong["too few tokens"] = good - good // 15, ValueError, r"%\[-1\]=14: expected 15"
        wrong["empty"] = good[:0], ValueError, r"% has shape \(0,\)"
        wrong["floats"] = good.float(), TypeError, "% has dtype torch.float32"
    elif name in IDS:
        wrong["floats"] = good.float(), TypeError, "% has dtype torch.float32: expected int"
        for value in (-1, 10_000, *([2**32 + 1, 2**31, -(2**32)] if name == "actor_ids" else [])):
            last = tuple(size - 1 for size in good.shape)
            changed = good.clone()
            changed[last] = value
            message = rf"^%\[{', '.join(map(str, last))}\]={value}: expected an id in \[0, "
            wrong[str(value)] = changed, ValueError, message
    elif good.is_floating_point():
        if name not in ("bias", "normalizer"):  # converted
            wrong["float8"] = good.to(torch.float8_e4m3fn), TypeError, "% has dtype torch.float8_e4m3fn: expected"
        if name not in ANY_NUMBER:
            wrong["integers"] = good.int(), TypeError, "% has dtype torch.int32|^%: expected .*got torch.int32"
        if name in ("rewards", "token_rewards"):
            for value in (math.nan, math.inf):
                message = rf"%\[\d+(, \d+)?\]={value}: expected a fin"
                wrong[str(value)] = torch.full(good.shape, value), ValueError, message
        if name == "normalizer":
            wrong["negative"] = good - 5, ValueError, "%.*expected counts >= 0"
            wrong["NaN"] = good * math.nan, ValueError, "%.*expected counts >= 0"
    return wrong


@pytest.mark.parametrize("name", PACKED)
def test_every_stream_is_looked_at(target, name) -> None:
    """Values on a CPU at once, on a GPU with `check=True`."""
    case = CASES[name]
    good = draw(case, Size(3, 5))
    for stream in case.axes:
        for what, (value, error, message) in wrong_kinds(case, stream, good[stream]).items():
            print(stream, what)
            with pytest.raises(error, match=message.replace("%", stream)):
                case.call(target.on({**good, stream: value}), backend=target.backend, check=True)
            if not target.on_gpu and name != "linear_policy_loss":
                with pytest.raises(error, match=message.replace("%", stream)):
                    case.call({**good, stream: value}, backend=target.backend)


@pytest.mark.parametrize("name", PLAIN)
def test_every_stream_of_plain_pytorch_is_looked_at(name) -> None:
    case = PLAIN[name]
    good = draw(case, Size(3, 5))
    for stream in case.axes:
        wrong = wrong_kinds(case, stream, good[stream])
        for what in ("a list", "too long", "a half", "integers", "going back"):
            if what in wrong and (stream, what) != ("advantages", "integers"):
                print(stream, what)
                value, error, _ = wrong[what]
                with pytest.raises(error, match=rf"{stream}|cu_seqlens\[-1\]=15: expected 16"):
                    case.call({**good, stream: value})


ELSEWHERE = {"policy_loss": "old_logprobs", "gae": "values", "group_advantage": "group_ids", "logprob": "targets"}
ELSEWHERE |= {"optimal_token_baseline": "sum_pi_squared", "off_policy_mask": "rollout_logprobs"}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_stream_on_another_device_is_named(name) -> None:
    case = (CASES | PLAIN)[name]
    good, stream = draw(case, Size(3, 5)), ELSEWHERE[name]
    with pytest.raises(ValueError, match=rf"{stream} (is|has shape .*) on meta: expected"):
        case.call({**good, stream: good[stream].to("meta")})


@pytest.mark.parametrize("name", [name for name in PACKED if "packed" not in name])
def test_a_wrapper_without_memory_is_rejected(target, name) -> None:
    """Not read: there is nothing at its address."""
    case = CASES[name]
    good = target.on(draw(case, Size(3, 5)))
    for stream in case.axes:
        try:
            case.call({**good, stream: Wrapper(good[stream])}, backend=target.backend)
        except TypeError as error:
            assert "expected a tensor with memory of its own, not a wrapper such as a DTensor" in str(error)
        except RuntimeError as error:  # the dispatcher's or the wrapper's own
            assert "got a wrapper" in str(error)
        else:
            pytest.fail(stream)


@pytest.mark.parametrize("name", ["logprob", "linear_logprob", "linear_policy_loss"])
def test_no_target_means_ignore(target, name) -> None:
    """As -100 does in `torch.nn.functional.cross_entropy`."""
    given = draw(CASES[name], Size(3, 5))
    index = (1, 2) if name == "logprob" else (7,)
    given["targets"][index] = -100
    place = ", ".join(map(str, index))
    message = rf"^targets\[{place}\]=-100: expected an id in \[0, {VOCABULARY}\)\. Pass ignore_index"
    with pytest.raises(ValueError, match=f"{message}=-100 to leave out the tokens with this target$"):
        CASES[name].call(target.on(given), backend=target.backend, check=target.device == "cuda")


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 1.0])
def test_a_reward_that_is_no_number_is_found_in_a_long_row(gamma) -> None:
    for place in (0, 1, 1500, 2999):
        for wrong in (torch.nan, torch.inf):
            rewards = torch.zeros(2, 3000)
            rewards[1, place] = wrong
            with pytest.raises(ValueError, match=rf"token_rewards\[1, {place}\]={wrong}: expected a finite number"):
                ops.token_returns(rewards, gamma)
            with pytest.raises(ValueError, match=rf"rewards\[1, {place}\]={wrong}: expected a finite number"):
                ops.gae(rewards, torch.ones(2, 3000), gamma=gamma, lam=0.5)


def test_lengths_hide_what_lies_behind_them(target) -> None:
    rewards, lengths = target.on((torch.tensor([[1.0, torch.nan], [2.0, 3.0]]), torch.tensor([1, 2])))
    call = {"backend": target.backend, "check": True}
    assert ops.token_reward_sum(rewards, lengths=lengths, **call).tolist() == [1.0, 5.0]
    with pytest.raises(ValueError, match=r"token_rewards\[0, 1\]=nan"):
        ops.token_reward_sum(rewards, lengths=lengths.flip(0), **call)
    for wrong, message in ((lengths + 1, r"\[1\]=3: expected a number in \[0, 2\]"), (lengths - 2, r"\[0\]=-1")):
        with pytest.raises(ValueError, match=f"lengths{message}"):
            ops.token_reward_sum(rewards, lengths=wrong, **call)
    with pytest.raises(ValueError, match="lengths: expected neither mask nor"):
        ops.token_reward_sum(rewards, lengths=lengths, mask=rewards > 0, **call)


# ---------------------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------------------
ACTORS = torch.zeros(3).long()
OF_A_LOSS = [
    ({"clip": 0.2}, TypeError, r"clip=0\.2: expected a Clip"),
    ({"clip": ops.GSPO()}, TypeError, r"clip=GSPO.*expected a Clip"),
    ({"clip": ops.Clip(), "variant": ops.GSPO()}, ValueError, "clip=Clip.*and variant=GSPO.*expected one of them"),
    ({"kl": 0.1}, TypeError, r"kl=0\.1: expected a KL"),
    ({"kl": ops.KL()}, ValueError, "ref_logprobs=None"),
    ({"correction": 2.0}, TypeError, r"correction=2\.0: expected an ImportanceCorrection"),
    ({"correction": ops.ImportanceCorrection()}, ValueError, "rollout_logprobs=None"),
    ({"variant": "gspo"}, TypeError, "variant='gspo'"),
    ({"variant": ops.GSPO}, TypeError, "variant=.*expected one of the option objects"),
    ({"aggregation": "mean"}, ValueError, "aggregation='mean': expected one of token-mean"),
    ({"aggregation": ["token-mean"]}, ValueError, r"aggregation=\['token-mean'\]: expected one of"),
    ({"aggregation": "agent-mean"}, ValueError, "actor_ids=None"),
    ({"aggregation": "seq-mean-token-sum-norm"}, ValueError, "max_length=None"),
    ({"aggregation": "seq-mean-token-sum-norm", "max_length": math.inf}, ValueError, "max_length=inf"),
    ({"normalizer": "tokens"}, TypeError, "normalizer: expected a number or a tensor, got str"),
    ({"normalizer": True}, TypeError, "normalizer: expected a number or a tensor, got bool"),
    ({"normalizer": torch.ones(2)}, ValueError, r"normalizer has shape \(2,\): expected \(\)"),
    ({"actor_ids": ACTORS}, ValueError, "num_actors=None"),
    ({"actor_ids": ACTORS, "num_actors": 2.0}, ValueError, r"num_actors=2\.0: expected a count"),
    ({"actor_ids": ACTORS, "num_actors": 2**32 + 2}, ValueError, r"num_actors=4294967298: .*>= 1 and below 2\*\*31"),
    ({"actor_ids": [0, 0, 1], "num_actors": 2}, TypeError, "actor_ids: expected a tensor, got list"),
    ({"old_logprobs": None}, TypeError, "old_logprobs: expected a tensor, got NoneType"),
    ({"selected": torch.ones(3, 5, dtype=torch.bool)}, ValueError, "selected: expected None, as variant=Clip"),
]


def plain(name: str, **given: Any) -> Any:
    """A loss with the streams that it needs, and others."""
    streams = draw(CASES[name], Size(3, 5))
    optional = ("ref_logprobs", "rollout_logprobs", "actor_ids", "normalizer", "entropy")
    needed = {k: v for k, v in streams.items() if k not in optional}
    return getattr(ops, name)(**{**needed, **given})


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        (name, *case)
        for case in OF_A_LOSS
        for name in LOSSES
        if (name, *case[0]) != ("grouped_policy_loss", "selected")  # which it does not take
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_of_a_loss_are_named(name, change, error, message) -> None:
    """Before anything is computed."""
    if "selected" in change and name == "linear_policy_loss":
        change = {"selected": change["selected"].flatten()}
    with pytest.raises(error, match=message):
        plain(name, **change)


def test_what_a_loss_cannot_combine_is_named(target) -> None:
    streams = target.on((torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2)))
    both = {"variant": ops.GMPO(), "correction": ops.ImportanceCorrection(), "rollout_logprobs": streams[0]}
    with pytest.raises(ValueError, match="level='sequence', as GMPO"):
        ops.policy_loss(*streams, backend=target.backend, **both)
    with pytest.raises(ValueError, match=r"expected \[N\], as cu_seqlens is given"):
        ops.policy_loss(*streams, backend=target.backend, cu_seqlens=target.on(torch.tensor([0, 6])))


def test_actor_ids_out_of_range_give_nan(target, monkeypatch) -> None:
    """As on a GPU, where nothing looks at the ids before: NaN, not an id modulo 2**32. A CPU's kernels look."""
    if target.quick and target.device == "cpu":
        return
    monkeypatch.setattr(importlib.import_module("turnwise.ops.loss.policy_loss"), "check_call", lambda *_: None)
    given = target.on(draw(CASES["policy_loss"], Size(3, 5)))
    for wrong in (2**32 + 1, 7, -1):
        actors = target.on(torch.tensor([0, wrong, 1]))
        for aggregation in ("token-mean", "agent-mean"):
            call = {"actor_ids": actors, "num_actors": 2, "aggregation": aggregation, "backend": target.backend}
            assert ops.policy_loss(**given, **call).loss.isnan()


@pytest.mark.parametrize("name", ["logprob", "linear_logprob"])
def test_a_target_out_of_range_gives_nan(target, monkeypatch, name) -> None:
    """As on a GPU, where nothing looks at the ids before. A CPU's kernels look."""
    if target.quick and target.device == "cpu":
        return
    monkeypatch.setattr(importlib.import_module(f"turnwise.ops.logprob.{name}"), "check_id_values", lambda *_: None)
    given = target.on(draw(CASES[name], Size(3, 5)))
    given["targets"] = given["targets"].clone()
    for index, wrong in enumerate((-1, VOCABULARY, 2**40)):
        given["targets"].view(-1)[2 * index] = wrong
    logprobs = CASES[name].call(given, backend=target.backend)[0].view(-1)
    assert logprobs[:6].isnan().tolist() == [True, False] * 3


@pytest.mark.parametrize("name", LOSSES)
def test_numbers_may_be_those_of_numpy(name) -> None:
    actors = {"actor_ids": torch.tensor([0, 1, 1])}
    want = plain(name, clip=ops.Clip(0.25, 0.5), normalizer=7, num_actors=2, **actors).loss
    with pytest.raises(ValueError, match="num_actors"):  # and what was wrong once does not stick
        plain(name, num_actors=2.0, **actors)
    clip = ops.Clip(np.float32(0.25), np.float64(0.5))
    for number in (np.int64(2), torch.tensor(2), 2):
        got = plain(name, clip=clip, normalizer=np.float32(7), num_actors=number, **actors).loss
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["old_logprobs", "advantages", "mask", "ref_logprobs", "rollout_logprobs", "entropy"])
def test_float64_beside_float32_logprobs_is_computed_in_float32(name) -> None:
    """Advantages from numpy are float64: they are no reason to leave the kernels."""
    case = CASES["policy_loss, all streams"]
    given = draw(case, Size(3, 5))
    got = case.call({**given, name: given[name].double()}, backend="native")
    assert all(map(torch.equal, got, case.call(given, backend="native")))


def test_bounds_from_a_file_of_settings() -> None:
    """Lists, as JSON and TOML have them, are as good as tuples."""
    listed: Any = ops.ImportanceCorrection(bounds=[0.5, 5.0])  # type: ignore[arg-type]
    paired = ops.ImportanceCorrection(bounds=(0.5, 5.0))
    assert listed == paired and hash(listed) == hash(paired)
    plain("policy_loss", rollout_logprobs=torch.zeros(3, 5), correction=listed)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_selecting_variant_looks_at_its_streams_first(backend) -> None:
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(3, 4\): expected \(3, 5\)"):
        plain("policy_loss", old_logprobs=torch.zeros(3, 4), variant=ops.ClipCov(), backend=backend)
    streams = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2)
    chosen = torch.zeros(2, 3, dtype=torch.bool)
    for selected, error, message in (
        (chosen[:1], ValueError, r"selected has shape \(1, 3\): expected \(2, 3\)"),
        (chosen.int(), TypeError, "expected a bool tensor"),
    ):
        with pytest.raises(error, match=message):
            ops.policy_loss(*streams, variant=ops.KLCov(), selected=selected, backend=backend)
    for variant in (0.2, ops.GPG()):
        with pytest.raises(TypeError, match=r"variant=.*: expected one that singles out tokens, ClipCov or KLCov"):
            ops.select_tokens(*streams, variant)  # type: ignore[arg-type]


def test_a_head_computes_nothing_before_it_looks(monkeypatch) -> None:
    """With autocast or without, and in a graph: the arguments of the loss behind it too."""
    monkeypatch.delattr(linear_chunks.Products, "logits")
    given = draw(CASES["linear_policy_loss"], Size(3, 5))
    given["hidden"].requires_grad_()
    for change, error, message in (
        ({"weight": None}, TypeError, "weight: expected a tensor, got NoneType"),
        ({"weight": given["weight"][:, 1:]}, ValueError, r"weight has shape \(150, 11\): expected \[V, 12\]"),
        ({"weight": given["weight"][:0]}, ValueError, "expected at least one row"),
        ({"weight": given["weight"].bfloat16()}, TypeError, "weight has dtype torch.bfloat16: expected torch.float32"),
        ({"bias": given["bias"][1:]}, ValueError, r"bias has shape \(149,\): expected \(150,\)"),
        ({"hidden": torch.zeros(15, 0), "weight": torch.zeros(9, 0)}, ValueError, "expected at least one column"),
        ({"cu_seqlens": None}, TypeError, "cu_seqlens: expected a tensor, got NoneType"),
        ({"entropy": torch.ones(15)}, TypeError, "entropy: expected True or False"),
        ({"selected": torch.ones(14).bool(), "variant": ops.KLCov(), "normalizer": 1.0}, ValueError, "selected has"),
        ({"variant": ops.SAPO(), "clip": ops.Clip()}, ValueError, "clip=Clip.*and variant=SAPO"),
        ({"temperature": -1.0}, ValueError, r"temperature=-1\.0: expected a finite number > 0"),
        ({"temperature": math.nan}, ValueError, "temperature=nan"),
        ({"softcap": 0.0}, ValueError, r"softcap=0\.0: expected a finite number > 0, or None"),
        ({"softcap": math.inf}, ValueError, "softcap=inf"),
        ({"softcap": "30"}, ValueError, "softcap='30'"),
        ({"ignore_index": 1.5}, ValueError, r"ignore_index=1\.5: expected a whole number"),
        ({"ignore_index": True}, ValueError, "ignore_index=True"),
        ({"max_memory": 0}, ValueError, "max_memory=0: expected a number of bytes, at least 1, or None"),
        ({"max_memory": 1.5}, ValueError, "max_memory=1.5"),
        ({"entropy_coef": math.nan}, ValueError, "entropy_coef=nan: expected a finite number"),
        ({"reads": torch.zeros(15)}, TypeError, "reads has dtype torch.float32: expected int64 or int32"),
        ({"reads": torch.full((15,), 15)}, ValueError, r"reads\[0\]=15: expected an id in \[0, 15\)"),
        (
            {"reads": torch.zeros(14).long(), "normalizer": 1.0},
            ValueError,
            r"old_logprobs has shape \(15,\): expected \(14,\)",
        ),
        (
            {"grad_into": torch.zeros(150, 12).double()},
            TypeError,
            "grad_into has type torch.float64: expected a float32",
        ),
        (
            {"grad_into": torch.zeros(149, 12)},
            ValueError,
            r"grad_into has shape \(149, 12\) on cpu: expected",
        ),
    ):
        for autocast in (False, True):
            if autocast and "dtype" in message:  # which makes it one type
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(error, match=message):
                ops.linear_policy_loss(**{**given, "num_actors": 3, **change})
        head = {k: v for k, v in {**given, **change}.items() if k in ("hidden", "weight", "targets", "bias", *HEAD)}
        if {*change} <= {"hidden", "weight", "bias", *HEAD}:
            with pytest.raises(error, match=message):
                ops.linear_logprob(**head)
    for change, message in (({"temperature": 0}, "temperature=0"), ({"softcap": 0}, "softcap=0")):
        with pytest.raises(ValueError, match=message):
            ops.logprob(torch.zeros(3, 5), torch.zeros(3).long(), **change)
    for logits in (torch.zeros(3), torch.zeros(3, 0)):
        with pytest.raises(ValueError, match=r"logits has shape"):
            ops.logprob(logits, torch.zeros(3).long())


HEAD = ("temperature", "softcap", "ignore_index", "max_memory")


def test_advantages_that_could_be_per_token_are_said_to_count_per_sequence() -> None:
    """Two rows, of which one is empty, and two tokens: the shape can't say what is meant."""
    logprobs, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -1.0])
    hidden, weight, targets = torch.randn(2, 3), torch.randn(5, 3), torch.tensor([1, 2])
    for cu, warns in ((torch.tensor([0, 2, 2]), True), (torch.tensor([0, 1, 2]), False)):
        for function, streams in ((ops.policy_loss, (logprobs,)), (ops.linear_policy_loss, (hidden, weight, targets))):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                function(*streams, logprobs, advantages, cu_seqlens=cu)
            ambiguous = [each.filename for each in said if "count as one per sequence" in str(each.message)]
            assert ambiguous == [__file__] * warns  # once, at the line that called


ZEROS, PAIR = torch.zeros(2, 3), torch.zeros(2).long()
VALUES = {"values": ZEROS, "old_values": ZEROS, "returns": ZEROS}
GROUPED = {"rewards": torch.tensor([1.0, 2.0]), "group_ids": PAIR, "num_groups": 2}
NORMALIZER = {"mask": torch.ones(2, 3), "aggregation": "token-mean"}
OTHERS = [
    (ops.token_returns, {"token_rewards": ZEROS, "gamma": -0.1}, r"gamma=-0\.1: expected a number in \[0, 1\]"),
    (ops.token_returns, {"token_rewards": ZEROS, "gamma": 1.5}, r"gamma=1\.5"),
    (ops.token_reward_sum, {"token_rewards": torch.zeros(())}, r"token_rewards has shape \(\)"),
    (ops.token_reward_sum, {"token_rewards": ZEROS, "cu_seqlens": torch.tensor([0, 3])}, r"\(2, 3\): expected \[N\]"),
    (ops.gae, {"rewards": ZEROS, "values": ZEROS, "gamma": 1.1}, r"gamma=1\.1: expected a number in \[0, 1\]"),
    (ops.gae, {"rewards": ZEROS, "values": ZEROS, "lam": -1.0}, r"lam=-1\.0: expected"),
    (ops.gae, {"rewards": ZEROS[0], "values": ZEROS[0]}, r"rewards has shape \(3,\): expected \[B, T\]"),
    (ops.value_loss, {**VALUES, "clip": 0}, "clip=0: expected None or a fin"),
    (ops.value_loss, {**VALUES, "clip": math.nan}, "clip=nan"),
    (ops.value_loss, {**VALUES, "old_values": None}, "old_values=None: expected the values before"),
    (ops.value_loss, {**VALUES, "aggregation": "sum"}, "aggregation='sum'"),
    (ops.loss_normalizer, {"aggregation": "sum", "mask": ZEROS}, "aggregation='sum'"),
    (ops.loss_normalizer, {"aggregation": "token-mean"}, "mask=None"),
    (ops.loss_normalizer, {"aggregation": "agent-mean", "mask": ZEROS}, "actor_ids=None"),
    (ops.loss_normalizer, {"aggregation": "agent-mean", "mask": ZEROS, "actor_ids": PAIR}, "num_actors=None"),
    (ops.loss_normalizer, {**NORMALIZER, "actor_ids": PAIR + 1, "num_actors": 1}, r"\[0\]=1"),
    (ops.loss_normalizer, {"aggregation": "seq-mean-token-sum-norm", "mask": ZEROS, "max_length": 0}, "max_length=0"),
    (ops.top_entropy_mask, {"entropy": ZEROS, "share": 0}, r"share=0: expected a number in \(0, 1\]"),
    (
        ops.optimal_token_baseline,
        {"token_rewards": ZEROS, "old_logprobs": ZEROS, "sum_pi_squared": ZEROS, "group_ids": PAIR, "eps": -1},
        "eps=-1",
    ),
    *(
        (ops.group_advantage, GROUPED | change, message)
        for change, message in (
            ({"num_groups": -2}, "num_groups=-2: expected a count >= 0"),
            ({"num_groups": 1.0}, r"num_groups=1\.0: expected a count >= 0"),
            ({"group_ids": torch.tensor([0, 2**63 - 1]), "num_groups": None}, r"\[1\]=9223372036854775807: .*2\*\*63"),
            ({"lengths": torch.tensor([1.0, -1.0]), "center": "length_weighted"}, r"lengths\[1\]=-1\.0"),
            ({"lengths": torch.tensor([1.0, math.inf]), "center": "length_weighted"}, r"lengths\[1\]=inf"),
            ({"center": "length_weighted"}, "lengths=None"),
            ({"pool": "rollouts"}, "pool='rollouts': expected one of rows, trajectory"),
            ({"pool": "trajectory"}, "trajectory_ids=None"),
            ({"center": "median"}, "center='median'"),
            ({"scale": "max"}, "scale='max'"),
            ({"singleton": "one"}, "singleton='one'"),
            ({"group_ids": torch.tensor([0, 1]), "singleton": "error"}, "group 0 has a single member"),
            *(({"ddof": wrong}, f"ddof={wrong!r}: expected 0 or 1") for wrong in (2, 1.0, True)),
            ({"eps": "small"}, "eps='small': expected a finite number >= 0"),
            *(({"eps": wrong}, f"eps={wrong}") for wrong in (-1.0, math.inf)),
            *(({"min_std": wrong}, f"min_std={wrong}") for wrong in (math.nan, None)),
        )
    ),
]


@pytest.mark.parametrize(("function", "given", "message"), OTHERS, ids=lambda value: getattr(value, "__name__", ""))
def test_other_options_are_named(function, given, message) -> None:
    for backend in ("native", "torch") if function is ops.group_advantage else (None,):
        with pytest.raises(ValueError, match=message):
            function(**given, **({"backend": backend} if backend else {}))
