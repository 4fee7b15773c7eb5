"""Compiled whole: one graph for batches of any shape, and options that change from step to step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from turnwise import ops
from turnwise.ops import (
    GSPO,
    KL,
    aggregate,
    gae,
    group_advantage,
    grouped_policy_loss,
    linear_logprob,
    linear_policy_loss,
    logprob,
    loss_normalizer,
    policy_loss,
    token_returns,
    token_reward_sum,
)

SHAPES = [(4, 7), (6, 9), (3, 30)]


def batch(rows: int, width: int) -> dict[str, Tensor]:
    tokens = rows * width
    generator = torch.Generator().manual_seed(tokens)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": -noise(rows, width).abs(),
        "old": -noise(rows, width).abs(),
        "advantages": noise(rows),
        "mask": noise(rows, width) > -1,
        "stream": -noise(tokens).abs(),
        "ids": torch.randint(rows, (rows,), generator=generator),
        "cu": torch.arange(rows + 1) * width,
        "hidden": noise(tokens, 8),
        "weight": noise(40, 8),
        "logits": noise(rows, width, 20),
        "targets": torch.randint(20, (rows, width), generator=generator),
    }


# Of a batch and the rest of the arguments, to what it makes; the leaf of its gradient is the first that is named.
CALLS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "group_advantage": (("advantages", "ids"), lambda r, ids, **o: group_advantage(r * 2, ids, num_groups=40, **o)),
    "token_reward_sum": (("x", "mask"), lambda r, m, **o: token_reward_sum(r * 2, mask=m, **o)),
    "token_reward_sum packed": (("stream", "cu"), lambda r, cu, **o: token_reward_sum(r * 2, cu_seqlens=cu, **o)),
    "token_returns packed": (("stream", "cu"), lambda r, cu, **o: token_returns(r * 2, 0.9, cu_seqlens=cu, **o)),
    "gae packed": (("stream", "cu"), lambda r, cu, **o: gae(r * 2, r, cu_seqlens=cu, **o)),
    "policy_loss": (
        ("x", "old", "advantages", "mask"),
        lambda x, old, a, m, **o: policy_loss(x * 2, old, a, mask=m, kl=KL(), ref_logprobs=old, **o).loss,
    ),
    "policy_loss packed": (
        ("stream", "advantages", "cu"),
        lambda x, a, cu, **o: policy_loss(x * 2, x.detach(), a, cu_seqlens=cu, variant=GSPO(), **o).loss,
    ),
    "grouped_policy_loss": (
        ("x", "old", "ids", "mask"),
        lambda x, old, ids, m, **o: grouped_policy_loss(x * 2, old, old, ids, num_groups=40, mask=m, **o).loss,
    ),
    "logprob": (("logits", "targets"), lambda x, t, **o: logprob(x * 2, t, **o).sum()),
    "linear_logprob": (
        ("hidden", "weight", "targets"),
        lambda h, w, t, **o: linear_logprob(h * 2, w, t.flatten(), entropy=True, **o)[1].sum(),
    ),
    "linear_policy_loss": (
        ("hidden", "weight", "targets", "old", "advantages", "cu"),
        lambda h, w, t, old, a, cu, **o: (
            linear_policy_loss(h * 2, w, t.flatten(), old.flatten(), a, cu_seqlens=cu, **o).loss
        ),
    ),
    "aggregate": (("x", "mask"), lambda x, m: aggregate(x * 2, mask=m)),
    "aggregate packed": (("stream", "cu"), lambda x, cu: aggregate(x, "seq-mean-token-mean", cu_seqlens=cu)),
    "loss_normalizer": (
        ("cu", "ids"),
        lambda cu, ids: loss_normalizer("agent-mean", cu_seqlens=cu, actor_ids=ids, num_actors=30),
    ),
}
NO_BACKEND = ("aggregate", "aggregate packed", "loss_normalizer")


def values(call: Callable[..., Any], given: list[Tensor], **options: Any) -> list[Tensor]:
    """What a call makes, and the gradient of its first argument if there is one."""
    leaf, *rest = (t.clone() for t in given)
    made = call(leaf.requires_grad_(leaf.is_floating_point()), *rest, **options)
    results = list(made) if isinstance(made, tuple) else [made]
    if results[0].requires_grad:
        results[0].backward()
        assert leaf.grad is not None
        results.append(leaf.grad)
    return [result.detach() for result in results]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(*c, marks=[] if c[1] == "native" or c[0] in NO_BACKEND else pytest.mark.slow)
        for c in itertools.product(CALLS, ("native", "torch"))
        if c[0] not in NO_BACKEND or c[1] == "torch"
    ],
)
def test_one_graph_for_batches_of_any_shape(name, backend) -> None:
    """And with `check=True`, which a compiled graph has no room for."""
    arguments, call = CALLS[name]
    options = {} if name in NO_BACKEND else {"backend": backend, "check": True}
    options = {k: v for k, v in options.items() if k != "check" or name != "linear_policy_loss"}
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in SHAPES:
        given = [batch(*shape)[argument] for argument in arguments]
        torch.testing.assert_close(values(compiled, given, **options), values(call, given, **options))
    assert counters["stats"]["unique_graphs"] == 1


def loss_of(s: dict[str, Tensor], **options: Any) -> Tensor:
    return policy_loss(s["x"], s["old"], s["advantages"], **options).loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda s, number: (
            policy_loss(s["x"], s["old"], s["advantages"], kl=KL("k3", number), ref_logprobs=s["old"]).loss
        ),
        lambda s, number: policy_loss(s["x"], s["old"], s["advantages"], clip=ops.Clip(number, number)).loss,
        lambda s, number: policy_loss(s["x"], s["old"], s["advantages"], normalizer=10 * number).loss,
        lambda s, number: group_advantage(s["advantages"], s["ids"], eps=number),
        lambda s, number: token_returns(s["x"], number),
        lambda s, number: logprob(s["logits"], s["targets"], temperature=number),
    ],
    ids=["kl.coef", "clip", "normalizer", "eps", "gamma", "temperature"],
)
def test_numbers_may_change_from_step_to_step(call) -> None:
    """An adaptive KL coefficient, a temperature that cools."""
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    given = batch(3, 5)
    made = [compiled(given, number) for number in (0.1, 0.2, 0.35, 0.7)]
    for number, result in zip((0.1, 0.2, 0.35, 0.7), made, strict=True):
        torch.testing.assert_close(result, call(given, number))
    assert not torch.equal(made[0], made[1])


def test_the_forced_backend_holds_within_a_graph() -> None:
    given = batch(3, 5)

    def call(x: Tensor) -> Tensor:
        with ops.backend("torch"):
            return policy_loss(x, given["old"], given["advantages"]).loss

    torch._dynamo.reset()
    seen: list[str] = []

    def watch(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend=watch)(given["x"]), call(given["x"]))
    assert seen and not [target for target in seen if "turnwise" in target]
