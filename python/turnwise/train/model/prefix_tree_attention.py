"""Attention over a trie of tokens, each of which attends to itself and its ancestors. Shared prefixes run once.

With tokens in depth-first order, a query at place ``q`` attends to a key at ``k`` if ``k <= q < subtree_end[k]``. On
CPU this takes one causal call for each run of segments of equal length, and one more call for each segment with
branches: its descendants follow it in one run of places, and all attend to the whole segment. A query's parts are
merged by their log-sum-exps (as in ring attention, https://arxiv.org/abs/2310.01889). The flash kernel's backward of
each part, given the *merged* output and log-sum-exp, is the exact gradient. On a GPU FlexAttention takes the condition
as its mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from turnwise.train.model.packed_attention import NotPackable, Packing, packed_attention, refuse_unserved

ATTENTION = "turnwise_tree"

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Own(NamedTuple):
    """``times`` segments of ``length`` tokens each, one after the other from ``start``; each attends to itself."""

    start: int
    length: int
    times: int


class SegmentSpan(NamedTuple):
    """A segment ``[start, end)``, to all of which the tokens ``[end, last)`` below it attend."""

    start: int
    end: int
    last: int


@dataclass(slots=True)
class PrefixTreeMask:
    """Segments of a trie in depth-first order: ``begin [S+1]`` are their first places, ``subtree_end [S]`` the ends of
    their subtrees. Each attention layer appends its sliding window, which must be ``None``, to ``windows``.
    """

    begin: Sequence[int]
    subtree_end: Sequence[int]
    windows: list[int | None] = field(default_factory=list)
    own: list[Own] = field(init=False)
    below: list[SegmentSpan] = field(init=False)
    _block_masks: dict[torch.device, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        starts, ends = self.begin[:-1], self.begin[1:]
        self.own, at = [], 0
        for length, same in groupby(end - start for start, end in zip(starts, ends, strict=True)):
            count = len(list(same))
            self.own.append(Own(at, length, count))
            at += length * count
        spans = zip(starts, ends, self.subtree_end, strict=True)
        self.below = [SegmentSpan(start, end, last) for start, end, last in spans if last > end]

    def __len__(self) -> int:
        return self.begin[-1]

    def block_mask(self, device: torch.device) -> Any:
        """Return FlexAttention's mask of the tree, built once per device."""
        if device not in self._block_masks:
            from torch.nn.attention.flex_attention import create_block_mask

            lengths = torch.tensor(self.begin, device=device).diff()
            last_U = torch.tensor(self.subtree_end, device=device).repeat_interleave(lengths)

            def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (k <= q) & (q < last_U[k])

            self._block_masks[device] = create_block_mask(allowed, None, None, len(self), len(self), device=device)
        return self._block_masks[device]


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: PrefixTreeMask | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention along the branches of ``tree``. Returns ``[1, U, heads, D]``.

    ``query`` is ``[1, heads, U, D]``; ``key`` and ``value`` may have fewer heads. Without a ``tree`` this is
    :func:`packed_attention`. Raises ``NotPackable`` for anything that changes a score other than a scale: a window, a
    cap, a bias, dropout.
    """
    if tree is None:
        return packed_attention(
            module, query, key, value, attention_mask, dropout, scaling=scaling, packing=packing, **kwargs
        )
    refuse_unserved(module, kwargs)
    if kwargs.get("sliding_window") is not None:
        raise NotPackable("its attention has a sliding window")
    if dropout:
        raise NotPackable("its attention drops weights out")
    tree.windows.append(None)
    # The flash kernel on CPU, FlexAttention on a GPU.
    if query.device.type == "cpu":
        return _TreeAttention.apply(query[0], key[0], value[0], tree, scaling)[None], None
    out = _flex()(
        query, key, value, block_mask=tree.block_mask(query.device), scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2), None


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


class _TreeAttention(torch.autograd.Function):
    """Attention on CPU: ``query [H, U, D]``; ``key, value [K, U, D]`` with ``H = G * K``; returns ``[U, H, D]``."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: PrefixTreeMask, scale: float | None
    ) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        out_UHD = query.new_empty(query.shape[1], query.shape[0], query.shape[2], dtype=exact)
        lse_UH = query.new_empty(out_UHD.shape[:2], dtype=exact)
        # Each segment attends to itself.
        for own in tree.own:
            out, lse = _flash(*_own(own, query, key, value), 0.0, True, scale=scale)
            place = slice(own.start, own.start + own.length * own.times)
            out_UHD[place].unflatten(0, (own.times, own.length)).copy_(out.transpose(1, 2))
            lse_UH[place].unflatten(0, (own.times, own.length)).copy_(lse.transpose(1, 2))
        # Descendants attend to the segment above them; merge this part into what they have so far.
        for below in tree.below:
            out, lse = _flash(*_below(below, query, key, value), 0.0, False, scale=scale)
            place = slice(below.end, below.last)
            part_TH = lse.permute(2, 0, 1).flatten(1)
            so_far_TH = lse_UH[place]
            share_TH1 = torch.sigmoid(part_TH - so_far_TH)[..., None]
            out_UHD[place].lerp_(out.permute(2, 0, 1, 3).flatten(1, 2).to(exact), share_TH1)
            torch.logaddexp(so_far_TH, part_TH, out=so_far_TH)
        out_UHD = out_UHD.to(query.dtype)
        ctx.tree, ctx.scale = tree, scale
        ctx.save_for_backward(query, key, value, out_UHD, lse_UH)
        return out_UHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UHD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_UHD, lse_UH = ctx.saved_tensors
        tree, scale = ctx.tree, ctx.scale
        heads, group = query.shape[0], query.shape[0] // key.shape[0]
        d_query = torch.empty_like(out_UHD)
        d_key, d_value = (out_UHD.new_empty(len(out_UHD), *x.shape[::2]) for x in (key, value))
        # Gradients of each segment's attention to itself; sum those of keys and values over the heads that share them.
        for own in tree.own:
            place, shape = slice(own.start, own.start + own.length * own.times), (own.times, own.length)
            grad, out, lse = (x[place].unflatten(0, shape).transpose(1, 2) for x in (grad_UHD, out_UHD, lse_UH))
            dq, dk, dv = _flash_backward(grad, *_own(own, query, key, value), out, lse, 0.0, True, scale=scale)
            d_query[place].unflatten(0, shape).copy_(dq.transpose(1, 2))
            for whole, part in ((d_key, dk), (d_value, dv)):
                summed = part if group == 1 else part.unflatten(1, (heads // group, group)).sum(2)
                whole[place].unflatten(0, shape).copy_(summed.transpose(1, 2))
        # Add the gradients of the descendants' attention to the segment above them.
        for below in tree.below:
            queries, keys = slice(below.end, below.last), slice(below.start, below.end)
            grad, out = (x[queries].unflatten(1, (-1, group)).permute(1, 2, 0, 3) for x in (grad_UHD, out_UHD))
            lse = lse_UH[queries].unflatten(1, (-1, group)).permute(1, 2, 0)
            dq, dk, dv = _flash_backward(grad, *_below(below, query, key, value), out, lse, 0.0, False, scale=scale)
            d_query[queries].unflatten(1, (-1, group)).add_(dq.permute(2, 0, 1, 3))
            d_key[keys] += dk.sum(1).transpose(0, 1)
            d_value[keys] += dv.sum(1).transpose(0, 1)
        return d_query.transpose(0, 1), d_key.transpose(0, 1), d_value.transpose(0, 1), None, None


def _own(own: Own, query: Tensor, *others: Tensor) -> list[Tensor]:
    """Return ``[times, H, length, D]`` of each tensor, with keys and values repeated for every query head."""
    shape, place = (own.times, own.length), slice(own.start, own.start + own.length * own.times)
    parts = [x[:, place].unflatten(1, shape).transpose(0, 1) for x in (query, *others)]
    group = query.shape[0] // others[0].shape[0]
    return parts if group == 1 else [parts[0], *(x.repeat_interleave(group, dim=1) for x in parts[1:])]


def _below(below: SegmentSpan, query: Tensor, *others: Tensor) -> list[Tensor]:
    """Return ``[K, G, T, D]`` of each tensor; the ``G`` query heads share keys and values without a copy."""
    group = query.shape[0] // others[0].shape[0]
    queries = query[:, below.end : below.last].unflatten(0, (-1, group))
    return [queries, *(x[:, None, below.start : below.end].expand(-1, group, -1, -1) for x in others)]


# Register the attention, with SDPA's mask for calls without a stream.
AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
