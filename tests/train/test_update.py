from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from turnwise.train.batch import pack, pad
from turnwise.train.config import KLConfig, LossConfig, UpdateConfig
from turnwise.train.policy import Policy
from turnwise.train.update import old_logprobs, update_policy

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "agent-mean"]


def updated_weights(model, batch, update, loss=None, seed=0):
    policy = Policy("default", copy.deepcopy(model), update, total_steps=10)
    metrics = update_policy(policy, batch, update, loss or LossConfig(), np.random.default_rng(seed))
    return torch.cat([tensor.flatten() for _, tensor in policy.weights()]), metrics


def near_sgd(policy_init):
    """AdamW's first step only tells signs; a huge eps makes it proportional to the gradient."""

    def init(self, *args, **kwargs):
        policy_init(self, *args, **kwargs)
        for group in self.optimizer.param_groups:
            group["eps"] = 1e3

    return init


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_cut_into_micro_batches_gives_the_same_update(monkeypatch, aggregation, random_batch, small_model):
    monkeypatch.setattr(Policy, "__init__", near_sgd(Policy.__init__))
    model, _ = small_model()
    batch, loss = random_batch(0, rows=11), LossConfig(aggregation=aggregation, max_length=16)
    start = torch.cat([tensor.flatten() for _, tensor in Policy("p", model, UpdateConfig(), total_steps=1).weights()])
    moves = [
        updated_weights(model, batch, UpdateConfig(lr=1e3, max_grad_norm=1e9, micro_batch_tokens=budget), loss)[0]
        - start
        for budget in (1, 50, 100_000)
    ]
    assert moves[0].abs().max() > 1e-4
    for move in moves[1:]:
        torch.testing.assert_close(move, moves[0], rtol=1e-3, atol=1e-6)


def test_the_gradient_is_that_of_the_formula(monkeypatch, random_batch, small_model):
    """Ratio 1, token mean: the loss is the mean of -A over tokens and its gradient the policy gradient's."""
    model, _ = small_model()
    batch = random_batch(3, rows=6)
    policy = Policy("default", model, UpdateConfig(), total_steps=1)
    micro = pack(batch, np.arange(6))
    with torch.no_grad():
        batch.rollout_logprobs[micro.token_N] = policy.logprobs(micro).numpy()
    expected = copy.deepcopy(model).double()
    block = pad(micro, range(6))
    logits = expected(input_ids=block.input_ids, attention_mask=block.attention_mask).logits
    logprobs = torch.log_softmax(logits, -1)[block.row, block.column, micro.targets_N]
    mask, advantages = micro.mask_N.double(), micro.advantages_B.double()[micro.row_N]
    (-(logprobs * advantages * mask).sum() / mask.sum()).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in expected.parameters())).item()
    metrics = update_policy(policy, batch, UpdateConfig(), LossConfig(), np.random.default_rng(0))
    assert metrics["loss"] == pytest.approx(float(-(advantages * mask).sum() / mask.sum()), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["sampler_trainer_logprob_max_diff"] < 1e-5
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_counts_updates_and_only_touches_own_rows(random_batch, small_model):
    model, _ = small_model()
    batch = random_batch(0, rows=12, policies=("default", "other"))
    update = UpdateConfig(ppo_epochs=2, minibatches=3)
    _, metrics = updated_weights(model, batch, update)
    assert metrics["updates"] == 6
    own = np.flatnonzero(batch.policy_index == 0)
    masks = [batch.loss_mask[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]] for i in own]
    assert metrics["tokens"] == 2 * sum(int(mask[1:].sum()) for mask in masks)
    alone = copy.deepcopy(batch)
    alone.advantages[batch.policy_index == 1] = 99.0
    assert torch.equal(updated_weights(model, batch, update)[0], updated_weights(model, alone, update)[0])
    batch.policies = ["another", "other"]
    assert updated_weights(model, batch, update)[1] == {}


def test_recomputed_logprobs_start_at_ratio_one(random_batch, small_model):
    model, _ = small_model()
    batch = random_batch(0, rows=5)
    _, metrics = updated_weights(model, batch, UpdateConfig(old_logprobs="recompute"))
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["sampler_trainer_logprob_max_diff"] > 0.1


def test_recomputed_logprobs_know_no_dropout(random_batch, small_model):
    model, _ = small_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    batch = random_batch(0, rows=5)
    policy = Policy("default", model.train(), UpdateConfig(), total_steps=1)
    first, second = (old_logprobs(policy, batch, np.arange(5), UpdateConfig()) for _ in range(2))
    assert first.abs().max() > 0 and torch.equal(first, second)


def test_kl_term_pulls_back_to_the_reference(random_batch, small_model):
    model, _ = small_model()
    batch = random_batch(0, rows=5)
    batch.advantages[:] = 0
    update = UpdateConfig(lr=1e-3)
    policy = Policy("default", model, update, total_steps=9, with_reference=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    loss = LossConfig(kl=KLConfig(coef=1.0))
    kl = [update_policy(policy, batch, update, loss, np.random.default_rng(0))["kl"] for _ in range(8)]
    assert kl[-1] < 0.5 * kl[0], kl


def test_a_gradient_that_is_not_finite_changes_nothing(small_model):
    model, _ = small_model()
    policy = Policy("default", model, UpdateConfig(), total_steps=1)
    before = [tensor.clone() for _, tensor in policy.weights()]
    for parameter in policy.model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(FloatingPointError, match="policy 'default': gradient norm is nan"):
        policy.step()
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, policy.weights(), strict=True))
