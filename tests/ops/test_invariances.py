"""The bits of every op on a CPU: the same again, with any number of threads, from eight threads at once, padded further
or packed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from turnwise.ops import (
    AGGREGATIONS,
    GSPO,
    KL,
    Clip,
    ImportanceCorrection,
    PolicyLoss,
    factorize,
    gae,
    group_advantage,
    grouped_policy_loss,
    linear_logprob,
    linear_policy_loss,
    logprob,
    policy_loss,
    token_returns,
    token_reward_sum,
)
from turnwise.ops.common import dispatch as backends

pytestmark = pytest.mark.skipif(backends.extension is None, reason="the compiled module did not load")
ROWS, WIDTH, HIDDEN, VOCABULARY = 24, 900, 16, 600
Batch = dict[str, Tensor]


def batch(seed: int = 0) -> Batch:
    """Rows of 0 to all tokens, with holes; more than one piece of work for several threads."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(0, WIDTH + 1, (ROWS,), generator=generator)
    lengths[:2] = torch.tensor([0, WIDTH])
    mask = (torch.arange(WIDTH) < lengths[:, None]) & (noise(ROWS, WIDTH) > -1)
    return {
        "logprobs": -noise(ROWS, WIDTH).abs(),
        "old": -noise(ROWS, WIDTH).abs(),
        "rewards": noise(ROWS, WIDTH),
        "advantages": noise(ROWS),
        "mask": mask,
        "ids": torch.randint(5, (ROWS,), generator=generator),
        "lengths": lengths,
        "many": noise(70_000),
        "many_ids": torch.randint(9000, (70_000,), generator=generator),
        "hidden": noise(300, HIDDEN),
        "weight": noise(VOCABULARY, HIDDEN),
        "logits": noise(300, VOCABULARY),
        "targets": torch.randint(VOCABULARY, (300,), generator=generator),
        "cu": torch.tensor([0, 100, 100, 300]),
    }


def graded(function: Callable[..., tuple[Tensor, ...]], *leaves: Tensor) -> list[Tensor]:
    """What a function makes of leaves, the first of it a loss, and their gradients."""
    copies = [leaf.clone().requires_grad_() for leaf in leaves]
    made = function(*copies)
    made[0].backward()
    return [*(value.detach() for value in made), *(leaf.grad for leaf in copies)]  # type: ignore[misc]


def values_of(result: PolicyLoss) -> tuple[Tensor, ...]:
    return result.loss, *result.metrics.values(), *result.actor_metrics.values()


