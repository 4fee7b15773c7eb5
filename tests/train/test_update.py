from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from turnwise.train.config.optimization import LossConfig, UpdateConfig
from turnwise.train.model.micro_batch import pack, pad
from turnwise.train.model.policy import Policy
from turnwise.train.terms.loss_types import registry
from turnwise.train.update.update import old_logprobs, update_policy
from turnwise.types import CompletionColumn

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


def moves_of(model, batch, loss, **update):
    """How far one update moves the weights, proportional to the gradient, for three cuts into micro-batches."""
    start = torch.cat([tensor.flatten() for _, tensor in Policy("p", model, UpdateConfig(), total_steps=1).weights()])
    moves = []
    for budget in (1, 50, 100_000):
        torch.manual_seed(0)  # the draw of clip-cov
        settings = UpdateConfig(lr=1e3, max_grad_norm=1e9, micro_batch_tokens=budget, **update)
        moves.append(updated_weights(model, batch, settings, loss)[0] - start)
    return moves


def assert_same_moves(moves):
    assert moves[0].abs().max() > 1e-4
    for move in moves[1:]:
        torch.testing.assert_close(move, moves[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_any_cut_into_micro_batches_gives_the_same_update(monkeypatch, aggregation, random_batch, small_model):
    monkeypatch.setattr(Policy, "__init__", near_sgd(Policy.__init__))
    model, _ = small_model()
    loss = LossConfig(aggregation=aggregation, max_length=16, entropy_coef=0.1)
    assert_same_moves(moves_of(model, random_batch(0, rows=11), loss))


@pytest.mark.parametrize("own", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("kind", sorted(registry))
def test_any_cut_gives_the_same_update_with_every_loss(monkeypatch, kind, own, random_batch, small_model):
    monkeypatch.setattr(Policy, "__init__", near_sgd(Policy.__init__))
    model, _ = small_model()
    batch = with_token_advantages(random_batch(5, rows=11)) if own else random_batch(5, rows=11)
    options = {"clip-cov": {"share": 0.2, "lower": 0.0}, "kl-cov": {"share": 0.2}, "dro": {"beta": 0.1}}.get(kind, {})
    unit = {"aggregation": "seq-mean-token-sum"} if kind == "luspo" else {}
    assert_same_moves(moves_of(model, batch, LossConfig(type=kind, options=options, **unit)))


def test_tokens_are_singled_out_anew_for_each_minibatch(random_batch, small_model):
    model, _ = small_model()
    batch, loss = random_batch(5, rows=12), LossConfig(type="kl-cov", options={"share": 0.25})
    _, metrics = updated_weights(model, batch, UpdateConfig(num_minibatches=3, micro_batch_tokens=20), loss)
    parts = np.array_split(np.random.default_rng(0).permutation(12), 3)
    tokens = [int(pack(batch, part).mask_N.sum()) for part in parts]
    want = sum(int(count * 0.25) for count in tokens) / sum(tokens)
    assert metrics["dual_clip_fraction"] == pytest.approx(want, rel=1e-5)
    # The loss is the mean over updates.
    once, twice = (
        updated_weights(model, random_batch(0, rows=6), UpdateConfig(lr=1e-9, ppo_epochs=epochs))[1]["loss"]
        for epochs in (1, 2)
    )
    assert once != 0 and twice == pytest.approx(once, rel=1e-4)


def test_each_actor_counts_alike_within_its_policy(monkeypatch, random_batch, small_model):
    """Agent mean over the actors of one policy: the gradient is the mean of those that each actor's rows give alone."""
    monkeypatch.setattr(Policy, "__init__", near_sgd(Policy.__init__))
    model, _ = small_model()
    batch = random_batch(7, rows=16, policies=("default", "other"))
    assert {0, 1} == set(batch.actor_index[batch.policy_index == 0]) == set(batch.actor_index[batch.policy_index == 1])
    whole = moves_of(model, batch, LossConfig(type="reinforce", aggregation="agent-mean"))
    assert_same_moves(whole)
    alone = []
    for actor in (0, 1):
        only = copy.deepcopy(batch)
        only.policy_index[batch.actor_index != actor] = 1
        alone.append(moves_of(model, only, LossConfig(type="reinforce", aggregation="token-mean"))[0])
    torch.testing.assert_close(whole[0], (alone[0] + alone[1]) / 2, rtol=1e-3, atol=1e-6)
    assert (alone[0] - alone[1]).abs().max() > 1e-3


def with_token_advantages(batch):
    """Give the tokens that train advantages of their own."""
    values = np.random.default_rng(9).normal(size=len(batch.token_ids)).astype(np.float32)
    return replace(batch, columns={"token_advantages": CompletionColumn(values * batch.loss_mask)})


@pytest.mark.parametrize("own", [False, True], ids=["rows", "tokens"])
def test_the_gradient_is_that_of_the_formula(monkeypatch, random_batch, small_model, own):
    """Ratio 1, token mean: the loss is the mean of -A over tokens and its gradient the policy gradient's."""
    model, _ = small_model()
    batch = random_batch(3, rows=6)
    batch = with_token_advantages(batch) if own else batch
    policy = Policy("default", model, UpdateConfig(), total_steps=1)
    micro = pack(batch, np.arange(6))
    with torch.no_grad():
        batch.target_logprobs[micro.token_N] = policy.logprobs(micro).numpy()
    expected = copy.deepcopy(model).double()
    block = pad(micro, range(6))
    logits = expected(input_ids=block.input_ids, attention_mask=block.attention_mask).logits
    logprobs = torch.log_softmax(logits, -1)[block.row, block.column, micro.targets_N]
    mask, advantages = micro.mask_N.double(), micro.advantages_B.double()[micro.row_N]
    if own:
        advantages += torch.from_numpy(batch.columns["token_advantages"].values).double()[micro.token_N]
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
    update = UpdateConfig(ppo_epochs=2, num_minibatches=3)
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
    # Recomputed logprobs know no dropout.
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy = Policy("default", model.train(), UpdateConfig(), total_steps=1)
    first, second = (old_logprobs(policy, batch, np.arange(5), UpdateConfig()) for _ in range(2))
    assert first.abs().max() > 0 and torch.equal(first, second)


def test_entropy_is_measured_and_raised(random_batch, small_model):
    model, _ = small_model()
    batch = random_batch(0, rows=6)
    batch.advantages[:] = 0
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # far from uniform, so that there is entropy to win
    entropies = []
    policy = Policy("default", model, UpdateConfig(lr=1e-2), total_steps=9)
    for _ in range(5):
        metrics = update_policy(
            policy, batch, UpdateConfig(lr=1e-2), LossConfig(entropy_coef=1.0), np.random.default_rng(0)
        )
        entropies.append(metrics["entropy"])
        assert metrics["loss"] == pytest.approx(-metrics["entropy"], rel=1e-4)
    assert entropies[-1] > 1.2 * entropies[0], entropies


def poisoned(batch, row):
    batch = copy.deepcopy(batch)
    batch.target_logprobs[batch.cu_seqlens[row + 1] - 1] = np.nan
    batch.target_mask[batch.cu_seqlens[row + 1] - 1] = 1
    return batch


def test_an_update_that_is_not_finite_is_skipped_and_the_others_count(random_batch, small_model):
    model, _ = small_model()
    update = UpdateConfig(num_minibatches=3, max_nonfinite_updates=1)
    policy = Policy("default", model, update, total_steps=9)
    rng = np.random.default_rng(0)
    metrics = update_policy(policy, poisoned(random_batch(0, rows=12), 5), update, LossConfig(), rng)
    assert (metrics["updates"], metrics["skipped_updates"], policy.updates) == (2, 1, 2)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert all(tensor.isfinite().all() for _, tensor in policy.weights())
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    # A gradient that overflows is skipped too.
    model, _ = small_model()
    update = UpdateConfig(max_nonfinite_updates=1)
    policy = Policy("default", model, update, total_steps=9)
    before = policy.fingerprint()
    handle = next(policy.model.parameters()).register_hook(lambda grad: grad * float("inf"))
    metrics = update_policy(policy, random_batch(0, rows=4), update, LossConfig(), np.random.default_rng(0))
    assert metrics["skipped_updates"] == 1 and policy.updates == 0 and policy.fingerprint() == before
    with pytest.raises(FloatingPointError, match="the log-probs and advantages of all rows are finite"):
        update_policy(policy, random_batch(0, rows=4), update, LossConfig(), np.random.default_rng(0))
    handle.remove()


@pytest.mark.parametrize("max_skipped", [0, 2])
def test_after_too_many_in_a_row_the_run_stops(random_batch, small_model, max_skipped):
    model, _ = small_model()
    update = UpdateConfig(max_nonfinite_updates=max_skipped)
    policy = Policy("default", model, update, total_steps=9)
    before = [tensor.clone() for _, tensor in policy.weights()]
    sound = random_batch(0, rows=4)
    batch = poisoned(sound, 2)
    for skipped in range(max_skipped):
        assert policy.skipped == skipped
        metrics = update_policy(policy, batch, update, LossConfig(), np.random.default_rng(0))
        assert metrics == {"updates": 0, "skipped_updates": 1}
    actor = batch.actors[batch.actor_index[2]]
    message = (
        rf"policy 'default': loss is nan at update 0; {max_skipped + 1} in a row, "
        rf"update.max_nonfinite_updates = {max_skipped}; "
        rf"1 rows are not finite: row 2 \(actor '{actor}', reward {batch.rewards[2]:g}, "
    )
    with pytest.raises(FloatingPointError, match=message):
        update_policy(policy, batch, update, LossConfig(), np.random.default_rng(0))
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, policy.weights(), strict=True))
    update_policy(policy, sound, update, LossConfig(), np.random.default_rng(0))
    assert policy.skipped == 0


def test_weights_that_are_not_finite_are_named_at_once(random_batch, small_model):
    """However many updates may be skipped: no batch does better."""
    policy = Policy("default", small_model()[0], UpdateConfig(max_nonfinite_updates=9), total_steps=9)
    with torch.no_grad():
        policy.model.model.layers[0].input_layernorm.weight[0] = np.nan
    told = (
        "policy 'default': weight 'model.layers.0.input_layernorm.weight' is not finite at update 0: 1 of 32 elements"
    )
    batch, update = random_batch(0, rows=4), UpdateConfig(max_nonfinite_updates=9)
    with pytest.raises(FloatingPointError, match=told):
        update_policy(policy, batch, update, LossConfig(), np.random.default_rng(0))


def test_rows_that_do_not_fit_the_memory_are_named(random_batch, small_model, monkeypatch):
    model, _ = small_model()
    policy = Policy("default", model, UpdateConfig(), total_steps=9)
    batch = random_batch(0, rows=4)
    longest = int(np.diff(batch.cu_seqlens).max())

    def too_long(micro, needs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(policy, "read", too_long)
    said = (
        rf"its longest row has {longest}: lower update.micro_batch_tokens.* gradient_checkpointing.*CUDA out of memory"
    )
    with pytest.raises(torch.OutOfMemoryError, match=said):
        update_policy(policy, batch, UpdateConfig(), LossConfig(), np.random.default_rng(0))
