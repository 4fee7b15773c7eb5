"""Advantages per token, which a term gives a batch in the place of those of its rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from turnwise.train.model.micro_batch import MicroBatch
from turnwise.types import CompletionColumn, TokenColumn, TrainingBatch
from turnwise.types.columns import TOKEN_ADVANTAGES


def at_last_token(rewards_B: Tensor, row_N: Tensor, trained_N: Tensor) -> Tensor:
    """Return the rewards of rows at their last trained tokens, 0 at the others: ``[N]``."""
    rewards_N, index_N = torch.zeros(len(row_N)), torch.arange(len(row_N))
    last_B = torch.full((len(rewards_B),), -1).scatter_reduce(0, row_N, torch.where(trained_N, index_N, -1), "amax")
    rewards_N[last_B[last_B >= 0]] = rewards_B[last_B >= 0]
    return rewards_N


def with_token_advantages(
    batch: TrainingBatch, rows: np.ndarray, whole: MicroBatch, advantages_N: Tensor
) -> TrainingBatch:
    """Return ``batch`` with ``advantages_N`` of the tokens of ``whole`` in the place of the advantages of ``rows``.

    Advantages per token that the batch has already, those of a teacher, are added.
    """
    token_advantages = np.zeros(len(batch.targets), dtype=np.float32)
    if isinstance(given := batch.columns.get(TOKEN_ADVANTAGES), TokenColumn):
        token_advantages += given.values
    token_advantages[whole.token_N.numpy()] += advantages_N.numpy()
    advantages = batch.advantages.copy()
    advantages[rows] = 0
    columns = {**batch.columns, TOKEN_ADVANTAGES: CompletionColumn(token_advantages)}
    return replace(batch, advantages=advantages, columns=columns)
