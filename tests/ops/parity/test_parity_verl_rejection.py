"""Rejection by token and sequence against verl's ``compute_rollout_rejection_mask``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from turnwise.ops import Rejection, rejection_mask

pytestmark = pytest.mark.slow

NAMES = ["token", "seq-sum", "seq-mean", "seq-max"]


def draw(choose: Any) -> list[Rejection]:
    criteria = {}
    for _ in range(choose.randint(1, 3)):
        level, estimator = choose.choice(NAMES), choose.choice(["k1", "k2", "k3"])
        if (level, estimator) == ("seq-max", "k1"):
            continue
        high = choose.uniform(1.05, 3) if estimator == "k1" else choose.uniform(0.02, 0.5)
        low = choose.uniform(0.3, 0.95) if estimator == "k1" and choose.random() < 0.5 else None
        criteria[level, estimator] = Rejection(level, estimator, high, low)
    return list(criteria.values()) or [Rejection("token", "k3", 0.1)]


def named(each: Rejection) -> tuple[str, str]:
    """A criterion's name and threshold at verl, which bounds exp(rollout - old) for k1, the inverse of the ratio."""
    name = each.name.replace("-", "_")
    return name, f"{1 / each.high!r}_{1 / each.low!r}" if each.low is not None else repr(each.high)


def test_rejection(streams: Any) -> None:
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS, compute_rollout_rejection_mask

    seen: set[str] = set()
    shares = []
    for seed in range(500):
        s = streams(seed, empty_rows=False, spread=0.3)
        criteria = draw(s.choose)
        names, thresholds = zip(*(named(each) for each in criteria), strict=True)
        expected, metrics = compute_rollout_rejection_mask(
            s.double("old") - s.double("rollout"), s.mask.double(), ",".join(names), ",".join(thresholds)
        )
        found = rejection_mask(s.old, s.rollout, criteria, mask=s.mask)
        assert torch.equal(found.keep, expected.bool()), f"seed {seed}: {criteria}"
        share = metrics["rollout_rs_masked_fraction"]
        assert found.metrics["rejected"].item() == pytest.approx(share, abs=1e-6), f"seed {seed}"
        rows = metrics["rollout_rs_seq_masked_fraction"]
        assert found.metrics["rejected_rows"].item() == pytest.approx(rows, abs=1e-6), f"seed {seed}"
        for each, name in zip(criteria, names, strict=True):
            of_one = metrics[f"rollout_rs_{name}_masked_fraction"]
            assert found.metrics[f"rejected/{each.name}"].item() == pytest.approx(of_one, abs=1e-6), f"seed {seed}"
        seen |= set(names)
        shares.append(share)
    assert seen == set(SUPPORTED_ROLLOUT_RS_OPTIONS), "every option of verl"
    assert 0.2 < sum(shares) / len(shares) < 0.8


def test_verl_bounds_the_inverse_of_the_ratio() -> None:
    """The trainer gives a token twice the probability that the sampler did. verl's bounds of 0.9 and 3 reject it."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    d, ones = torch.tensor([[2.0]]).log(), torch.ones(1, 1)
    assert compute_rollout_rejection_mask(d, ones, "token_k1", "0.9_3.0")[0].item() == 0
    assert rejection_mask(d, torch.zeros(1, 1), Rejection("token", "k1", 3.0, 0.9)).keep.item()
