"""Compute the log-probabilities in verl's FSDP engine with ``turnwise.ops.logprob``.

verl imports this module if ``actor_rollout_ref.model.external_lib=turnwise.integrations.verl.logprobs``. The import
replaces the function by which the engine takes log-probabilities from logits. verl's own function loops over the tokens
in Python where flash-attn is missing. The engine does not call it with ``use_fused_kernels=True``.
"""

from __future__ import annotations

from torch import Tensor
from verl.workers.engine.fsdp import transformer_impl

from turnwise.ops import logprob


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return the log-probabilities of ``labels [...]`` under ``logits [..., V]``, float32.

    With ``inplace_backward`` the backward writes the gradient over the logits, as verl's does with flash-attn.
    """
    return logprob(logits, labels, inplace_backward=inplace_backward)  # type: ignore[return-value]


if not hasattr(transformer_impl, "logprobs_from_logits"):
    raise ImportError(
        "turnwise.integrations.verl.logprobs: verl.workers.engine.fsdp.transformer_impl has no logprobs_from_logits; "
        "expected verl 0.9. Remove actor_rollout_ref.model.external_lib"
    )
transformer_impl.logprobs_from_logits = logprobs_from_logits
