"""Maps TRL's loss settings to one call of :func:`turnwise.ops.policy_loss`, and its metrics to TRL's names.

Legend: ``B`` rows, ``C`` padded completion columns, ``N`` trained tokens, row after row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.ops import GSPO, SAPO, Clip, Reinforce, Variant, aggregate, policy_loss

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
BY_ROW_MEAN = ("grpo", "sapo")
KNOWN = (*CLIPPED, "cispo", "sapo", "vespo")


def unsupported_reason(trainer: Any, inputs: dict[str, Any]) -> str:
    """Return why TRL's own loss must be used; an empty string if turnwise's op computes the same."""
    by_sequence = trainer.importance_sampling_level == "sequence"
    if trainer.loss_type not in KNOWN:
        return f"loss_type={trainer.loss_type!r} is none of {', '.join(KNOWN)}"
    if trainer.importance_sampling_level not in ("token", "sequence"):
        return f"importance_sampling_level={trainer.importance_sampling_level!r} is neither 'token' nor 'sequence'"
    if by_sequence and trainer.loss_type in ("sapo", "vespo"):
        return f"loss_type={trainer.loss_type!r} with one ratio per sequence is no loss of turnwise.ops"
    delta = trainer.args.delta
    if trainer.loss_type in CLIPPED and delta is not None:
        if by_sequence:
            return "delta with one ratio per sequence is no loss of turnwise.ops"
        if delta <= 1 + trainer.epsilon_high:
            return f"delta={delta} is within the clip range, up to {1 + trainer.epsilon_high}"
    if by_sequence and inputs["advantages"].dim() > 1:
        return "advantages per token with one ratio per sequence are no loss of turnwise.ops"
    if trainer._entropy_bonus_enabled:
        return "the loss has an entropy bonus"
    return ""


class LossInputs(NamedTuple):
    """The inputs of one loss. ``mask [B, C]`` marks the ``N`` tokens of the other fields; ``old`` has no gradient.

    ``advantages`` are ``[B, 1]`` or ``[B, C]``, ``weights`` the factors of the policy term ``[B, C]``, or ``None``.
    ``cu_seqlens`` cuts the tokens by row, without the rows that have none: so advantages of ``N`` tokens are never as
    many as the rows, unless each row has one.
    """

    logprobs: Tensor
    old: Tensor
    entropies: Tensor
    mask: Tensor
    advantages: Tensor
    weights: Tensor | None
    cu_seqlens: Tensor

    def packed(self, values_BC: Tensor) -> Tensor:
        return values_BC.expand(self.mask.shape)[self.mask]

    def padded(self, values_N: Tensor) -> Tensor:
        return values_N.new_zeros(self.mask.shape).masked_scatter(self.mask, values_N)


def gather(trainer: Any, inputs: dict[str, Any], mask: Tensor, logprobs: Tensor, entropies: Tensor) -> LossInputs:
    """Collect what the loss reads. The factors of TRL's policy term are: the mask of off-policy rows, the mask of
    tokens with high entropy, the importance weights of the sampler's mismatch."""
    advantages = inputs["advantages"] if inputs["advantages"].dim() > 1 else inputs["advantages"][:, None]
    old = inputs.get("old_per_token_logps")
    old = logprobs.detach() if old is None else old[mask]
    counts = mask.sum(1)
    cu_seqlens = torch.nn.functional.pad(counts[counts > 0].cumsum(0), (1, 0))
    s = LossInputs(logprobs, old, entropies, mask, advantages, None, cu_seqlens)
    factors = []
    if trainer.off_policy_mask_threshold is not None:
        factors.append(
            trainer.get_off_policy_mask(
                advantages=advantages,
                per_token_logps=s.padded(logprobs.detach()),
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", s.padded(old)),
                mask=mask.long(),
                off_policy_threshold=trainer.off_policy_mask_threshold,
            )
        )
    if trainer.top_entropy_quantile < 1.0:
        factors.append(
            trainer.get_high_entropy_mask(s.padded(entropies.detach()), mask, 1 - trainer.top_entropy_quantile)
        )
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction and trainer.loss_type != "vespo":
        factors.append(inputs["importance_sampling_ratio"])
    weights = None
    for factor in factors:
        weights = factor.float() if weights is None else weights * factor
    return s._replace(weights=None if weights is None else weights.expand(mask.shape))


def denominator(trainer: Any, inputs: dict[str, Any], mask: Tensor, training: bool) -> Tensor | float:
    """Return TRL's divisor of the sum over tokens, or of the sum of row means (``BY_ROW_MEAN``)."""
    accumulation = trainer.current_gradient_accumulation_steps if training else 1.0
    match trainer.loss_type:
        case "bnpo":
            return mask.sum().clamp(min=1) * accumulation
        case "dr_grpo":
            return float(len(mask) * trainer.max_completion_length * accumulation)
        case "cispo" | "dapo" | "vespo":
            # Counted over the generation batch of all processes.
            items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
            return items * accumulation / trainer.args.steps_per_generation if training else items
    return float(len(mask) * accumulation)


