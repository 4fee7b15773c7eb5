"""The optimal token baseline: worked numbers, sums of squares by whole softmaxes, verl's, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from turnwise.samples.pack import pack, select
from turnwise.train.config.optimization import UpdateConfig
from turnwise.train.config.toml import ConfigError
from turnwise.train.model.forward import Forward
from turnwise.train.model.micro_batch import micro_batches
from turnwise.train.model.policy import Policy
from turnwise.train.terms.baseline import GroupIndex, OptimalTokenBaseline
from turnwise.train.validate import load_config
from turnwise.types import AllowedTokens, CompletionColumn, RowColumn, Sample
from turnwise.types.passes import Needs

UPDATE = UpdateConfig()


def double_policy(small_model, seed=0, **settings):
    model = small_model(seed)[0].double()
    with torch.no_grad():  # far from uniform, so that the energies differ
        model.lm_head.weight.mul_(40)
    return Policy("default", model, UPDATE, total_steps=100, **settings)


def subtracted(policy, batch, rows, budget):
    """The batch with advantages per token, and the term's metrics."""
    term = OptimalTokenBaseline()
    return term.prepare(policy, batch, rows, budget), term.metrics({}, len(rows))


def whole_softmax(model, batch, row):
    """Log-probs of the row's tokens after its first, and the sums of squares, from all logits."""
    ids = torch.from_numpy(batch.token_ids[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1] / (float(batch.temperatures[row]) or 1.0)
    logs = torch.log_softmax(logits, dim=-1)
    return logs.gather(1, ids[1:, None])[:, 0], logs.exp().square().sum(-1)


def test_worked_numbers(small_model, random_batch):
    """With equal logits all energies are equal, so B is the mean of the rows that reach a position: of 1, 0, 2 it is 1,
    and of 0, 2 it is 1. Only the third row has a third token, where B is 0. A teacher's advantages are added."""
    policy = double_policy(small_model)
    with torch.no_grad():
        policy.model.lm_head.weight.zero_()
    batch = replace(
        random_batch(0, rows=4),
        targets=np.array([5, 9, 6, 8, 7, 6, 8, 7, 1, 6, 8]),
        cu_targets=np.array([0, 2, 5, 9, 11]),
        target_mask=np.array([0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=np.uint8),
        target_logprobs=np.zeros(11, dtype=np.float32),
        advantages=np.array([1, 0, 2, 7], dtype=np.float32),
        columns={"group_index": RowColumn(np.array([3, 3, 3, 0]))},
    )
    made, metrics = subtracted(policy, batch, np.arange(3), 100)
    np.testing.assert_allclose(made.columns["token_advantages"].values, [0, 0, 0, -1, -1, 0, 1, 1, 2, 0, 0], atol=1e-6)
    assert made.advantages.tolist() == [0, 0, 0, 7] and batch.advantages.tolist() == [1, 0, 2, 7]
    assert metrics == {"token_baseline": pytest.approx(5 / 6, abs=1e-6)}
    of_teacher = CompletionColumn(np.full(11, 0.5, dtype=np.float32))
    taught = replace(batch, columns={**batch.columns, "token_advantages": of_teacher})
    made, _ = subtracted(policy, taught, np.arange(3), 100)
    np.testing.assert_allclose(made.columns["token_advantages"].values[:5], [0.5, 0.5, 0.5, -0.5, -0.5], atol=1e-6)
    with pytest.raises(ValueError, match="columns has no 'group_index': expected the groups"):
        subtracted(policy, replace(batch, columns={}), np.arange(3), 100)


@pytest.mark.parametrize("layout", ["padded", "packed", "trie"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_sums_of_squares_are_those_of_whole_softmaxes(small_model, tree_batch, layout, fused):
    batch = tree_batch(1)
    batch = replace(batch, temperatures=np.resize(np.array([1.0, 0.7, 0.0], dtype=np.float32), len(batch)))
    model = double_policy(small_model).model
    forward = Forward(model, layout)
    forward.fused = fused
    share = forward.trie_share
    for micro in micro_batches(batch, np.arange(len(batch)), 40, trie_share=share):
        with torch.no_grad():
            read = forward.read(micro, Needs(squares=True))
        row_of = np.searchsorted(batch.cu_seqlens, micro.token_N.numpy(), side="right") - 1
        for row, token, own, square in zip(row_of, micro.token_N, read.logprobs_N, read.squares_N, strict=True):
            at = int(token) - int(batch.cu_seqlens[row]) - 1
            wanted = [column[at] for column in whole_softmax(model, batch, row)]
            assert [float(own), float(square)] == pytest.approx([float(x) for x in wanted], rel=1e-9)


def test_under_a_grammar_the_squares_are_those_of_the_allowed_tokens(small_model, random_batch):
    batch = random_batch(0, rows=2)
    (micro,) = micro_batches(batch, np.arange(2), 100)
    allowed = torch.zeros(len(micro.targets_N), 304, dtype=torch.bool)
    allowed[:, :50] = True
    allowed[torch.arange(len(allowed)), micro.targets_N] = True
    masks = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little"))
    micro = replace(
        micro,
        columns={"allowed": AllowedTokens(torch.arange(len(allowed)), masks)},
    )
    policy = double_policy(small_model)
    with torch.no_grad():
        read = policy.read(micro, Needs(squares=True))
        logits = policy.model.lm_head(policy.model.model(micro.token_ids_T[None, : micro.lengths[0]]).last_hidden_state)
    own = micro.row_N == 0
    logits = logits[0][micro.source_N[own]].masked_fill(~allowed[own, : logits.shape[-1]], -torch.inf)
    logs = torch.log_softmax(logits, -1)
    torch.testing.assert_close(read.squares_N[own], logs.exp().square().sum(-1), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(read.logprobs_N[own], logs.gather(1, micro.targets_N[own][:, None])[:, 0])


@pytest.mark.slow
@pytest.mark.needs("verl")
@pytest.mark.parametrize("seed", range(4))
def test_are_verls_numbers(small_model, random_batch, seed):
    """verl gets the log-probs and sums of squares of whole softmaxes in float64."""
    from verl.trainer.ppo import core_algos as verl

    batch = random_batch(seed, rows=9)
    groups = np.random.default_rng(seed).integers(0, 3, 9)
    batch = replace(batch, columns={"group_index": RowColumn(groups)}, target_mask=batch.target_mask.copy())
    batch.target_mask[batch.cu_seqlens[:-1]] = 0
    policy, rows = double_policy(small_model, seed), np.arange(9)
    made, _ = subtracted(policy, batch, rows, 100)
    spans = [slice(begin + 1, end) for begin, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]
    mask = pad_sequence([torch.from_numpy(batch.loss_mask[span].astype(float)) for span in spans], batch_first=True)
    old, squares = (
        pad_sequence(column, batch_first=True)
        for column in zip(*(whole_softmax(policy.model, batch, row) for row in rows), strict=True)
    )
    rewards = torch.zeros_like(mask)
    for row in rows:
        rewards[row, int(mask[row].nonzero().max())] = float(batch.advantages[row])
    theirs, _ = verl.compute_multi_turn_optimal_token_baseline_advantage(
        token_level_rewards=rewards, response_mask=mask, index=groups, old_log_probs=old,
        sum_pi_squared=squares,
    )  # fmt: skip
    for row, span in enumerate(spans):
        ours = made.columns["token_advantages"].values[span]
        np.testing.assert_allclose(ours, (theirs * mask)[row, : len(ours)].numpy(), atol=2e-6)


def sample(actor="solver", turn=0, group=None, question=7):
    return Sample(
        question, "team", actor, turn, 0, None, "r", 0, "default", [1], [2], [-1.0], [(1, 0)], 1.0, 1.0,
        advantage=1.0, group=group,
    )  # fmt: skip


def test_groups_are_those_of_the_credit_rule():
    from turnwise.credit import ATGRPOCredit, EpisodicCredit, GRPOCredit

    def packed(rule):
        samples = [sample(), sample("critic"), sample(turn=1), sample(), sample(question=8)]
        GroupIndex().selected(SimpleNamespace(credit=rule), [], samples)
        return pack(samples, {}, {})

    for rule in (ATGRPOCredit(), EpisodicCredit()):
        assert packed(rule).columns["group_index"].values.tolist() == [0, 1, 2, 0, 3]
    batch = packed(GRPOCredit())
    assert batch.columns["group_index"].values.tolist() == [0, 0, 0, 0, 1] and packed(None).columns == {}
    assert select(batch, [4, 1]).columns["group_index"].values.tolist() == [1, 0]


def test_what_does_not_fit_is_named():
    settings = {"loss.baseline": "optimal_token", "loss.critic": {}}
    with pytest.raises(ConfigError, match=r"'loss.baseline' = 'optimal_token': expected 'credit' with loss.critic"):
        load_config(None, settings)
