"""The value loss against verl's ``compute_value_loss``, at its critic's default clip and at others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from turnwise.ops import value_loss

pytestmark = pytest.mark.slow


def test_value_loss(verl: Any, streams: Any, same_loss: Any) -> None:
    from verl.workers.config import CriticConfig

    default = CriticConfig.__dataclass_fields__["cliprange_value"].default
    clipped = 0.0
    for seed in range(400):
        s = streams(seed)
        clip = default if seed % 4 == 0 else s.choose.uniform(0.05, 1)
        mode = s.choose.choice(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
        leaf_32, leaf_64 = s.leaves()
        rows = int(s.mask.any(1).sum())
        ours = value_loss(
            leaf_32, s.old, s.ref, mask=s.mask, clip=clip, aggregation=mode, max_length=float(rows * s.mask.shape[1])
        )
        theirs, fraction = verl.compute_value_loss(
            leaf_64, s.double("ref"), s.double("old"), s.mask.double(), clip, loss_agg_mode=mode
        )
        same_loss(ours.loss, leaf_32, theirs, leaf_64)
        assert ours.metrics["clip_fraction"].item() == pytest.approx(fraction.item(), abs=1e-6), f"seed {seed}"
        clipped += fraction.item() / 400
    assert 0.1 < clipped < 0.9
    assert torch.tensor(default).item() == pytest.approx(0.5)
