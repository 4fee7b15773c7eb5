"""Check the log-probabilities of two policies over the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.ops.common.layout import (
    FLOATS,
    check_cu_seqlens_values,
    check_layout,
    check_mask,
    check_mask_values,
    check_optional,
)


def check_pair(name: str, logprobs: Any, rollout_logprobs: Any, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise ``ValueError`` or ``TypeError`` for the first wrong argument; ``name`` is that of ``logprobs``."""
    check_optional(mask=mask, cu_seqlens=cu_seqlens)
    for key, stream in ((name, logprobs), ("rollout_logprobs", rollout_logprobs)):
        if not isinstance(stream, Tensor) or stream.dtype not in FLOATS:
            got = getattr(stream, "dtype", type(stream).__name__)
            raise TypeError(f"{key}: expected a tensor of floats, got {got}")
        if stream.shape != logprobs.shape:
            raise ValueError(f"{key} has shape {tuple(stream.shape)}: expected {tuple(logprobs.shape)}, as {name}")
        if stream.device != logprobs.device:
            raise ValueError(f"{key} is on {stream.device}: expected {logprobs.device}, as {name}")
    check_layout(name, logprobs, cu_seqlens)
    check_mask(mask, logprobs, name)
    if logprobs.is_cpu and not torch.compiler.is_compiling():
        if cu_seqlens is not None:
            check_cu_seqlens_values(cu_seqlens, logprobs.shape[0])
        if mask is not None:
            check_mask_values(mask)
