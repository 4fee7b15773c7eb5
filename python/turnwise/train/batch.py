"""Stage: a packed batch is cut into minibatches and micro-batches; the cut never changes the gradient.

A model's forward still pads: :func:`pad` lays a micro-batch out as rows, :func:`completion_index` finds the completion
tokens in it again, so that everything after the forward pass is packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a :class:`TrainingBatch` as torch tensors.

    ``input_ids [b, T]`` int64 and ``attention_mask [b, T]`` int64, padded on the right; ``row_N`` and ``column_N`` say
    where each of the ``N`` packed completion tokens stands in them, ``token_N`` where in the batch's own stream;
    ``cu_seqlens [b+1]`` cuts the packed columns ``targets_N, rollout_logprobs_N, mask_N`` by row; ``advantages_B,
    temperatures_B, actor_ids_B`` are per row.
    """

    input_ids: Tensor
    attention_mask: Tensor
    row_N: Tensor
    column_N: Tensor
    token_N: Tensor
    cu_seqlens: Tensor
    targets_N: Tensor
    rollout_logprobs_N: Tensor
    mask_N: Tensor
    advantages_B: Tensor
    temperatures_B: Tensor
    actor_ids_B: Tensor

    @property
    def num_padded_tokens(self) -> int:
        return self.input_ids.numel()


def minibatches(rows: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle row indices ``[B]`` and cut them into at most ``count`` parts of nearly equal size, none empty."""
    shuffled = rng.permutation(rows)
    return [part for part in np.array_split(shuffled, count) if len(part)]


def micro_batches(batch: TrainingBatch, rows: np.ndarray, max_tokens: int) -> Iterator[MicroBatch]:
    """Cut ``rows`` by a budget of padded tokens, rows of like length together. A longer row goes alone."""
    lengths = np.diff(batch.cu_seqlens)[rows]
    rows = rows[np.argsort(-lengths, kind="stable")]
    start = 0
    while start < len(rows):
        longest = int(batch.cu_seqlens[rows[start] + 1] - batch.cu_seqlens[rows[start]])
        end = start + max(1, max_tokens // max(longest, 1))
        yield pad(batch, rows[start:end])
        start = end


def pad(batch: TrainingBatch, rows: Sequence[int] | np.ndarray) -> MicroBatch:
    """Lay ``rows`` out as a padded micro-batch. The first token of a row has no log-prob, so it never trains."""
    starts, ends = batch.cu_seqlens[:-1][rows], batch.cu_seqlens[1:][rows]
    width = int((ends - starts).max())
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    attention_mask = np.zeros((len(rows), width), dtype=np.int64)
    row, column, packed = [], [], []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        input_ids[i, : end - start] = batch.token_ids[start:end]
        attention_mask[i, : end - start] = 1
        first = start + max(1, _first_set(batch.loss_mask[start:end]))
        packed.append(np.arange(first, end))
        column.append(packed[-1] - start)
        row.append(np.full(end - first, i))
    where = np.concatenate(packed)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        row_N=torch.from_numpy(np.concatenate(row)),
        column_N=torch.from_numpy(np.concatenate(column)),
        token_N=torch.from_numpy(where),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *map(len, packed)])),
        targets_N=torch.from_numpy(batch.token_ids[where]),
        rollout_logprobs_N=torch.from_numpy(batch.rollout_logprobs[where]),
        mask_N=torch.from_numpy(batch.loss_mask[where]),
        advantages_B=torch.from_numpy(batch.advantages[rows]),
        temperatures_B=torch.from_numpy(batch.temperatures[rows]),
        actor_ids_B=torch.from_numpy(batch.actor_index[rows]),
    )


def _first_set(mask: np.ndarray) -> int:
    """Index of the first 1 of ``mask``, its length where there is none."""
    hits = np.flatnonzero(mask)
    return int(hits[0]) if len(hits) else len(mask)
