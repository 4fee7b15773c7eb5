from __future__ import annotations

import copy
import pickle

import pytest
import torch

from turnwise.ops.loss.arguments import Metrics


def test_reads_like_a_dict() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    metrics, by_actor = Metrics(("a", "b"), table, 0), Metrics(("a", "b"), table, slice(1, None))
    assert list(metrics) == ["a", "b"] and len(metrics) == 2 and "a" in metrics and "c" not in metrics
    assert {name: value.item() for name, value in metrics.items()} == {"a": 1.0, "b": 2.0}
    assert metrics["b"].shape == () and metrics["b"] is metrics["b"]
    assert by_actor["a"].tolist() == [3.0, 5.0]
    assert dict(metrics).keys() == {"a", "b"}
    assert metrics.get("c") is None
    assert metrics | {"a": 7} == {"a": 7, "b": metrics["b"]} and {"a": 7, "c": 8} | metrics == {**metrics, "c": 8}
    with pytest.raises(TypeError):
        metrics | 3
    for same in (copy.deepcopy(metrics), pickle.loads(pickle.dumps(metrics))):
        assert dict(same) == dict(metrics)
    assert "tensor(1.)" in repr(metrics)
    with pytest.raises(KeyError, match="c"):
        metrics["c"]
