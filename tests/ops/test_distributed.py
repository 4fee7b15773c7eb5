"""Two processes that train on halves of a batch get the gradients of one process on all of it: DDP, FSDP2, autocast.

`ranks.py` starts the processes once, for all cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from turnwise import ops

pytestmark = pytest.mark.slow

WORLD = 2
VOCABULARY, WIDTH, ACTORS = 97, 24, 3
LENGTHS = [7, 0, 12, 1, 30, 9, 5]
GROUPS = [0, 0, 1, 1, 2, 2, 2]
SPLIT = [(0, 4), (4, 7)]  # rows of each process: groups stay whole, and one has twice the tokens of the other
HEADS = ("linear_logprob", "linear_policy_loss", "logprob")


class Case(NamedTuple):
    wrap: str  # "ddp" or "fsdp"
    head: str  # how the head makes log-probabilities
    precision: str  # "float64", "float32", "autocast", or "policy": FSDP2's own mixed precision
    aggregation: str = "token-mean"

    def __str__(self) -> str:
        return "-".join(self)


CASES = [
    *(Case(wrap, head, p) for wrap in ("ddp", "fsdp") for head in HEADS for p in ("float64", "float32", "autocast")),
    *(Case("fsdp", head, "policy") for head in HEADS),
    *(Case(wrap, "linear_policy_loss", "float32", "agent-mean") for wrap in ("ddp", "fsdp")),
]
# The largest error of a gradient over its largest entry: at most, and, where bfloat16 must show, at least.
ERROR = {"float64": (0.0, 1e-12), "float32": (0.0, 2e-6), "autocast": (1e-5, 2e-2), "policy": (1e-5, 2e-2)}


# ---------------------------------------------------------------------------------------------------------------------
# A model and its loss
# ---------------------------------------------------------------------------------------------------------------------
class Model(nn.Module):
    """Embedding, one layer, LM head and loss: where the weights are whole while the forward runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            self.head.weight.mul_(3)

    def logprobs(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embedding(tokens)))
        return ops.linear_logprob(hidden, self.head.weight, targets, bias=self.head.bias)  # type: ignore[return-value]

    def forward(self, head: str, tokens: Tensor, targets: Tensor, **batch: Any) -> Tensor:
        if head == "linear_logprob":
            return ops.policy_loss(self.logprobs(tokens, targets), **batch).loss
        hidden = torch.tanh(self.mix(self.embedding(tokens)))
        if head == "linear_policy_loss":
            return ops.linear_policy_loss(hidden, self.head.weight, targets, bias=self.head.bias, **batch).loss
        logprobs = ops.logprob(nn.functional.linear(hidden, self.head.weight, self.head.bias), targets)
        assert isinstance(logprobs, Tensor)
        return ops.policy_loss(logprobs, **batch).loss


def make_batch() -> dict[str, Tensor]:
    """The whole batch, packed, in float64."""
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    tokens, targets = torch.randint(VOCABULARY, (2, total), generator=generator)
    with torch.no_grad():
        old = Model().double().logprobs(tokens, targets)
    return {
        "tokens": tokens,
        "targets": targets,
        "old_logprobs": old + 0.4 * torch.randn(total, generator=generator, dtype=torch.float64),
        "mask": torch.rand(total, generator=generator) < 0.8,
        "rewards": torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64),
        "actor_ids": torch.randint(ACTORS, (len(LENGTHS),), generator=generator),
    }


def rows_of(batch: dict[str, Tensor], first: int, last: int, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of the model for some rows, all but the normaliser."""
    lengths = LENGTHS[first:last]
    tokens = slice(sum(LENGTHS[:first]), sum(LENGTHS[:last]))
    cut = {
        name: values[tokens if len(values) == sum(LENGTHS) else slice(first, last)] for name, values in batch.items()
    }
    cut = {name: values.to(dtype) if values.is_floating_point() else values for name, values in cut.items()}
    advantages = ops.group_advantage(cut.pop("rewards"), torch.tensor(GROUPS[first:last]))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return {**cut, "advantages": advantages, "cu_seqlens": cu_seqlens, "num_actors": ACTORS, "variant": ops.SAPO()}


def normalizer_of(given: dict[str, Any], aggregation: str) -> Tensor:
    streams = {name: given[name] for name in ("mask", "cu_seqlens", "actor_ids", "num_actors")}
    return ops.loss_normalizer(aggregation, **streams)


def loss_of(model: nn.Module, given: dict[str, Any], case: Case, normalizer: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "autocast"):
        return model(case.head, **given, aggregation=case.aggregation, normalizer=normalizer)


def type_of(case: Case) -> torch.dtype:
    return torch.float64 if case.precision == "float64" else torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# One of the processes
# ---------------------------------------------------------------------------------------------------------------------
def wrapped(case: Case) -> nn.Module:
    model = Model().to(type_of(case))
    if case.wrap == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (WORLD,))
    if case.precision == "policy":
        # By default FSDP2 casts all that comes in, so old log-probabilities and advantages too.
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    else:
        policy = MixedPrecisionPolicy()
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # gathered again for its backward
    return model


def train(case: Case, rank: int) -> dict[str, Tensor]:
    """Loss, summed over the processes, and gradients by name, whole."""
    model = wrapped(case)
    given = rows_of(make_batch(), *SPLIT[rank], type_of(case))
    normalizer = normalizer_of(given, case.aggregation)
    dist.all_reduce(normalizer)
    loss = loss_of(model, given, case, normalizer)
    (WORLD * loss).backward()  # DDP and FSDP2 average
    total = loss.detach().clone()
    dist.all_reduce(total)
    found = {"loss": total}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        found[name.removeprefix("module.")] = grad if case.wrap == "ddp" else grad.full_tensor()
    return found


def work(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    return {str(case): train(case, rank) for case in CASES}


# ---------------------------------------------------------------------------------------------------------------------
# Tests
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(run_ranks: Callable[[str, int], list[Any]]) -> list[dict[str, dict[str, Tensor]]]:
    """What each process found, by case."""
    return run_ranks(__file__, WORLD)


def alone(case: Case) -> dict[str, Tensor]:
    """One process, the whole batch."""
    model = Model().to(type_of(case))
    given = rows_of(make_batch(), 0, len(LENGTHS), type_of(case))
    loss = loss_of(model, given, case, normalizer_of(given, case.aggregation))
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_two_processes_are_those_of_one(trained, case) -> None:
    want = alone(case._replace(precision="float64", head="logprob"))
    least, most = ERROR[case.precision]
    for found in trained:
        got = found[str(case)]
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name].dtype == type_of(case)
            error = (got[name].double() - value).abs().max() / value.abs().max()
            assert least <= error <= most, (name, float(error))
