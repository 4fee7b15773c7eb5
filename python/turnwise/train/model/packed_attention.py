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
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from turnwise.train.model.tree_kernel import Segments, TreeAttention


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


# Arguments that change a score in other ways than a scale and a window: such models are refused.
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
    refuse_unserved(module, kwargs)
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
        masked = window is not None and length > window
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_band(length, window, query.device) if masked else None,
            dropout_p=dropout,
            is_causal=not masked,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def refuse_unserved(module: Any, options: Mapping[str, Any]) -> None:
    """Raise :class:`NotPackable` for an attention that isn't causal, or whose scores are more than scaled products."""
    if needs := [name for name in _UNSERVED if options.get(name) is not None]:
        raise NotPackable(f"its attention has a {needs[0]}")
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise NotPackable("its attention is not causal")


def _band(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask ``[length, length]`` bool: each token sees itself and the ``window - 1`` tokens before it."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() if window is None else ones.tril() & ones.triu(1 - window)
