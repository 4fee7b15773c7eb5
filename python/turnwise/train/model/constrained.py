"""Log-probabilities over the tokens that a grammar allows: the distribution from which constrained tokens are drawn.

``log_softmax(logits / temperature)`` over the allowed tokens alone, so a token without an alternative has exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from turnwise.inference.common.token_masks import unpack_masks

MOST_LOGITS = 1 << 24
"""Logits that a chunk of tokens may have at a time: 64 MiB in float32."""


def constrained_logprob(
    logits: Callable[[Tensor], Tensor],
    index_n: Tensor,
    targets_n: Tensor,
    temperature_n: Tensor,
    masks_UW: Tensor,
    mask_index_n: Tensor,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs ``[n]``, and with ``entropy`` entropies ``[n]``, of the constrained distributions.

    ``logits(index)`` gives the logits ``[m, V]`` of tokens ``index [m]``. Chunks of tokens are computed again in the
    backward pass, so that only one chunk of logits is held. A target that its mask doesn't allow gets ``-inf``.
    """

    def read(index: Tensor, targets: Tensor, temperature: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        raw = logits(index)
        raw = raw if raw.dtype == torch.float64 else raw.float()
        allowed = unpack_masks(masks_UW[rows], raw.shape[1])
        scaled = (raw / temperature[:, None].to(raw.dtype)).masked_fill(~allowed, -torch.inf)
        logprobs = torch.log_softmax(scaled, dim=-1)
        finite = logprobs.masked_fill(~allowed, 0.0)
        entropies = -(finite.exp().masked_fill(~allowed, 0.0) * finite).sum(-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropies

    size = max(1, MOST_LOGITS // (8 * masks_UW.shape[1]))
    chunks = zip(*(column.split(size) for column in (index_n, targets_n, temperature_n, mask_index_n)), strict=True)
    parts = [checkpoint(read, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    logprobs, entropies = (torch.cat(each) for each in zip(*parts, strict=True))
    return logprobs, entropies if entropy else None
