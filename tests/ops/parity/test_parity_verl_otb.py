"""The optimal token baseline against verl's two estimators: of whole answers, and of answers in several turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from turnwise.ops import optimal_token_baseline

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("holes", [False, True], ids=["one-turn", "turns"])
def test_optimal_token_baseline(verl: Any, streams: Any, holes: bool) -> None:
    """The estimator for whole answers counts columns, so its masks have no holes."""
    name = "multi_turn_optimal_token_baseline" if holes else "optimal_token_baseline"
    moved = 0
    for seed in range(400):
        s = streams(seed)
        rng, _ = np.random.default_rng(seed), torch.manual_seed(seed)
        mask = s.mask if holes else torch.arange(s.mask.shape[1]) < s.mask.sum(1, keepdim=True)
        rewards, squares = torch.randn(mask.shape), s.old.exp().square().clamp(max=1) + 0.1 * torch.rand(mask.shape)
        ids = rng.integers(0, 3, size=len(mask))
        weights = s.rollout.exp() if seed % 2 else None
        theirs = getattr(verl, f"compute_{name}_advantage")(
            token_level_rewards=rewards.double(),
            response_mask=mask.double(),
            index=ids,
            old_log_probs=s.double("old"),
            sum_pi_squared=squares.double(),
            rollout_is_weights=None if weights is None else weights.double(),
        )
        ours = optimal_token_baseline(rewards, s.old, squares, torch.from_numpy(ids), mask=mask, weights=weights)
        for got, want in zip(ours, (theirs[0], theirs[1] * mask), strict=True):
            torch.testing.assert_close(
                got.double(), want, rtol=1e-5, atol=1e-5, msg=lambda text, at=seed: f"seed {at}: {text}"
            )
        moved += not torch.equal(ours[0], ours[1])
    assert moved > 100
