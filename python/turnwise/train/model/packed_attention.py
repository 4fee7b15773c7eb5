"""Attention over rows that follow one another in a single stream: each row attends only to itself.

All other parts of a Hugging Face model work token by token and take the stream unchanged, so no padding is needed.
:mod:`turnwise.train.model.prefix_tree_attention` adds this attention to the library's registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from turnwise import _C

Segments = tuple[Tensor, Tensor]
"""``begin [S+1]``, the first places of the segments, and ``subtree_end [S]``, both int64. Rows without a tree are
segments whose subtrees end with them."""


class NotPackable(Exception):
    """A model's attention needs something that :func:`packed_attention` doesn't have; the message names it."""


@dataclass(slots=True)
class Packing:
    """``lengths`` of the rows of a stream. Each attention layer appends its sliding window to ``windows``."""

    lengths: tuple[int, ...]
    windows: list[int | None] = field(default_factory=list)
    segments: Segments = field(init=False)

    def __post_init__(self) -> None:
        ends = torch.tensor(self.lengths, dtype=torch.int64, device="cpu").cumsum(0)
        self.segments = (torch.nn.functional.pad(ends, (1, 0)), ends)


# Arguments that change a score in other ways than a scale and a window: such models are not packable.
_UNSERVED = ("softcap", "s_aux", "position_bias", "head_mask")


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention row by row: ``query [1, heads, T, D]``; ``key`` and ``value`` may have fewer heads.

    Returns ``[1, T, heads, D]``. Without ``packing`` this is the library's own SDPA. With a window, dropout or a GPU it
    calls SDPA for each run of rows of equal lengths, which holds no scores if torch has a flash kernel.
    """
    if packing is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    check_mask(module, kwargs)
    window = kwargs.get("sliding_window")
    packing.windows.append(window)
    if query.device.type == "cpu" and window is None and not dropout:
        return TreeAttention.apply(query[0], key[0], value[0], packing.segments, scaling)[None], None
    # Split the stream into runs of rows with equal lengths.
    runs = [(length, len(list(same))) for length, same in groupby(packing.lengths)]
    pieces = [length * count for length, count in runs]
    streams = [stream[0].split(pieces, dim=1) for stream in (query, key, value)]
    outputs = []
    for (length, count), *parts in zip(runs, *streams, strict=True):
        # Rows of one length make one call: [heads, count * length, D] -> [count, heads, length, D].
        q, k, v = (part.unflatten(1, (count, length)).transpose(0, 1) for part in parts)
        mask = None
        if window is not None and length > window:  # each token sees itself and the window - 1 tokens before it
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def check_mask(module: Any, options: Mapping[str, Any]) -> None:
    """Raise :class:`NotPackable` for an attention that isn't causal, or whose scores are more than scaled products."""
    if needs := [name for name in _UNSERVED if options.get(name) is not None]:
        raise NotPackable(f"its attention has a {needs[0]}")
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise NotPackable("its attention is not causal")


# -- the kernel on CPUs ------------------------------------------------------------------------------------------------
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
