"""The optimal token baseline as ``loss.baseline``: advantages per token, ``A = G - B`` (https://arxiv.org/abs/2602.07078).

    G   the advantage that the credit rule gave the row, at each of its trained tokens
    B   the mean of G over the rows of the credit rule's group at this token position, each weighed by the squared norm
        of its gradient so far: :func:`turnwise.ops.optimal_token_baseline`

A rule's own baseline cancels out in ``G - B``, except where only one row of the group reaches the position: there ``B``
is 0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from turnwise.ops import optimal_token_baseline
from turnwise.train.model.head import Needs
from turnwise.train.model.micro_batch import MicroBatch, pack
from turnwise.train.model.policy import Policy
from turnwise.types import TrainingBatch


@torch.no_grad()
def subtract_optimal_baseline(
    policy: Policy, batch: TrainingBatch, rows: np.ndarray, max_tokens: int
) -> tuple[TrainingBatch, dict[str, float]]:
    """Return ``batch`` with advantages per token for ``rows``, and metrics. It takes one pass of the present weights.

    Raises ``ValueError`` for a batch without groups.
    """
    if batch.group_index is None:
        raise ValueError("batch.group_index=None: expected the groups of a credit rule with loss.baseline")

    def read(micro: MicroBatch) -> Tensor:
        read = policy.read(micro, Needs(squares=True))
        return torch.stack([read.logprobs_N, read.squares_N], dim=-1)

    policy.model.eval()
    stream = policy.over_stream(len(batch.token_ids), policy.cut(batch, rows, max_tokens), read)
    whole = pack(batch, rows)
    logprobs_N, squares_N = stream.cpu()[whole.token_N].unbind(-1)
    advantages_N, returns_N = optimal_token_baseline(
        at_last_token(whole.advantages_B, whole.row_N, whole.mask_N != 0),
        logprobs_N,
        squares_N,
        torch.from_numpy(batch.group_index[rows]),
        mask=whole.mask_N,
        cu_seqlens=whole.cu_seqlens,
    )
    trained = max(1, int((whole.mask_N != 0).sum()))
    baseline = float((returns_N - advantages_N).double().sum()) / trained
    return with_token_advantages(batch, rows, whole, advantages_N), {"token_baseline": baseline}


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
    token_advantages = np.zeros(len(batch.token_ids), dtype=np.float32)
    if batch.token_advantages is not None:
        token_advantages += batch.token_advantages
    token_advantages[whole.token_N.numpy()] += advantages_N.numpy()
    advantages = batch.advantages.copy()
    advantages[rows] = 0
    return replace(batch, advantages=advantages, token_advantages=token_advantages)
