from __future__ import annotations

import pytest
import torch

from turnwise.ops import loss_normalizer

MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
ACTORS = torch.tensor([0, 1, 0])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", 5.0),
        ("seq-mean-token-sum", 2.0),
        ("seq-mean-token-mean", 2.0),
        ("seq-mean-token-sum-norm", 128.0),
        ("agent-mean", [5.0, 0.0]),
    ],
)
@pytest.mark.parametrize("form", ["padded", "packed", "lengths"])
def test_normalizer(aggregation, expected, form) -> None:
    layout = {
        "padded": {"mask": MASK.bool()},
        "packed": {"mask": torch.tensor([1, 1, 0, 1, 1, 1]), "cu_seqlens": torch.tensor([0, 3, 3, 6])},
        "lengths": {"cu_seqlens": torch.tensor([0, 2, 2, 5], dtype=torch.int32)},
    }[form]
    got = loss_normalizer(aggregation, **layout, actor_ids=ACTORS, num_actors=2, max_length=128)
    assert got.tolist() == expected
    assert got.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"aggregation": "sum", "mask": MASK}, ValueError, "aggregation='sum'"),
        ({"aggregation": "token-mean"}, ValueError, "mask=None"),
        ({"aggregation": "token-mean", "mask": MASK[0]}, ValueError, r"mask has shape \(3,\)"),
        (
            {"aggregation": "token-mean", "mask": MASK, "cu_seqlens": torch.tensor([0, 3])},
            ValueError,
            r"expected \[N\]",
        ),
        ({"aggregation": "token-mean", "cu_seqlens": torch.tensor([0, 3, 2])}, ValueError, r"cu_seqlens\[2\]=2"),
        ({"aggregation": "agent-mean", "mask": MASK}, ValueError, "actor_ids=None"),
        ({"aggregation": "agent-mean", "mask": MASK, "actor_ids": ACTORS}, ValueError, "num_actors=None"),
        (
            {"aggregation": "agent-mean", "mask": MASK, "actor_ids": ACTORS, "num_actors": 1},
            ValueError,
            r"actor_ids\[1\]=1",
        ),
        ({"aggregation": "seq-mean-token-sum-norm", "mask": MASK, "max_length": 0}, ValueError, "max_length=0"),
        ({"aggregation": "token-mean", "mask": MASK.tolist()}, TypeError, "mask: expected a tensor, got list"),
        ({"aggregation": "token-mean", "mask": MASK / 2}, ValueError, r"mask\[0, 0\]=0\.5: expected 0 or 1"),
        ({"aggregation": "token-mean", "mask": MASK.cfloat()}, TypeError, "mask has dtype torch.complex64"),
        ({"aggregation": "token-mean", "cu_seqlens": [0, 3]}, TypeError, "cu_seqlens: expected a tensor, got list"),
        (
            {"aggregation": "agent-mean", "mask": MASK, "actor_ids": [0, 1, 0], "num_actors": 2},
            TypeError,
            "actor_ids: expected a tensor, got list",
        ),
        (
            {"aggregation": "agent-mean", "mask": MASK, "actor_ids": ACTORS, "num_actors": 2.0},
            ValueError,
            r"num_actors=2\.0",
        ),
    ],
)
def test_mistakes_are_named(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        loss_normalizer(**arguments)
