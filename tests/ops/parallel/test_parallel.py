"""Ops whose vocabulary or tokens are split over two or four processes give the results of one process.

`ranks.py` starts the processes once per number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from turnwise import ops
from turnwise.ops import CISPO, GMPO, GSPO, KL, SAPO, ImportanceCorrection, KLCov
from turnwise.ops.logprob import linear_chunks
from turnwise.ops.logprob.choice import Chunks

pytestmark = pytest.mark.slow

TOKENS, VOCABULARY, WIDTH = 47, 301, 20
SPLITS = {2: [0, 200, 301], 4: [0, 1, 150, 290, 301]}  # columns of the vocabulary: uneven, one rank with one column
LENGTHS = [13, 0, 9, 1, 24]  # of the sequences
PARTS = {2: [0, 20, 47], 4: [0, 15, 15, 30, 47]}  # tokens of a packed stream: rows span ranks, and one rank has none
COLUMNS = {2: [0, 9, 24], 4: [0, 9, 9, 23, 24]}  # the same of a padded batch
IGNORE = -100
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


class Case(NamedTuple):
    op: str
    dtype: str = "float32"
    backend: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.op, self.dtype, self.backend or "auto", *(f"{k}={v!r}" for k, v in self.options)])


SOFTMAX = (("temperature", 0.7), ("softcap", 6.0), ("ignore_index", IGNORE), ("entropy", True))
CLIPPED = (("kl", KL("k3", coef=0.1)),)
TOKEN_LEVEL, SEQUENCE_LEVEL = (None, CISPO(), SAPO()), (GSPO(), GMPO())
CORRECTED = (("correction", ImportanceCorrection("sequence")),)
CASES = [
    *(Case(op, d, None, o) for op in ("logprob", "linear_logprob") for d in TOLERANCE for o in ((), SOFTMAX)),
    *(Case(op, "float32", "torch", SOFTMAX) for op in ("logprob", "linear_logprob")),
    Case("logprob", options=(("rows", True),)),
    Case("logprob", options=(("inplace_backward", True),)),
    Case("linear_logprob", options=(("positions", True), ("entropy", True))),
    *(Case("linear_policy_loss", d, None, (*SOFTMAX[:3], *CLIPPED)) for d in TOLERANCE),
    Case("linear_policy_loss", "float32", "torch", CLIPPED),
    Case("linear_policy_loss", options=(("variant", GSPO()), ("aggregation", "seq-mean-token-mean"))),
    Case("linear_policy_loss", options=(("entropy", True), ("aggregation", "agent-mean"))),
    *(
        Case("policy_loss", dtype, None, (("variant", variant), ("padded", padded), ("aggregation", aggregation)))
        for dtype, padded, aggregation in (
            ("float64", False, "token-mean"),
            ("float32", False, "seq-mean-token-mean"),
            ("float32", True, "seq-mean-token-sum"),
        )
        for variant in (*TOKEN_LEVEL, *SEQUENCE_LEVEL)
    ),
    Case("policy_loss", options=(*CLIPPED, *CORRECTED, ("aggregation", "agent-mean"))),
    Case("policy_loss", options=(("kl", KL("k3", coef=0.1, importance_weighted=True)), ("variant", GSPO()))),
    Case("policy_loss", options=(("per_token", True), ("aggregation", "seq-mean-token-sum-norm"), ("max_length", 30))),
    Case("policy_loss", options=(("normalizer", 31.0), ("padded", True), ("per_token", True))),
    Case("policy_loss", options=(("variant", KLCov()),)),
    Case("policy_loss", "bfloat16", None, (("variant", GSPO()),)),
]


# ---------------------------------------------------------------------------------------------------------------------
# The whole, and one rank's share of it
# ---------------------------------------------------------------------------------------------------------------------
def make(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, VOCABULARY - 1
    given = {
        "logits": 4 * noise(TOKENS, VOCABULARY),
        "hidden": noise(TOKENS, WIDTH),
        "weight": 0.6 * noise(VOCABULARY, WIDTH),
        "bias": noise(VOCABULARY),
        "targets": targets,
        "grad_logprob": noise(TOKENS),
        "grad_entropy": noise(TOKENS),
        "advantages": noise(len(LENGTHS)),
        "token_advantages": noise(TOKENS),
        "mask": torch.rand(TOKENS, generator=generator) < 0.8,
        "actor_ids": torch.tensor([0, 1, 0, 2, 1]),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0),
    }
    given["logprobs"] = -noise(TOKENS).square()
    for name in ("old", "ref", "rollout"):
        given[name] = given["logprobs"] + 0.4 * noise(TOKENS)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def padded(stream: Tensor) -> Tensor:
    """A packed stream as a batch ``[B, T]`` filled up with NaN, or False."""
    rows = stream.split(LENGTHS)
    empty = False if stream.dtype is torch.bool else torch.nan
    return torch.stack([torch.cat([r, torch.full((max(LENGTHS) - len(r),), empty, dtype=r.dtype)]) for r in rows])


def share(case: Case, given: dict[str, Tensor], rank: int | None, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The leaves of a head, of which a rank has some columns, and the call's other arguments."""
    columns = slice(None) if rank is None else slice(*SPLITS[world][rank : rank + 2])
    names = ("logits",) if case.op == "logprob" else ("hidden", "weight", "bias")
    cut = {"logits": given["logits"][:, columns], "hidden": given["hidden"]}
    cut |= {name: given[name][columns] for name in ("weight", "bias")}
    options, leaves = dict(case.options), {name: cut[name].clone().requires_grad_() for name in names}
    ignored = torch.arange(TOKENS) % 5 == 2 if "ignore_index" in options else torch.zeros(TOKENS, dtype=torch.bool)
    options["targets"] = given["targets"].masked_fill(ignored, IGNORE)
    if "bias" in leaves:
        options["bias" if rank is None else "bias_shard"] = leaves["bias"]
    return leaves, options


