"""The masks of ``loss.masks``: worked numbers, gradients, shares by actor."""

from __future__ import annotations

import math
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from turnwise.ops import Rejection
from turnwise.train.config.optimization import LossConfig, MasksConfig, UpdateConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.micro_batch import SINGLE_RANK, micro_batches, pack
from turnwise.train.model.policy import Policy
from turnwise.train.terms.registry import Terms
from turnwise.train.terms.term import Part
from turnwise.train.update.update import old_logprobs, update_policy
from turnwise.train.validate import load_config
from turnwise.types.passes import Read

DRIFTS = [[-1.0, -0.2], [-1.0, -0.2], [-0.3, 0.0]]  # current policy over sampler, per row of two tokens
ENTROPIES = [[0.1, 0.9], [0.2, 0.3], [0.8, 0.4]]


@pytest.fixture
def three_rows(random_batch):
    """Rows of a prompt token and two completion tokens, with advantages -1, 1, -1, and the policy that scores them."""
    batch = replace(
        random_batch(0, rows=3),
        targets=np.arange(9),
        cu_targets=np.array([0, 3, 6, 9]),
        target_mask=np.array([0, 1, 1] * 3, dtype=np.uint8),
        target_logprobs=np.array([0, -1, -1] * 3, dtype=np.float32),
        advantages=np.array([-1, 1, -1], dtype=np.float32),
        actor_index=np.array([0, 0, 1]),
    )
    scores = torch.zeros(9, 2)
    scores[torch.from_numpy(batch.loss_mask) == 1] = torch.stack(
        [torch.tensor(DRIFTS).flatten() - 1, torch.tensor(ENTROPIES).flatten()], dim=1
    )
    policy = types.SimpleNamespace(device=torch.device("cpu"), ranks=SINGLE_RANK)
    policy.over_stream = types.MethodType(Policy.over_stream, policy)
    policy.logprobs = lambda micro, entropy=False: (
        tuple(scores[micro.token_N].unbind(1)) if entropy else scores[micro.token_N, 0]
    )
    return batch, policy


@pytest.mark.parametrize(
    ("masks", "kept", "counted"),
    [
        # Means of the drift 0.6, 0.6, 0.15: the first row is over 0.5 and has a negative advantage.
        ({"off_policy": 0.5}, [[0, 0], [1, 1], [1, 1]], 6),
        # Squares 1, .04, 1, .04, .09, 0: the four smallest have a mean of .0425.
        ({"second_moment": 0.043}, [[0, 1], [0, 1], [1, 1]], 6),
        ({"second_moment": 0.042}, [[0, 1], [0, 1], [0, 1]], 6),
        ({"top_entropy": 1 / 3}, [[0, 1], [0, 0], [1, 0]], 6),
        # Ratios exp(-1) = .37, exp(-.2) = .82, exp(-.3) = .74, 1.
        ({"rejection": {"token-k1": 2.0}}, [[0, 1], [0, 1], [1, 1]], 4),
        ({"rejection": {"token-k1": (0.8, 1.5)}}, [[0, 1], [0, 1], [0, 1]], 3),
        ({"rejection": {"seq-mean-k1": (0.6, 2.0), "token-k1": (0.1, 0.9)}}, [[0, 0], [0, 0], [1, 0]], 1),
        # Without its rejected token, the first row has drifted by 0.2; of four entropies .9 and .8 are the top half.
        ({"rejection": {"token-k1": 2.0}, "off_policy": 0.5, "top_entropy": 0.5}, [[0, 1], [0, 0], [1, 0]], 4),
    ],
)
@pytest.mark.parametrize("budget", [1, 6, 100])
def test_worked_masks(three_rows, masks, kept, counted, budget):
    """The gradient of the token mean: minus the advantage of the kept tokens, over the tokens that count."""
    batch, policy = three_rows
    terms = Terms().begin(LossConfig(type="reinforce", masks=MasksConfig(**masks)), batch.actors)
    micros = list(micro_batches(batch, np.arange(3), budget))
    assert len(micros) == {1: 3, 6: 2, 100: 1}[budget]
    current = [policy.logprobs(micro).requires_grad_() for micro in micros]
    masked = terms.minibatch(policy, [Part(*each) for each in zip(micros, current, strict=True)])
    gradient = torch.zeros(9)
    for one, logprobs in zip(masked, current, strict=True):
        one.old_logprobs_N = one.micro.rollout_logprobs_N
        terms.loss(Read(logprobs), one)[0].loss.backward()
        gradient[one.micro.token_N] = logprobs.grad
    want = -torch.tensor([-1.0, 1.0, -1.0])[:, None] * torch.tensor(kept) / counted
    torch.testing.assert_close(gradient.reshape(3, 3)[:, 1:], want)
    dropped = {int(token) for one in masked for part in one.dropped.values() for token in one.micro.token_N[part]}
    assert len(dropped) == 6 - sum(map(sum, kept))


