"""The clipped value loss: worked numbers, its definition in Python floats, any layout, any cut."""

from __future__ import annotations

import math

import pytest
import torch

from turnwise.ops import AGGREGATIONS, aggregate, value_loss


def test_worked_values() -> None:
    """Values of the critic 1.0, 0.1 and 0.5 against an old value of 0, returns of 1, 1 and -1, clip 0.2.

    The first moved by 1: clamped to 0.2 its error is 0.8, larger than 0, and no gradient flows. The second is inside.
    The third moved to 0.5: its plain error of 1.5 is larger than that of 0.2, 1.2, and it trains.
    """
    values = torch.tensor([[1.0, 0.1, 0.5]], requires_grad=True)
    result = value_loss(values, torch.zeros(1, 3), torch.tensor([[1.0, 1.0, -1.0]]))
    assert result.loss.item() == pytest.approx((0.8**2 + 0.9**2 + 1.5**2) / 2 / 3)
    result.loss.backward()
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([0, -0.9 / 3, 1.5 / 3])
    assert result.metrics["clip_fraction"].item() == pytest.approx(1 / 3)
    assert result.metrics["value_mean"].item() == pytest.approx(1.6 / 3)
    # Var(R) = 8 / 9; R - V = 0, 0.9, -1.5 has variance (0.81 + 2.25) / 3 - 0.2**2 = 0.98.
    assert result.metrics["explained_variance"].item() == pytest.approx(1 - 0.98 / (8 / 9))


def test_without_a_clip_it_is_the_squared_error() -> None:
    values = torch.tensor([[3.0, math.nan]], requires_grad=True)
    result = value_loss(values, None, torch.tensor([[1.0, math.nan]]), mask=torch.tensor([[1, 0]]), clip=None)
    result.loss.backward()
    assert result.loss.item() == 2 and values.grad is not None and values.grad.tolist() == [[2, 0]]
    assert result.metrics["clip_fraction"] == 0 and result.metrics["explained_variance"] == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_definition(make_batch, seed, aggregation) -> None:
    """Values are drawn around old ones. Each token's loss is weighed as the aggregation weighs any value."""
    batch = make_batch(seed)
    values, old, returns, mask = batch.logprobs, batch.old, batch.ref, batch.mask
    rest = {"actor_ids": batch.actors, "num_actors": 3, "max_length": 40}
    per_token, slopes = torch.zeros_like(values), torch.zeros_like(values)
    clipped = 0
    for b, t in mask.nonzero().tolist():
        v, o, r = (float(x[b, t]) for x in (values, old, returns))
        plain, bounded = (v - r) ** 2 / 2, (max(o - 0.3, min(o + 0.3, v)) - r) ** 2 / 2
        per_token[b, t], slopes[b, t] = max(plain, bounded), 0.0 if bounded > plain else v - r
        clipped += bounded > plain
    ones = torch.zeros_like(values, requires_grad=True)
    aggregate(ones, aggregation, mask=mask, **rest).backward()
    want = aggregate(per_token, aggregation, mask=mask, **rest)

    leaf = values.clone().requires_grad_()
    result = value_loss(leaf, old, returns, mask=mask, clip=0.3, aggregation=aggregation, **rest)
    result.loss.backward()
    torch.testing.assert_close(result.loss, want, rtol=1e-12, atol=0, msg=f"seed {seed}")
    torch.testing.assert_close(leaf.grad, slopes * ones.grad, rtol=1e-10, atol=1e-15)
    assert clipped > 0 and result.metrics["clip_fraction"].item() == pytest.approx(clipped / int(mask.sum()))
    explained = 1 - (returns - values)[mask].var(unbiased=False) / returns[mask].var(unbiased=False)
    assert result.metrics["explained_variance"].item() == pytest.approx(explained.item(), rel=1e-6)
