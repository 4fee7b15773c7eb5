"""DTensors on two processes: the ops give the values, gradients and placements of one process with whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from turnwise.ops import GMPO, GSPO, linear_logprob, logprob, policy_loss

pytestmark = pytest.mark.slow

WORLD = 2
ROWS, COLUMNS, VOCABULARY, WIDTH = 5, 7, 53, 12
R, TOKENS, SECOND, LAST = Replicate(), Shard(0), Shard(1), Shard(2)


class Case(NamedTuple):
    op: str
    first: tuple[Any, ...]  # placements of logits, hidden or logprobs, one per dimension of the mesh
    result: tuple[Any, ...]  # of the result
    weight: tuple[Any, ...] = ()
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()
    mesh: tuple[int, ...] = (WORLD,)

    def __str__(self) -> str:
        rest = [f"{k}={v!r}" for k, v in self.options]
        return "-".join([self.op, *map(str, (self.first, self.weight, self.mesh)), *rest])


CAPPED = (("softcap", 5.0), ("ignore_index", -100), ("temperature", 0.7))
CASES = [
    Case("logprob", (TOKENS,), (TOKENS,), options=CAPPED),
    Case("logprob", (SECOND,), (SECOND,), dtype="float64"),
    Case("logprob", (LAST,), (R,), options=CAPPED),
    Case("logprob", (R,), (R,)),
    Case("logprob", (Partial(),), (R,)),
    Case("logprob", (TOKENS, LAST), (TOKENS, R), mesh=(2, 1)),
    Case("logprob", (TOKENS, LAST), (TOKENS, R), mesh=(1, 2)),
    Case("linear_logprob", (TOKENS,), (TOKENS,), (R,), options=CAPPED),
    Case("linear_logprob", (R,), (R,), (TOKENS,), options=CAPPED),
    Case("linear_logprob", (TOKENS,), (R,), (TOKENS,)),
    Case("linear_logprob", (SECOND,), (R,), (SECOND,), dtype="float64"),
    Case("linear_logprob", (TOKENS, R), (TOKENS, R), (R, TOKENS), mesh=(1, 2)),
    Case("linear_logprob", (TOKENS, R), (TOKENS, R), (R, TOKENS), mesh=(2, 1)),
    Case("policy_loss", (TOKENS,), (R,), options=(("variant", GSPO()), ("aggregation", "seq-mean-token-mean"))),
    Case("policy_loss", (SECOND,), (R,), options=(("variant", GMPO()),)),
    Case("policy_loss", (TOKENS,), (R,), options=(("packed", True),)),
    Case("policy_loss", (TOKENS,), (R,), options=(("per_token", True),)),
    Case("policy_loss", (R,), (R,)),
    Case("policy_loss", (R, SECOND), (R, R), mesh=(1, 2)),
    Case("logprob", (TOKENS,), (TOKENS,), options=(("raw", True),)),
    Case("linear_logprob", (TOKENS,), (TOKENS,), (R,), options=(("raw", True),)),
]


def make(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "logits": 4 * noise(ROWS, COLUMNS, VOCABULARY),
        "hidden": noise(ROWS * COLUMNS, WIDTH),
        "weight": noise(VOCABULARY, WIDTH),
        "bias": noise(VOCABULARY),
        "targets": torch.randint(VOCABULARY, (ROWS, COLUMNS), generator=generator),
        "grad": noise(ROWS, COLUMNS),
        "logprobs": -noise(ROWS, COLUMNS).square(),
        "old": -noise(ROWS, COLUMNS).square(),
        "advantages": noise(ROWS),
        "token_advantages": noise(ROWS, COLUMNS),
        "mask": torch.rand(ROWS, COLUMNS, generator=generator) < 0.8,
    }


Place = Callable[[Tensor, tuple[Any, ...]], Any]  # makes a DTensor, or returns the tensor itself


def logprob_case(case: Case, given: dict[str, Tensor], place: Place, options: dict[str, Any]) -> dict[str, Any]:
    raw = options.pop("raw", False)
    targets = given["targets"]
    if "ignore_index" in options:
        targets = targets.masked_fill(targets % 5 == 1, -100)
    leaves: dict[str, Any]
    if case.op == "logprob":
        rows = tuple(R if p == LAST or p.is_partial() else p for p in case.first)
        leaves = {"logits": place(given["logits"], case.first).requires_grad_()}
        inputs, grad = (leaves["logits"], place(targets, rows)), given["grad"]
    else:
        rows = tuple(TOKENS if p == TOKENS else R for p in case.first)
        leaves = {"hidden": place(given["hidden"], case.first), "weight": place(given["weight"], case.weight)}
        leaves["bias"] = place(given["bias"], tuple(p if p == TOKENS else R for p in case.weight))
        leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        inputs = leaves["hidden"], leaves["weight"], place(targets.flatten(), rows)
        grad, options["bias"] = given["grad"].flatten(), leaves["bias"]
    if raw and isinstance(inputs[0], DTensor):
        rest = (1.0, None, None, False, False, "native")
        if case.op == "linear_logprob":
            rest = (leaves["bias"], None, *rest[:4], None, False, rest[-1])
        values = getattr(torch.ops.turnwise, case.op)(*inputs, *rest)[0]
    else:
        values = (logprob if case.op == "logprob" else linear_logprob)(*inputs, **options)
    (values * place(grad, case.result)).sum().backward()
    return {"values": values.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def loss_case(case: Case, given: dict[str, Tensor], place: Place, options: dict[str, Any]) -> dict[str, Any]:
    packed, per_token = (options.pop(name, False) for name in ("packed", "per_token"))
    names = ("logprobs", "old", "mask", "token_advantages")
    streams = {name: place(given[name].flatten() if packed else given[name], case.first) for name in names}
    leaf = streams["logprobs"].requires_grad_()
    result = policy_loss(
        leaf,
        streams["old"],
        streams["token_advantages"] if per_token else given["advantages"],
        mask=streams["mask"],
        cu_seqlens=torch.arange(ROWS + 1) * COLUMNS if packed else None,
        **options,
    )
    result.loss.backward()
    return {"values": result.loss.detach(), **result.metrics, "logprobs": leaf.grad}


def run(case: Case, given: dict[str, Tensor], place: Place) -> dict[str, Any]:
    """Values and gradients."""
    return (loss_case if case.op == "policy_loss" else logprob_case)(case, given, place, dict(case.options))


def failures(mesh: Any) -> dict[str, str]:
    """Messages of wrong calls."""
    given = make(torch.float32)
    two = init_device_mesh("cpu", (1, WORLD))
    logits, hidden = (distribute_tensor(given[name], mesh, [R]) for name in ("logits", "hidden"))
    streams = [distribute_tensor(given[name], mesh, [TOKENS]) for name in ("logprobs", "old")]
    calls = {
        "plain targets": lambda: logprob(logits, given["targets"]),
        "plain weight": lambda: linear_logprob(hidden, given["weight"], given["targets"]),
        "other mesh": lambda: logprob(logits, distribute_tensor(given["targets"], two, [R, R])),
        "two shards": lambda: logprob(distribute_tensor(given["logits"], two, [LAST, LAST]), given["targets"]),
        "plain old": lambda: policy_loss(streams[0], given["old"], given["advantages"]),
        "backend": lambda: policy_loss(*streams, given["advantages"], backend="native"),
    }
    found = dict.fromkeys(calls, "nothing")
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    return found


MESSAGES = {
    "plain targets": "targets: expected a DTensor, as other arguments are, got Tensor",
    "plain weight": "weight: expected a DTensor, as other arguments are, got Tensor",
    "other mesh": "targets is on .*: expected .*, as the other arguments",
    "two shards": "logits has placements .*: expected the vocabulary on one mesh dimension",
    "plain old": "old_logprobs: expected a DTensor, as other arguments are, got Tensor",
    "backend": "backend='native': expected None or 'torch', as logprobs is a DTensor",
}


def work(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        mesh = init_device_mesh("cpu", case.mesh)

        def place(tensor: Tensor, placements: tuple[Any, ...], mesh: Any = mesh) -> Any:
            if any(p.is_partial() for p in placements):  # a sum of equal parts
                return DTensor.from_local(tensor / mesh.size(), mesh, placements, run_check=False)
            return distribute_tensor(tensor, mesh, placements)

        got = run(case, make(getattr(torch, case.dtype)), place)
        whole = {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in got.items()}
        found[str(case)] = whole, got["values"].placements
    found["mistakes"] = failures(init_device_mesh("cpu", (world,)))
    return found


@pytest.fixture(scope="module")
def ranks(run_ranks: Callable[..., Any]) -> list[dict[str, Any]]:
    return run_ranks(__file__, WORLD)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dtensors_give_the_results_of_whole_tensors(ranks, case) -> None:
    given = make(getattr(torch, case.dtype))
    want = run(case, {name: x.double() if x.is_floating_point() else x for name, x in given.items()}, lambda x, _: x)
    for results in ranks:
        got, placements = results[str(case)]
        assert tuple(placements) == case.result
        assert got.keys() == want.keys()
        for name, value in want.items():
            bound = 1e-12 if case.dtype == "float64" and value.dtype is torch.float64 else 2e-6
            scale = max(value.abs().max().item(), 0.1)
            torch.testing.assert_close(
                got[name].double(), value.double(), rtol=bound, atol=bound * scale, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("name", MESSAGES)
def test_mistakes_are_named(ranks, name) -> None:
    for results in ranks:
        with pytest.raises(AssertionError, match=MESSAGES[name]):
            raise AssertionError(results["mistakes"][name])
