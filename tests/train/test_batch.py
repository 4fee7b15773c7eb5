from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.train.model.micro_batch import micro_batches, minibatches, pack, pad


@pytest.mark.parametrize("seed", range(5))
def test_pack_finds_every_completion_token_again(seed, random_batch):
    batch = random_batch(seed, rows=7)
    rows = np.random.default_rng(seed).permutation(7)
    micro = pack(batch, rows)
    assert torch.equal(micro.token_ids_T[micro.source_N + 1], micro.targets_N)
    assert np.array_equal(batch.token_ids[micro.token_N], micro.targets_N.numpy())
    trained = micro.token_N[micro.mask_N.bool()].sort().values
    assert np.array_equal(trained.numpy(), np.flatnonzero(batch.loss_mask))
    assert np.array_equal(micro.rollout_logprobs_N.numpy(), batch.rollout_logprobs[micro.token_N])
    assert micro.lengths == tuple(np.diff(batch.cu_seqlens)[rows])
    starts = np.repeat(np.cumsum([0, *micro.lengths])[:-1], micro.lengths)
    assert np.array_equal(micro.position_ids_T.numpy(), np.arange(micro.num_tokens) - starts)
    assert np.array_equal(starts[micro.source_N], np.cumsum([0, *micro.lengths])[micro.row_N])


@pytest.mark.parametrize("seed", range(3))
def test_padded_rows_are_those_of_the_stream(seed, random_batch):
    batch = random_batch(seed, rows=7)
    micro = pack(batch, np.arange(7))
    rows = [5, 0, 3]
    block = pad(micro, rows)
    for place, row in enumerate(rows):
        ids = batch.token_ids[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        assert np.array_equal(block.input_ids[place][block.attention_mask[place].bool()].numpy(), ids)
        assert block.attention_mask[place].tolist() == sorted(block.attention_mask[place].tolist(), reverse=True)
    assert torch.equal(block.input_ids[block.row, block.column + 1], micro.targets_N[block.token])
    assert sorted(micro.row_N[block.token].unique().tolist()) == sorted(rows)
    assert len(block.token) == sum(int((micro.row_N == row).sum()) for row in rows)


@pytest.mark.parametrize("budget", [1, 14, 40, 100_000])
def test_micro_batches_keep_every_row_once_within_the_budget(budget, random_batch):
    batch = random_batch(0, rows=23)
    micros = micro_batches(batch, np.arange(23), budget)
    tokens = torch.cat([micro.token_N for micro in micros]).tolist()
    assert sorted(tokens) == sorted(pack(batch, np.arange(23)).token_N.tolist())
    assert all(micro.num_tokens <= budget or len(micro.lengths) == 1 for micro in micros)


def test_the_cut_is_balanced_and_no_finer_than_it_must_be(random_batch):
    batch = random_batch(0, rows=60)
    total, longest = int(batch.cu_seqlens[-1]), int(np.diff(batch.cu_seqlens).max())
    for parts in (2, 3, 7):
        sizes = [micro.num_tokens for micro in micro_batches(batch, np.arange(60), total // parts + longest)]
        assert len(sizes) <= parts and max(sizes) - min(sizes) <= longest, sizes
    # A row over the budget goes alone.
    batch = random_batch(0, rows=9)
    lengths = np.diff(batch.cu_seqlens)
    budget = int(np.median(lengths))
    micros = micro_batches(batch, np.arange(9), budget)
    over = [micro.lengths for micro in micros if micro.num_tokens > budget]
    assert sorted(over) == sorted((length,) for length in lengths[lengths > budget]) != []


def test_a_first_token_never_trains_for_want_of_a_prediction(random_batch):
    batch = random_batch(1, rows=1)
    batch.target_mask[:] = 1
    assert pack(batch, [0]).source_N.tolist() == list(range(int(batch.cu_seqlens[1]) - 1))


@pytest.mark.parametrize(("rows", "count", "sizes"), [(10, 3, [3, 4, 3]), (2, 5, [1, 1]), (0, 2, [])])
def test_minibatches_are_even_and_never_empty(rows, count, sizes, random_batch):
    parts = minibatches(random_batch(0, rows=max(rows, 1)), np.arange(rows), count, np.random.default_rng(0))
    assert sorted(len(part) for part in parts) == sorted(sizes)
    assert sorted(np.concatenate([*parts, []]).tolist()) == list(range(rows))


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(5))
def test_minibatches_keep_siblings_together(seed, count, tree_batch):
    batch = tree_batch(seed)
    parts = minibatches(batch, np.arange(len(batch)), count, np.random.default_rng(seed))
    assert len(parts) == count and sorted(np.concatenate(parts).tolist()) == list(range(len(batch)))
    prompts = [{prompt_of(batch, row) for row in part} for part in parts]
    assert sum(map(len, prompts)) == len(set().union(*prompts)), "a prompt is in one part alone"
    again = minibatches(batch, np.arange(len(batch)), count, np.random.default_rng(seed + 1))
    assert count == 1 or any(set(one) != set(other) for one, other in zip(parts, again, strict=True))


def prompt_of(batch, row):
    start, end = batch.cu_seqlens[row], batch.cu_seqlens[row + 1]
    trained = np.flatnonzero(batch.loss_mask[start:end])
    return tuple(batch.token_ids[start : start + trained[0]] if len(trained) else batch.token_ids[start:end])


@pytest.mark.parametrize("budget", [1, 30, 60, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_as_tries(seed, budget, tree_batch):
    batch = tree_batch(seed)
    rows = np.arange(len(batch))
    micros = micro_batches(batch, rows, budget, trie_share=1.0)
    whole = pack(batch, rows)
    assert sorted(torch.cat([micro.token_N for micro in micros]).tolist()) == sorted(whole.token_N.tolist())
    assert all(micro.num_tokens <= budget or micro.num_tokens == max(micro.lengths) - 1 for micro in micros)
    for micro in micros:
        assert micro.tree is not None and len(micro.tree) == micro.num_tokens
        tokens = torch.from_numpy(batch.token_ids)
        assert torch.equal(tokens[micro.token_N], micro.targets_N)
        assert torch.equal(micro.token_ids_T[micro.source_N], tokens[micro.token_N - 1]), (
            "a token is predicted from the one before it"
        )
    # Nothing is shared here, or less than was asked for: rows stand one after the other.
    assert all(micro.tree is None for micro in micro_batches(batch, rows, budget, trie_share=0.01))
    assert all(micro.tree is None for micro in micro_batches(batch, rows, budget))
