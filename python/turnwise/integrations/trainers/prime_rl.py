"""Policy losses of turnwise as the custom loss of prime-rl (https://github.com/PrimeIntellect-ai/prime-rl).

The tests ran it in prime-rl 0.8.0, commit 559b44772e471d1538537b8805cc77f3824a5e64, which PyPI does not have.

prime-rl calls the loss once per sequence, adds the results up and divides by the tokens of the whole step. So a loss
here is a sum over tokens. The old policy is the sampler. Name it in prime-rl's configuration by its import path:

    [trainer.loss]
    type = "custom"
    import_path = "turnwise.integrations.trainers.prime_rl.policy_loss"
    kwargs = { loss = "cispo", options = { high = 4.0 } }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from turnwise import ops
from turnwise.integrations.trainers import import_from
from turnwise.utils.registry import build_with_options, did_you_mean


def _dppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    moved = logprobs.exp() - old_logprobs.exp()
    too_far = torch.where(advantages > 0, moved > high, moved < -low)
    return -(advantages * (logprobs - old_logprobs).exp()).masked_fill(too_far, 0.0)


def dppo(low: float = 0.2, high: float = 0.2) -> ops.Custom:
    """``-A * ratio``, and 0 where the probability has moved too far: ``p - q > high`` for ``A > 0``, else ``q - p >
    low`` (DPPO with binary total variation, https://arxiv.org/abs/2602.04879). prime-rl's default loss."""
    for name, value in (("low", low), ("high", high)):
        if not value >= 0:
            raise ValueError(f"options.{name}={value!r}: expected a number >= 0")
    return ops.Custom(partial(_dppo, low=low, high=high))


LOSSES: dict[str, Callable[..., ops.Variant]] = {
    "dppo": dppo,
    "ppo": ops.Clip,
    "gspo": ops.GSPO,
    "cispo": ops.CISPO,
    "reinforce": ops.Reinforce,
    "sapo": ops.SAPO,
    "gmpo": ops.GMPO,
}
"""By name; Clip-Cov and KL-Cov are not here, as they compare a token with those of other sequences."""


def policy_loss(
    inputs: Any, *, loss: str = "dppo", options: Mapping[str, Any] | None = None, kl_tau: float = 1e-3
) -> Any:
    """Return prime-rl's ``LossOutputs`` for one sequence, its ``LossInputs``.

    ``loss`` is a name in :data:`LOSSES`, built with ``options``. Each token adds ``kl_tau * (logprob - sampler's)**2``,
    the KL term of prime-rl's own losses. Token weights (``inputs.loss_weights``) multiply both. The metrics are those
    of ``turnwise.ops.policy_loss``, with token means of the sequence.

    Raises ``ValueError`` for an unknown loss or option, and for weights that differ within a sequence if the loss has
    one ratio per sequence.
    """
    host = import_from("prime_rl.trainer.rl.loss", "prime-rl", "see https://github.com/PrimeIntellect-ai/prime-rl")
    value, metrics = sequence_loss(inputs, loss, options or {}, kl_tau)
    return host.LossOutputs(loss=value, metrics=metrics)


def sequence_loss(
    inputs: Any, loss: str, options: Mapping[str, Any], kl_tau: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss (0-dim) and the metrics of one sequence. The tensors of ``inputs`` are ``[T]``."""
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r}: {did_you_mean(loss, LOSSES)}")
    variant = build_with_options(LOSSES[loss], options, "options")
    mask, weights = inputs.loss_mask, inputs.loss_weights
    distinct = [1.0] if weights is None else weights[mask].unique().tolist() or [1.0]
    if len(distinct) > 1 and loss in ("gspo", "gmpo"):
        raise ValueError(f"loss_weights: expected one weight for all tokens, as loss={loss!r} has one ratio for them")

    def compute(tokens: Tensor) -> ops.PolicyLoss:
        return ops.policy_loss(
            inputs.trainer_logprobs[None],
            inputs.inference_logprobs[None],
            inputs.advantages[None],
            mask=tokens[None],
            variant=variant,
            kl=ops.KL("k2", coef=2 * kl_tau),  # k2 is half the square
            ref_logprobs=inputs.inference_logprobs[None],
            normalizer=1.0,
        )

    # Weights multiply the loss of their tokens, so each distinct weight is a part of its own.
    parts = [compute(mask if len(distinct) == 1 else mask & (weights == weight)) for weight in distinct]
    total = torch.stack([weight * part.loss for weight, part in zip(distinct, parts, strict=True)]).sum()
    with torch.no_grad():
        metrics = (parts[0] if len(parts) == 1 else compute(mask)).metrics
    return total, dict(metrics)
