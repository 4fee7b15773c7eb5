"""Sum and scan per-token rewards in plain PyTorch: float64, any device."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.ops.common.layout import RowLayout, trained_tokens


def reward_sum(rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Sum the rewards of each row's trained tokens: ``[B]`` float64."""
    values = rewards.double()
    if lengths is not None:
        mask = torch.arange(rewards.shape[1], device=rewards.device)[None] < lengths[:, None]
    if mask is not None:
        values = torch.where(mask != 0, values, 0.0)
    return RowLayout(rewards, cu_seqlens).sum(values)


class Columns:
    """Convert packed streams to padded ones ``[B, longest]`` and back. Padded streams pass through."""

    def __init__(self, tokens: Tensor, cu_seqlens: Tensor | None) -> None:
        self.packed = cu_seqlens is not None
        if cu_seqlens is None:
            self.shape = tokens.shape
            return
        starts = cu_seqlens.long()
        lengths = starts.diff()
        self.row = torch.repeat_interleave(lengths, output_size=tokens.shape[0])
        self.column = torch.arange(tokens.shape[0], device=tokens.device) - starts[self.row]
        self.shape = torch.Size((len(lengths), int(lengths.max()) if len(lengths) else 0))

    def pad(self, stream: Tensor) -> Tensor:
        if not self.packed:
            return stream
        padded = stream.new_zeros(self.shape)
        padded[self.row, self.column] = stream
        return padded

    def unpad(self, padded: Tensor) -> Tensor:
        return padded[self.row, self.column] if self.packed else padded


def _trained(rewards: Tensor, mask: Tensor | None, columns: Columns) -> Tensor:
    return columns.pad(trained_tokens(mask, rewards))


def returns(rewards: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, gamma: float) -> Tensor:
    """Compute the discounted rewards to go in float64, token by token from the last one."""
    columns = Columns(rewards, cu_seqlens)
    values, trained = columns.pad(rewards.double()), _trained(rewards, mask, columns)
    result = []
    behind = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        here = values[:, t] + gamma * behind
        behind = torch.where(trained[:, t], here, behind)
        result.append(torch.where(trained[:, t], here, 0.0))
    return columns.unpad(_stack_reversed(result, values))


def _stack_reversed(columns: list[Tensor], like: Tensor) -> Tensor:
    """Stack columns, given last one first, into ``[B, T]``. Writes nothing in place, which ``vmap`` can't follow."""
    return torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(like)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns in float64 by the recursion ``A[t] = delta[t] + gamma * lam * A[t + 1]``."""
    columns = Columns(rewards, cu_seqlens)
    r, v, trained = columns.pad(rewards.double()), columns.pad(values.double()), _trained(rewards, mask, columns)
    advantages, targets = [], []
    behind, next_value = r.new_zeros(r.shape[0]), r.new_zeros(r.shape[0])
    for t in reversed(range(r.shape[1])):
        here = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * behind
        behind = torch.where(trained[:, t], here, behind)
        next_value = torch.where(trained[:, t], v[:, t], next_value)
        advantages.append(torch.where(trained[:, t], here, 0.0))
        targets.append(torch.where(trained[:, t], here + v[:, t], 0.0))
    return columns.unpad(_stack_reversed(advantages, r)), columns.unpad(_stack_reversed(targets, r))
