"""Lets a decoder compute the attention of a model's layers, which the model calls by a name that it knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

_ATTENTION = "turnwise_shared_prefix"
RESERVE = 8
"""Columns by which a full buffer grows, or places per row that a matrix has to spare at first."""


class AttendingDecoder(Protocol):
    """A decoder that computes attention over the keys and values that it keeps."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return softmax attention of the new tokens' ``query``."""
        ...


def _decoder_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    decoder: AttendingDecoder,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that the model calls. The models here use none of its other settings (``kwargs``)."""
    assert attention_mask is None, "the decoder masks what a token may not see"
    return decoder.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(_ATTENTION, _decoder_attention)


@contextmanager
def attended_by(config: Any) -> Iterator[None]:
    """Let the ``decoder`` that a model of ``config`` gets with its tokens compute attention, inside the block."""
    before = config._attn_implementation
    config._attn_implementation = _ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
