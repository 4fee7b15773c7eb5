"""Attention over a trie of tokens, each of which attends to itself and its ancestors. Shared prefixes run once.

With tokens in depth-first order, a query at place ``q`` attends to a key at ``k`` if ``k <= q < subtree_end[k]``. On
a CPU turnwise's kernel walks the trie depth first; on a GPU FlexAttention takes the condition as its mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from turnwise.train.model.packed_attention import (
    NotPackable,
    Packing,
    Segments,
    TreeAttention,
    check_mask,
    packed_attention,
)

ATTENTION = "turnwise_tree"


@dataclass(slots=True)
class PrefixTreeMask:
    """Segments of a trie in depth-first order: ``begin [S+1]`` are their first places, ``subtree_end [S]`` the ends of
    their subtrees. Each attention layer appends its sliding window, which must be ``None``, to ``windows``.
    """

    begin: Sequence[int]
    subtree_end: Sequence[int]
    windows: list[int | None] = field(default_factory=list)
    segments: Segments = field(init=False, compare=False, repr=False)
    _block_masks: dict[torch.device, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.segments = (
            torch.tensor(self.begin, dtype=torch.int64, device="cpu"),
            torch.tensor(self.subtree_end, dtype=torch.int64, device="cpu"),
        )

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
    check_mask(module, kwargs)
    if kwargs.get("sliding_window") is not None:
        raise NotPackable("its attention has a sliding window")
    if dropout:
        raise NotPackable("its attention drops weights out")
    tree.windows.append(None)
    # Our kernel on CPU, FlexAttention on a GPU.
    if query.device.type == "cpu":
        return TreeAttention.apply(query[0], key[0], value[0], tree.segments, scaling)[None], None
    out = _flex()(
        query, key, value, block_mask=tree.block_mask(query.device), scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2), None


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


# Register the attention, with SDPA's mask for calls without a stream.
AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
