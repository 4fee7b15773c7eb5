"""Metrics don't depend on the cut into micro-batches; the effective sample size is that of the weights in the loss."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from turnwise import ops
from turnwise.ops import ImportanceCorrection
from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.model.policy import Policy
from turnwise.train.update.update import update_policy

SEQUENCE = {"importance_correction": {"level": "sequence", "cap": 2.0}}
LOSSES: dict[str, dict[str, Any]] = {
    "no correction": {},
    "weights of tokens": {"importance_correction": {"level": "token", "cap": 2.0, "bounds": (0.3, 8.0)}},
    "weights of sequences": SEQUENCE,
    "rejection and masks": {**SEQUENCE, "masks": {"rejection": {"seq-max-k2": 2.5}, "top_entropy": 0.5}},
    "KL and entropy": {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "aggregation": "agent-mean"},
    "a critic": {"critic": {}, "type": "gspo", "aggregation": "seq-mean-token-mean"},
}


@pytest.mark.parametrize("case", LOSSES)
def test_metrics_do_not_depend_on_the_cut_into_micro_batches(random_batch, small_model, case):
    loss, model, found = LossConfig(**LOSSES[case]), small_model()[0], []
    for tokens in (10_000, 40, 8):
        update = UpdateConfig(lr=1e-3, micro_batch_tokens=tokens, old_logprobs="recompute", ppo_epochs=2)
        policy = Policy("default", copy.deepcopy(model), update, total_steps=9, with_reference=True)
        batch = random_batch(3, rows=12)
        found.append(update_policy(policy, batch, update, loss, np.random.default_rng(0)))
    whole, *cut = ({key: value for key, value in each.items() if key != "unique_token_share"} for each in found)
    assert "ess" in whole and "first/ess" in whole and 0 < whole["ess"] < 1 + 1e-6
    for each in cut:
        assert each == pytest.approx(whole, rel=2e-3, abs=2e-5)


@pytest.mark.parametrize(("correction", "weights"), [
    (None, [4.0, 0.5, 0.5, 1.0, 1.0]),
    (ImportanceCorrection(level="token", cap=2.0), [2.0, 0.5, 0.5, 1.0, 1.0]),
    (ImportanceCorrection(level="token", cap=2.0, bounds=(0.6, 8.0)), [2.0, 0.0, 0.0, 1.0, 1.0]),
    (ImportanceCorrection(level="sequence", cap=1.5), [1.0, 1.0, 1.0, 1.0, 1.0]),
    (ImportanceCorrection(level="sequence", cap=2.0, bounds=(1.5, 9.0)), [0.0, 0.0, 0.0, 0.0, 0.0]),
])  # fmt: skip
def test_the_effective_sample_size_is_that_of_the_weights_in_the_loss(correction, weights):
    """Two rows of three and two tokens, whose weights are 4, 1/2 and 1/2 (the row: 1), 1 and 1."""
    ratios = torch.tensor([4.0, 0.5, 0.5, 1.0, 1.0])
    old = torch.full((5,), -1.0)
    logprobs, options = old.clone().requires_grad_(), {"cu_seqlens": torch.tensor([0, 3, 5]), "correction": correction}
    out = ops.policy_loss(logprobs, old, torch.ones(2), rollout_logprobs=old - ratios.log(), **options)
    out.loss.backward()
    if correction is not None:
        assert (-5 * logprobs.grad).tolist() == pytest.approx(weights)
    squares = sum(weight**2 for weight in weights)
    expected = sum(weights) ** 2 / (5 * squares) if squares else 0.0
    assert math.isclose(float(out.metrics["ess"]), expected, rel_tol=1e-5)