CLIP = Clip(dual_clip=3.0)
TOKENS: dict[str, Callable[..., list[Tensor]]] = {
    "token_reward_sum": lambda s, **o: [token_reward_sum(s["rewards"], **o)],
    "token_returns": lambda s, **o: [token_returns(s["rewards"], 0.97, **o)],
    "gae": lambda s, **o: list(gae(s["rewards"], s["old"], gamma=0.99, lam=0.9, **o)),
    "policy_loss": lambda s, **o: graded(
        lambda x: values_of(
            policy_loss(
                x, s["old"], s["advantages"], clip=Clip(dual_clip=3.0), kl=KL("k3", 0.1), ref_logprobs=s["old"], **o
            )
        ),
        s["logprobs"],
    ),
    **{
        f"policy_loss {aggregation}": lambda s, aggregation=aggregation, **o: graded(
            lambda x: values_of(
                policy_loss(
                    *(x, s["old"], s["advantages"]),
                    aggregation=aggregation,
                    correction=ImportanceCorrection("sequence", 1.5),
                    rollout_logprobs=s["rewards"],
                    actor_ids=s["ids"],
                    num_actors=5,
                    max_length=WIDTH,
                    **o,
                )
            ),
            s["logprobs"],
        )
        for aggregation in AGGREGATIONS
    },
    "policy_loss GSPO": lambda s, **o: graded(
        lambda x: policy_loss(x, s["old"], s["advantages"], variant=GSPO(), aggregation="seq-mean-token-mean", **o)[:1],
        s["logprobs"],
    ),
    "grouped_policy_loss": lambda s, **o: graded(
        lambda x: grouped_policy_loss(x, s["old"], s["rewards"], s["ids"], **o)[::3], s["logprobs"]
    ),
}
OTHERS: dict[str, Callable[[Batch], list[Tensor]]] = {
    "factorize": lambda s: [factorize(s["many_ids"].tolist(), [str(i) for i in s["many_ids"].tolist()])[0]],
    "group_advantage": lambda s: [group_advantage(s["many"], s["many_ids"])],
    "group_advantage by trajectory": lambda s: [
        group_advantage(s["many"], s["many_ids"] // 9, trajectory_ids=s["many_ids"], pool="trajectory")
    ],
    "logprob": lambda s: graded(lambda x: (sum(v.sum() for v in logprob(x, s["targets"], entropy=True)),), s["logits"]),
    "linear_logprob": lambda s: graded(
        lambda h, w: (sum(v.sum() for v in linear_logprob(h, w, s["targets"], entropy=True)),), s["hidden"], s["weight"]
    ),
    "linear_policy_loss": lambda s: graded(
        lambda h, w: linear_policy_loss(
            h, w, s["targets"], s["old"].flatten()[:300], s["advantages"][:3], cu_seqlens=s["cu"]
        )[:1],
        s["hidden"],
        s["weight"],
    ),
}
EVERY: dict[str, Callable[[Batch], list[Tensor]]] = {
    **{name: (lambda s, call=call: call(s, mask=s["mask"])) for name, call in TOKENS.items()},
    **OTHERS,
}


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("op", EVERY)
def test_neither_threads_nor_another_run_change_a_bit(op) -> None:
    given = batch()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(EVERY[op](given))
    finally:
        torch.set_num_threads(before)
    assert all(same(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("op", EVERY)
def test_eight_threads_at_once(in_threads, op) -> None:
    """Each with a batch of its own, so that memory they share would show."""
    batches = [batch(seed) for seed in range(8)]
    want = [EVERY[op](given) for given in batches]
    assert not same(want[0], want[1])
    assert all(in_threads(lambda i: [same(EVERY[op](batches[i]), want[i]) for _ in range(3)] == [True] * 3))


@pytest.mark.parametrize("op", TOKENS)
def test_neither_padding_nor_packing_changes_a_bit(op) -> None:
    given = batch()
    want = TOKENS[op](given, mask=given["mask"])
    tokens = ("logprobs", "old", "rewards", "mask")
    wide = dict(given)
    for name in tokens:
        filling = 0.0 if name == "mask" else torch.nan
        wide[name] = torch.nn.functional.pad(given[name], (0, 1300), value=filling)
    got = TOKENS[op](wide, mask=wide["mask"])
    assert same([v[:, :WIDTH] if v.dim() == 2 else v for v in got], want)
    kept = torch.arange(WIDTH) < given["lengths"][:, None]
    packed = {name: value[kept] if name in tokens else value for name, value in given.items()}
    ends = torch.nn.functional.pad(given["lengths"].cumsum(0), (1, 0))
    got = TOKENS[op](packed, mask=packed["mask"], cu_seqlens=ends)
    assert same(got, [v[kept] if v.dim() == 2 else v for v in want])


def policy_gradient(x: Tensor, old: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    policy_loss(leaf, old, old[:, 0], kl=KL("k3", 0.1), ref_logprobs=old, normalizer=1.0).loss.backward()
    assert leaf.grad is not None
    return [leaf.grad]


WRITERS: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
    "token_returns": lambda x, _: [token_returns(x, 0.97)],
    "gae": lambda x, old: list(gae(x, old, gamma=0.99, lam=0.9)),
    "policy_loss": policy_gradient,
}


@pytest.mark.parametrize("width", [2048, 2056], ids=["rows on lines", "half of them"])
@pytest.mark.parametrize("op", WRITERS)
def test_outputs_that_go_past_the_caches_are_the_same(op, width) -> None:
    """Large ones do; of a few rows at a time none is large."""
    x, old = -torch.randn(2, 272, width, generator=torch.Generator().manual_seed(0)).abs()
    parts = zip(*(WRITERS[op](*part) for part in zip(x.split(34), old.split(34), strict=True)), strict=True)
    assert same(WRITERS[op](x, old), [torch.cat(part) for part in parts])