def fused_loss(trainer: Any, inputs: dict[str, Any], s: LossInputs, training: bool) -> Tensor:
    """Return TRL's loss (0-dim, with a gradient to ``s.logprobs``), and append its metrics."""
    by_sequence = trainer.importance_sampling_level == "sequence"
    loss_type, low, high = trainer.loss_type, trainer.epsilon_low, trainer.epsilon_high
    counts = s.mask.sum(1)
    with torch.no_grad():
        log_ratio = s.logprobs - s.old
        if by_sequence:
            log_ratio = (s.padded(log_ratio).sum(1) / counts.clamp(min=1))[:, None]
        ratio = log_ratio.exp()  # [N], or [B, 1] for one per sequence
    variant: Variant
    advantages, extra = s.advantages, None
    if loss_type in CLIPPED and by_sequence:
        variant = GSPO(low, high)
    elif loss_type in CLIPPED:
        variant = Clip(low, high, dual_clip=trainer.args.delta)
    elif loss_type == "sapo":
        variant = SAPO(trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg)
    elif loss_type == "cispo":
        variant, extra = Reinforce(), ratio.clamp(max=high)
    else:
        variant = Reinforce()
        extra = phi = trainer.get_gamma_weights(
            advantages=advantages,
            log_ratio_per_token=s.padded(log_ratio),
            mask=s.mask.long(),
            importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
            k_pos=trainer.args.vespo_k_pos,
            lambda_pos=trainer.args.vespo_lambda_pos,
            k_neg=trainer.args.vespo_k_neg,
            lambda_neg=trainer.args.vespo_lambda_neg,
        )
    # The factors are at least 0, so they commute with the clip and may scale the advantages.
    if by_sequence and loss_type in CLIPPED:
        # A row's loss times the factors of its tokens, summed, is their mean times the row's loss at every token.
        scaled = advantages[:, 0]
        if s.weights is not None:
            scaled = scaled * (s.weights * s.mask).sum(1) / counts.clamp(min=1)
        scaled = scaled[counts > 0]
    elif s.weights is None and extra is None and advantages.shape[1] == 1:
        scaled = advantages[counts > 0, 0]
    else:
        scaled = s.packed(advantages if s.weights is None else advantages * s.weights)
        if extra is not None:
            scaled = scaled * (s.packed(extra) if extra.dim() > 1 else extra)
    how: dict[str, Any] = {
        "cu_seqlens": s.cu_seqlens,
        "aggregation": "seq-mean-token-mean" if loss_type in BY_ROW_MEAN else "token-mean",
        "normalizer": denominator(trainer, inputs, s.mask, training),
    }
    loss = policy_loss(s.logprobs, s.old, scaled, variant=variant, **how).loss
    # The op's own KL term bounds the estimate, and TRL's doesn't.
    metrics = MetricsLog(trainer, s, "train" if training else "eval")
    if trainer.beta != 0.0:
        d = s.packed(inputs["ref_per_token_logps"]) - s.logprobs
        kl = d.exp() - d - 1
        if trainer.args.use_bias_correction_kl:
            kl = kl * _ratio_with_gradient(s, by_sequence)
        loss = loss + trainer.beta * aggregate(kl, **how)
        metrics.mean("kl", kl.detach())
    metrics.mean("entropy", s.entropies.detach())
    if loss_type in CLIPPED:
        metrics.clip(ratio, low, high)
    elif loss_type == "cispo":
        sign = s.advantages if by_sequence else s.packed(s.advantages)
        metrics.mean("cispo_clip_ratio", ((ratio > high) & (sign > 0)).float())
    elif loss_type == "vespo":
        metrics.mean("vespo/phi_seq_mean", phi)
    return loss


def _ratio_with_gradient(s: LossInputs, by_sequence: bool) -> Tensor:
    """The importance ratio of each token ``[N]``, which for one ratio per sequence is its row's."""
    log_ratio = s.logprobs - s.old
    if by_sequence:
        log_ratio = s.packed((s.padded(log_ratio).sum(1) / s.mask.sum(1).clamp(min=1))[:, None])
    return log_ratio.exp()


class MetricsLog:
    """Appends metrics under TRL's names. Values are ``[N]``, one per token, or ``[B, 1]``, one per sequence."""

    def __init__(self, trainer: Any, s: LossInputs, mode: str) -> None:
        self.accelerator, self.s = trainer.accelerator, s
        self.sink = trainer._metrics[mode]

    def mean(self, name: str, values: Tensor) -> None:
        """The mean over all tokens, or sequences, of all processes."""
        count = torch.tensor(float(values.numel()), device=values.device)
        total, items = self.accelerator.reduce(torch.stack([values.float().sum(), count]), reduction="sum")
        self.sink[name].append((total / items.clamp(min=1.0)).item())

    def rows(self, values: Tensor) -> Tensor:
        """Row means ``[B]`` of all processes; NaN for a row without tokens."""
        mean = values[:, 0] if values.dim() > 1 else self.s.padded(values).sum(1) / self.s.mask.sum(1)
        return self.accelerator.gather(mean)

    def clip(self, ratio: Tensor, low: float, high: float) -> None:
        """The shares of clipped tokens, in TRL's order, as all processes must gather in the same order."""
        advantages = self.s.advantages if ratio.dim() > 1 else self.s.packed(self.s.advantages)
        below = ((ratio < 1 - low) & (advantages < 0)).float()
        above = ((ratio > 1 + high) & (advantages > 0)).float()
        self.mean("clip_ratio/low_mean", below)
        self.mean("clip_ratio/high_mean", above)
        self.mean("clip_ratio/region_mean", below + above)
        lows, highs = self.rows(below), self.rows(above)
        self.sink["clip_ratio/low_min"].append(_without_nan(lows, torch.inf).amin().item())
        self.sink["clip_ratio/high_max"].append(_without_nan(highs, -torch.inf).amax().item())


def _without_nan(values: Tensor, instead: float) -> Tensor:
    """Replace NaN by ``instead``; all NaN stays NaN, as in TRL."""
    missing = values.isnan()
    return values if bool(missing.all()) else values.masked_fill(missing, instead)
