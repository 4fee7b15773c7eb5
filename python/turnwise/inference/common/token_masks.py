"""Masks of allowed tokens as packed bits, on the device that computes the logits."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_masks(masks: Tensor, vocabulary: int) -> Tensor:
    """Return masks ``[r, vocabulary]`` bool of packed ``masks [r, W]`` uint8, as in ``AllowedTokens``.

    Tokens beyond the last byte are not allowed.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    bits = (masks[:, :, None] >> shifts & 1).flatten(1)[:, :vocabulary].bool()
    return torch.nn.functional.pad(bits, (0, vocabulary - bits.shape[1]))
