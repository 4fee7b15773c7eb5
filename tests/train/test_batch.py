from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.train.batch import micro_batches, minibatches, pad


@pytest.mark.parametrize("seed", range(5))
def test_pad_finds_every_completion_token_again(seed, random_batch):
    batch = random_batch(seed, rows=7)
    micro = pad(batch, np.arange(7))
    assert torch.equal(micro.input_ids[micro.row_N, micro.column_N], micro.targets_N)
    trained = np.flatnonzero(batch.loss_mask)
    assert np.array_equal(micro.token_N[micro.mask_N.bool()].numpy(), trained)
    assert np.array_equal(micro.rollout_logprobs_N.numpy(), batch.rollout_logprobs[micro.token_N])
    lengths = np.diff(batch.cu_seqlens)
    assert micro.attention_mask.sum(1).tolist() == lengths.tolist()
    assert micro.input_ids.shape[1] == lengths.max()


@pytest.mark.parametrize("budget", [1, 40, 100_000])
def test_micro_batches_keep_every_row_once_within_the_budget(budget, random_batch):
    batch = random_batch(0, rows=23)
    micros = list(micro_batches(batch, np.arange(23), budget))
    assert sorted(torch.cat([micro.token_N for micro in micros]).tolist()) == sorted(
        pad(batch, np.arange(23)).token_N.tolist()
    )
    assert all(micro.num_padded_tokens <= budget or len(micro.input_ids) == 1 for micro in micros)


def test_a_first_token_never_trains_for_want_of_a_prediction(random_batch):
    batch = random_batch(1, rows=1)
    batch.loss_mask[:] = 1
    assert pad(batch, [0]).column_N.min() == 1


@pytest.mark.parametrize(("rows", "count", "sizes"), [(10, 3, [4, 3, 3]), (2, 5, [1, 1]), (0, 2, [])])
def test_minibatches_are_even_and_never_empty(rows, count, sizes):
    parts = minibatches(np.arange(rows), count, np.random.default_rng(0))
    assert [len(part) for part in parts] == sizes
    assert sorted(np.concatenate([*parts, []]).tolist()) == list(range(rows))