def logprob_case(case: Case, given: dict[str, Tensor], rank: int | None, world: int) -> dict[str, Tensor]:
    """Values and gradients. ``rank`` is ``None`` for one process with everything."""
    alone = rank is None
    leaves, options = share(case, given, rank, world)
    targets, options["backend"] = options.pop("targets"), case.backend
    if case.op == "logprob":
        logits, function = leaves["logits"] * 1.0, ops.logprob if alone else ops.vocab_parallel_logprob
        if options.pop("rows", False):
            logits, targets = logits.view(1, TOKENS, -1), targets.view(1, TOKENS)
        out = function(logits, targets, **options)
    else:
        if options.pop("positions", False):
            options["positions"] = (torch.arange(TOKENS) * 7) % 30
        call: Callable[..., Any] = ops.linear_logprob if alone else ops.vocab_parallel_linear_logprob
        out = call(leaves["hidden"], leaves["weight"], targets, **options)
    values, entropy = out if "entropy" in options else (out, None)
    loss = (values.flatten() * given["grad_logprob"]).sum()
    if entropy is not None:
        loss = loss + (entropy * given["grad_entropy"]).sum()
    loss.backward()
    if options.get("inplace_backward") and not alone:
        assert torch.equal(logits.detach(), leaves["logits"].grad)
    found = {"values": values.flatten(), **({} if entropy is None else {"entropy": entropy})}
    return found | {name: leaf.grad for name, leaf in leaves.items()}


def head_loss_case(case: Case, given: dict[str, Tensor], rank: int | None, world: int) -> dict[str, Tensor]:
    leaves, options = share(case, given, rank, world)
    function: Callable[..., Any] = ops.linear_policy_loss if rank is None else ops.vocab_parallel_linear_policy_loss
    result = function(
        leaves["hidden"], leaves["weight"], options.pop("targets"), given["old"] - 3, given["advantages"],
        mask=given["mask"], cu_seqlens=given["cu_seqlens"], actor_ids=given["actor_ids"], num_actors=3,
        ref_logprobs=given["ref"] - 3 if "kl" in options else None, **options,
    )  # fmt: skip
    result.loss.backward()
    return {"loss": result.loss, **result.metrics} | {name: leaf.grad for name, leaf in leaves.items()}


