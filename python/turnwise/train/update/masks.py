"""Chooses the tokens of a minibatch that train, by the section ``loss.masks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from turnwise.ops import Rejection, off_policy_mask, rejection_mask, second_moment_mask, top_entropy_mask
from turnwise.ops.masks import ESTIMATORS, LEVELS
from turnwise.train.config.optimization import MasksConfig
from turnwise.train.model.micro_batch import MicroBatch, joined_cu_seqlens
from turnwise.train.model.policy import Policy

CRITERIA = {f"{level}-{estimator}": (level, estimator) for level in LEVELS for estimator in ESTIMATORS}
"""The names that ``loss.masks.rejection`` takes, with the fields of :class:`turnwise.ops.Rejection`."""


@dataclass(frozen=True, slots=True)
class MaskedMicroBatch:
    """A micro-batch whose ``mask_N`` lacks the rejected tokens; of the others, ``kept_N`` have a policy gradient.

    ``dropped`` marks the tokens ``[N]`` that each mask drops, by its key in ``loss.masks``. Without masks it is empty,
    and ``kept_N`` is ``None``.
    """

    micro: MicroBatch
    kept_N: Tensor | None = None
    dropped: Mapping[str, Tensor] = field(default_factory=dict)


class TokenMasks:
    """Applies the masks of ``config`` to a whole minibatch, so any cut into micro-batches gives the same gradient.

    Raises ``ValueError`` naming the invalid config key.
    """

    def __init__(self, config: MasksConfig) -> None:
        self.config = config
        self.criteria = [_criterion(name, bounds) for name, bounds in config.rejection.items()]

    @property
    def reads_policy(self) -> bool:
        """True if a mask reads the current policy, which takes one more forward pass."""
        by_policy = self.config.off_policy, self.config.second_moment, self.config.top_entropy
        return any(value is not None for value in by_policy)

    @torch.no_grad()
    def apply(
        self, policy: Policy, micros: Sequence[MicroBatch], old_logprobs: Sequence[Tensor]
    ) -> list[MaskedMicroBatch]:
        """Return the micro-batches of a minibatch with their masks.

        Rejection comes first; the other masks see the tokens that it leaves.
        """
        if not (self.criteria or self.reads_policy):
            return [MaskedMicroBatch(micro) for micro in micros]
        trained_N = torch.cat([micro.mask_N for micro in micros]) != 0
        cu_seqlens = joined_cu_seqlens(micros)
        mask_N, dropped = trained_N, {}
        if self.criteria:
            olds_N, rollout_N = torch.cat(list(old_logprobs)), torch.cat([micro.rollout_logprobs_N for micro in micros])
            mask_N = rejection_mask(olds_N, rollout_N, self.criteria, mask=trained_N, cu_seqlens=cu_seqlens).keep
            dropped["rejection"] = trained_N & ~mask_N
        kept_N = mask_N
        for name, marked_N in self._by_policy(policy, micros, mask_N, cu_seqlens).items():
            dropped[name] = mask_N & ~marked_N
            kept_N = kept_N & marked_N
        # Cut the masks as the minibatch is cut.
        counts = [len(micro.mask_N) for micro in micros]
        masks, kepts = mask_N.split(counts), kept_N.split(counts)
        cut = {name: tokens_N.split(counts) for name, tokens_N in dropped.items()}
        return [
            MaskedMicroBatch(
                replace(micro, mask_N=masks[index]), kepts[index], {name: parts[index] for name, parts in cut.items()}
            )
            for index, micro in enumerate(micros)
        ]

    def _by_policy(
        self, policy: Policy, micros: Sequence[MicroBatch], mask_N: Tensor, cu_seqlens: Tensor
    ) -> dict[str, Tensor]:
        """Return the tokens ``[N]`` that each mask keeps which reads the current policy."""
        if not self.reads_policy:
            return {}
        config, kept = self.config, {}
        length = 1 + max((int(micro.token_N.max()) for micro in micros if len(micro.token_N)), default=0)
        read = policy.over_stream(length, micros, lambda micro: torch.stack(policy.logprobs(micro, entropy=True), -1))
        logprobs_N, entropies_N = read[torch.cat([micro.token_N for micro in micros])].unbind(-1)
        rollout_N = torch.cat([micro.rollout_logprobs_N for micro in micros])
        layout = {"mask": mask_N, "cu_seqlens": cu_seqlens}
        if config.off_policy is not None:
            advantages_N = torch.cat([micro.advantages_N for micro in micros])
            kept["off_policy"] = off_policy_mask(logprobs_N, rollout_N, advantages_N, config.off_policy, **layout)
        if config.second_moment is not None:
            kept["second_moment"] = second_moment_mask(logprobs_N, rollout_N, config.second_moment, **layout)
        if config.top_entropy is not None:
            kept["top_entropy"] = top_entropy_mask(entropies_N, config.top_entropy, mask=mask_N)
        return kept


def _criterion(name: str, bounds: float | tuple[float, float]) -> Rejection:
    """Build the criterion ``name``; ``bounds`` are its largest value, or its smallest and largest."""
    key = f"config key 'loss.masks.rejection.{name}'"
    level_and_estimator = CRITERIA.get(name.replace("_", "-"))  # overrides have underscores
    if level_and_estimator is None:
        raise ValueError(f"unknown {key}: expected one of {', '.join(CRITERIA)}")
    low, high = bounds if isinstance(bounds, tuple) else (None, bounds)
    try:
        return Rejection(*level_and_estimator, high=high, low=low)
    except ValueError as error:
        raise ValueError(f"{key} = {bounds!r}: {error}") from error
