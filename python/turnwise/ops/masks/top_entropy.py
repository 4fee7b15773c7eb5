"""Keep the tokens with the highest entropy, the forks of a chain of thought."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.ops.common.layout import check_mask, check_mask_values, check_optional, is_number


@torch.no_grad()
def top_entropy_mask(entropy: Tensor, share: float = 0.2, *, mask: Tensor | None = None) -> Tensor:
    """Mark the tokens whose entropy is in the top ``share`` of all trained ones: bool, the shape of ``entropy``.

    These are the tokens at which a chain of thought forks ("Beyond the 80/20 Rule", https://arxiv.org/abs/2506.01939,
    which recommends a share of 0.2; TRL's ``top_entropy_quantile``). The bound is the quantile ``1 - share`` of the
    entropies of the call, linear between neighbours, so pass a whole optimizer step and cut the result into
    micro-batches. Ties with the bound are kept; at least one token is.

    ``entropy`` is ``[B, T]`` or ``[N]`` floats; ``mask`` has its shape. Masked tokens may hold any value and are never
    marked. Multiply per-token advantages by the result: the others then have no policy gradient, but keep their KL term
    and count in every mean, as in the paper. Pass it as ``mask=`` to leave them out altogether. Nothing waits for the
    device. Raises ``ValueError`` or ``TypeError`` naming the argument.

    Example: ``policy_loss(lp, old, advantages[:, None] * top_entropy_mask(entropy, mask=mask), mask=mask)``
    """
    check_optional(mask=mask)
    if not isinstance(entropy, Tensor) or not entropy.is_floating_point():
        got = getattr(entropy, "dtype", type(entropy).__name__)
        raise TypeError(f"entropy: expected a tensor of floats, got {got}")
    if not (is_number(share) and 0 < share <= 1):
        raise ValueError(f"share={share!r}: expected a number in (0, 1]")
    check_mask(mask, entropy, "entropy")
    if mask is not None and mask.is_cpu and not torch.compiler.is_compiling():
        check_mask_values(mask)
    trained = torch.ones_like(entropy, dtype=torch.bool) if mask is None else mask != 0
    if not entropy.numel():
        return trained
    # The tokens at or above an interpolated quantile are those at or above its upper neighbour. The small number keeps
    # a product like 0.8 * 5 from ending above the whole number that it is.
    ordered = torch.where(trained, entropy, torch.inf).flatten().sort().values
    place = ((1 - share) * (trained.sum().double() - 1) - 1e-9).ceil().clamp(min=0).long()
    return trained & (entropy >= ordered.gather(0, place[None]))