def test_no_mask_leaves_the_micro_batches_as_they_are(three_rows):
    batch, policy = three_rows
    micros = list(micro_batches(batch, np.arange(3), 100))
    (one,) = (
        Terms().begin(LossConfig(), batch.actors).minibatch(policy, [Part(micros[0], micros[0].rollout_logprobs_N)])
    )
    assert one.micro is micros[0] and one.kept_N is None and one.dropped == {}


def test_the_metrics_have_the_shares_that_are_masked(random_batch, small_model):
    """Half of the largest entropies train, and of the first actor's tokens those with a ratio below the bound."""
    model, _ = small_model()
    policy = Policy("default", model, UpdateConfig(), total_steps=9)
    batch, rows = random_batch(3, rows=12), np.arange(12)
    update = UpdateConfig(old_logprobs="recompute", micro_batch_tokens=30)
    micro = pack(batch, rows)
    old_N = old_logprobs(policy, batch, rows, update)[micro.token_N]
    trained, actor = micro.mask_N.numpy() == 1, batch.actor_index[micro.row_N.numpy()]
    ratio = np.exp(np.clip((old_N - micro.rollout_logprobs_N).double().numpy(), -20, 20))
    bound = float(np.median(ratio[trained]))
    rejected = trained & ((ratio > bound) | (ratio < 1e-6))
    loss = LossConfig(masks=MasksConfig(rejection={"token-k1": (1e-6, bound)}, top_entropy=0.5))
    metrics = update_policy(policy, batch, update, loss, np.random.default_rng(0))
    assert 0 < rejected.sum() < trained.sum()
    assert metrics["masked/rejection"] == pytest.approx(rejected.sum() / trained.sum())
    for index, name in enumerate(batch.actors):
        want = rejected[actor == index].sum() / trained[actor == index].sum()
        assert metrics[f"{name}/masked/rejection"] == pytest.approx(want)
    assert metrics["tokens"] == trained.sum() - rejected.sum()
    left = trained.sum() - rejected.sum()
    assert metrics["masked/top_entropy"] == pytest.approx((left - math.ceil(left / 2)) / trained.sum(), abs=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss.masks.rejection.seq-k1": 2.0}, r"'loss.masks.rejection.seq_k1': expected one of token-k1, token-k2"),
        ({"loss.masks.rejection": {"seq-max-k1": 2.0}}, r"'loss.masks.rejection.seq-max-k1' = 2.0: .*'k2' or 'k3'"),
        ({"loss.masks.rejection": {"token-k2": [0.1, 2.0]}}, r"'loss.masks.rejection.token-k2' = \(0.1, 2.0\): .*None"),
        ({"loss.masks.rejection": {"token-k1": [3.0, 2.0]}}, r"token-k1' = \(3.0, 2.0\): Rejection.low=3.0"),
        ({"loss.masks.top_entropy": 1.5}, r"'loss.masks.top_entropy' = 1.5: .*less than or equal to 1"),
        ({"loss.masks.off_policy": -1.0}, r"'loss.masks.off_policy' = -1.0: .*greater than or equal to 0"),
        ({"loss.masks.second_moment": -1.0}, r"'loss.masks.second_moment' = -1.0: .*greater than or equal to 0"),
    ],
)
def test_a_wrong_mask_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"update.old_logprobs": "recompute", **changes})


def test_an_override_names_a_criterion():
    config = load_config(
        None, [("update.old_logprobs", "recompute"), ("loss.masks.rejection.seq-mean-k1", "[0.99, 1.01]")]
    )
    (criterion,) = Terms().begin(config.loss, ["actor"])["masks"].criteria
    assert criterion == Rejection("seq-mean", "k1", 1.01, 0.99)


def test_rejection_needs_the_trainers_logprobs():
    with pytest.raises(ConfigError, match=r"'loss.masks.rejection': .* needs update.old_logprobs = 'recompute'"):
        load_config(None, {"loss.masks.rejection": {"token-k1": 2.0}})