def loss_case(case: Case, given: dict[str, Tensor], rank: int | None, world: int) -> dict[str, Tensor]:
    options = dict(case.options)
    layout = padded if options.pop("padded", False) else torch.clone
    given = dict(given)
    names = ("logprobs", "old", "ref", "rollout", "mask", "token_advantages")
    per_token = options.pop("per_token", False)
    streams = {name: layout(given[name]) for name in names}
    if options.get("variant") == KLCov():
        arguments = {"mask": streams["mask"], "cu_seqlens": given["cu_seqlens"]}
        advantages = given["advantages"]
        select = ops.select_tokens(streams["logprobs"], streams["old"], advantages, KLCov(share=0.2), **arguments)
        streams["selected"] = select
    if rank is not None:
        ends = COLUMNS if layout is padded else PARTS
        part = slice(*ends[world][rank : rank + 2])
        streams = {name: value[..., part] for name, value in streams.items()}
    leaf = streams["logprobs"].clone().requires_grad_()
    function: Callable[..., Any] = ops.policy_loss if rank is None else ops.sequence_parallel_policy_loss
    result = function(
        leaf, streams["old"], streams["token_advantages"] if per_token else given["advantages"], mask=streams["mask"],
        cu_seqlens=None if layout is padded else given["cu_seqlens"], ref_logprobs=streams["ref"],
        rollout_logprobs=streams["rollout"], actor_ids=given["actor_ids"], num_actors=3,
        selected=streams.get("selected"), **options,
    )  # fmt: skip
    (2 * result.loss).backward()
    extra = {f"{name} by actor": value for name, value in result.actor_metrics.items()}
    return {"loss": result.loss, **result.metrics, **extra, "logprobs": leaf.grad}


RUN = {
    "logprob": logprob_case,
    "linear_logprob": logprob_case,
    "linear_policy_loss": head_loss_case,
    "policy_loss": loss_case,
}


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes: every rank raises, so that none waits for another
# ---------------------------------------------------------------------------------------------------------------------
def mistakes(rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """Calls that must raise on every rank; most go wrong on the last one alone."""
    given = make(torch.float32)
    last = rank == world - 1
    columns = slice(*SPLITS[world][rank : rank + 2])
    logits, weight, targets = given["logits"][:, columns], given["weight"][columns], given["targets"]
    part = slice(*PARTS[world][rank : rank + 2])
    logprobs, old, rest = given["logprobs"][part], given["old"][part], (given["advantages"],)
    cu = given["cu_seqlens"]
    parallel, sequence = ops.vocab_parallel_logprob, ops.sequence_parallel_policy_loss
    linear, loss = ops.vocab_parallel_linear_logprob, ops.vocab_parallel_linear_policy_loss
    alone = dist.new_group([0])
    return {
        "fewer targets": lambda: parallel(logits[1:] if last else logits, targets[1:] if last else targets),
        "other targets": lambda: parallel(logits, targets.flip(0) if last else targets),
        "other temperature": lambda: parallel(logits, targets, temperature=0.5 if last else 1.0),
        "wrong shape": lambda: parallel(logits[0] if last else logits, targets),
        "not a tensor": lambda: linear(given["hidden"], None if last else weight, targets),
        "wrong width": lambda: linear(given["hidden"], weight[:, 1:] if last else weight, targets),
        "id of no rank": lambda: parallel(logits, targets + 1),
        "wrong start": lambda: parallel(logits, targets, vocab_start=17),
        "other op": lambda: linear(given["hidden"], weight, targets) if last else parallel(logits, targets),
        "other old": lambda: loss(given["hidden"], weight, targets, given["old"] + last, *rest, cu_seqlens=cu),
        "not my group": lambda: parallel(logits, targets, group=alone if rank else dist.GroupMember.NON_GROUP_MEMBER),
        "no group": lambda: parallel(logits, targets, group="tensor"),
        "other boundaries": lambda: sequence(logprobs, old, *rest, cu_seqlens=cu + (torch.arange(6) > 4) * last),
        "too few tokens": lambda: sequence(logprobs[1:], old[1:], *rest, cu_seqlens=cu),
        "other advantages": lambda: sequence(logprobs, old, given["advantages"] + last, cu_seqlens=cu),
        "no selection": lambda: sequence(logprobs, old, *rest, cu_seqlens=cu, variant=KLCov()),
        "custom": lambda: sequence(logprobs, old, *rest, cu_seqlens=cu, variant=ops.Custom(lambda lp, old, a: lp)),
        "other variant": lambda: sequence(logprobs, old, *rest, cu_seqlens=cu, variant=GSPO() if last else GMPO()),
    }


MESSAGES = {
    "fewer targets": r"targets: .*\(46,\).* on rank {last} of the group, expected .*\(47,\).*, as on rank 0",
    "other targets": r"targets: int64 \(47,\) with checksum .* on rank {last} of the group, expected int64 \(47,\)",
    "other temperature": "temperature: 0.5 on rank {last} of the group, expected 1.0, as on rank 0",
    "wrong shape": r"logits_shard has shape \(\d+,\): expected \[N, V\] or \[B, T, V\]",
    "not a tensor": "weight_shard: expected a tensor, got NoneType",
    "wrong width": r"weight_shard has shape \(\d+, 19\): expected \[V, 20\], as hidden",
    "id of no rank": r"targets\[1\]=301: expected an id in \[0, 301\)",
    "wrong start": r"vocab_start=17: expected \d+, the sum of the widths of the ranks before",
    "other op": "function: vocab_parallel_linear_logprob on rank {last} of the group, expected vocab_parallel_logprob",
    "other old": "old_logprobs: float32 .* on rank {last} of the group",
    "not my group": "group: expected a group that this process belongs to",
    "no group": r"group: expected a torch.distributed.ProcessGroup or None, got str",
    "other boundaries": "cu_seqlens: .* on rank {last} of the group",
    "too few tokens": r"cu_seqlens\[-1\]=47: expected \d+, the tokens of all ranks",
    "other advantages": "advantages: .* on rank {last} of the group",
    "no selection": "selected=None: expected this rank's part of select_tokens",
    "custom": "variant=Custom.*: expected one of turnwise's own",
    "other variant": r"variant: .*GSPO.* on rank {last} of the group, expected .*GMPO",
}


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---------------------------------------------------------------------------------------------------------------------
# One of the processes
# ---------------------------------------------------------------------------------------------------------------------
def small_chunks(setter: Callable[[Any, str, Any], None]) -> None:
    """Several chunks of tokens, also at small sizes."""
    setter(linear_chunks, "choose_on_cpu", lambda *_: Chunks(16, 1000))


def work(rank: int, world: int) -> dict[str, Any]:
    small_chunks(setattr)
    found: dict[str, Any] = {
        str(case): RUN[case.op](case, make(getattr(torch, case.dtype)), rank, world) for case in CASES
    }
    found["mistakes"] = {name: failure(call) for name, call in mistakes(rank, world).items()}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Tests
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, run_ranks: Callable[..., Any]) -> list[dict[str, Any]]:
    """What each process found, by case."""
    return run_ranks(__file__, request.param)


