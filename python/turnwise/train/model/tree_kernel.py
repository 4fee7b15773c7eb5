"""Attention on CPU over tokens in depth-first order, each of which attends to its segment and those above it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from turnwise import _C

Segments = tuple[Tensor, Tensor]
"""``begin [S+1]``, the first places of the segments, and ``subtree_end [S]``, both int64. Rows without a tree are
segments whose subtrees end with them."""


class TreeAttention(torch.autograd.Function):
    """Attention of ``query [H, U, D]`` to ``key, value [K, U, D]``, ``H = G * K``; returns ``[U, H, D]``.

    The kernel computes in float32, or in float64 if the inputs are float64. Gradients don't depend on the number of
    threads.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (_rows(x.transpose(0, 1), exact) for x in (query, key, value))
        out_UN, lse_UH = torch.empty_like(q), q.new_empty(query.shape[1], query.shape[0])
        scale = float(query.shape[2] ** -0.5) if scale is None else scale
        _C.tree_attention(*segments, q, k, v, len(query), len(key), scale, out_UN, lse_UH, torch.get_num_threads())
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(query, key, value, out_UN, lse_UH)
        return out_UN.unflatten(1, (len(query), -1)).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UHD: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out_UN, lse_UH = ctx.saved_tensors
        q, k, v = (_rows(x.transpose(0, 1), out_UN.dtype) for x in inputs)
        dq, dk, dv = grads = [torch.empty_like(x) for x in (q, k, v)]
        heads, kv_heads = (len(x) for x in inputs[:2])
        begin, end = ctx.segments
        d_out, threads = _rows(grad_UHD, out_UN.dtype), torch.get_num_threads()
        _C.tree_attention_grad(
            begin, end, q, k, v, heads, kv_heads, ctx.scale, out_UN, lse_UH, d_out, dq, dk, dv, threads
        )
        shaped = (x.unflatten(1, like.shape[::2]).transpose(0, 1) for x, like in zip(grads, inputs, strict=True))
        return *(x.to(like.dtype) for x, like in zip(shaped, inputs, strict=True)), None, None


def _rows(x_UHD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[U, H * D]`` with contiguous rows, without a copy if possible."""
    rows = x_UHD.to(dtype).flatten(1)
    return rows if rows.stride(1) == 1 else rows.contiguous()