def split_of(case: Case, name: str, world: int) -> tuple[int, list[int]] | None:
    """The axis along which a result is split, and its ends; ``None`` for one that every rank has."""
    if name in ("weight", "bias"):
        return 0, SPLITS[world]
    if name == "logits":
        return 1, SPLITS[world]
    if name == "logprobs":
        return -1, COLUMNS[world] if dict(case.options).get("padded") else PARTS[world]
    return None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_give_the_results_of_one_process(ranks, case) -> None:
    """Against float64 for narrow types, whose one process rounds too."""
    dtype = getattr(torch, case.dtype)
    given = {name: x.double() if x.is_floating_point() else x for name, x in make(dtype).items()}
    want = RUN[case.op](case._replace(backend=None), given, None, 1)
    world = len(ranks)
    for rank, results in enumerate(ranks):
        got = results[str(case)]
        assert got.keys() == want.keys()
        for name, value in want.items():
            split = split_of(case, name, world)
            expected = value.detach().double()
            largest = expected.abs().max().item()
            if split is not None:
                axis, ends = split
                expected = expected.narrow(axis, ends[rank], ends[rank + 1] - ends[rank])
            bound = max(TOLERANCE[case.dtype], 2e-6 if value.dtype is torch.float32 else 0.0)  # metrics are float32
            torch.testing.assert_close(
                got[name].detach().double(), expected, rtol=bound, atol=bound * max(largest, 0.1),
                msg=lambda m, n=name, r=rank: f"{n} on rank {r}: {m}",
            )  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_mistakes_raise_on_every_rank(ranks, name) -> None:
    for results in ranks:
        message = MESSAGES[name].replace("{last}", str(len(ranks) - 1))
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(results["mistakes"][name])


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group first"):
        ops.vocab_parallel_logprob(torch.zeros(1, 2), torch.zeros(1).long())
