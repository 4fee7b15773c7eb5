"""Chooses the tokens of a minibatch that train, by the section ``loss.masks``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turnwise.ops import Rejection, off_policy_mask, rejection_mask, second_moment_mask, top_entropy_mask
from turnwise.ops.masks import ESTIMATORS, LEVELS
from turnwise.settings.section import RunFacts
from turnwise.train.config.optimization import LossConfig, MasksConfig
from turnwise.train.model.micro_batch import MicroBatch, joined_cu_seqlens
from turnwise.train.model.policy import Policy
from turnwise.train.terms.term import Part, Term
from turnwise.types.passes import NOTHING
from turnwise.utils.values import problem

CRITERIA = {f"{level}-{estimator}": (level, estimator) for level in LEVELS for estimator in ESTIMATORS}
"""The names that ``loss.masks.rejection`` takes, with the fields of :class:`turnwise.ops.Rejection`."""


class Masks(Term):
    """Applies ``loss.masks`` to a whole minibatch, so any cut into micro-batches gives the same gradient."""

    name = "masks"
    effect = "masks"
    needs = NOTHING  # its passes are its own
    before = ("policy_loss", "critic")  # whose sums count the tokens that are left

    def is_on(self, config: LossConfig) -> bool:
        return config.masks != MasksConfig()

    def problems(self, run: RunFacts) -> Iterator[str]:
        if run.config.loss.masks.rejection and run.config.update.old_logprobs != "recompute":
            yield problem(
                "loss.masks.rejection",
                "it compares the trainer's log-probs with the sampler's, so it needs update.old_logprobs = 'recompute'",
            )

    def unserved(self, config: LossConfig) -> Iterator[tuple[str, Any, str]]:
        if masks := config.masks.model_dump(exclude_defaults=True):
            yield "loss.masks", masks, "its losses have no masks: expected no setting"

    def configure(self, config: LossConfig, actors: Sequence[str]) -> None:
        super().configure(config, actors)
        self.criteria = [_criterion(name, bounds) for name, bounds in config.masks.rejection.items()]

    @torch.no_grad()
    def minibatch(self, policy: Policy | None, parts: list[Part]) -> None:
        """Mask the parts. Rejection comes first; the other masks see the tokens that it leaves."""
        micros = [part.micro for part in parts]
        trained_N = torch.cat([micro.mask_N for micro in micros]) != 0
        cu_seqlens = joined_cu_seqlens(micros)
        mask_N, dropped = trained_N, {}
        if self.criteria:
            olds_N = torch.cat([part.old_logprobs_N for part in parts])
            rollout_N = torch.cat([micro.rollout_logprobs_N for micro in micros])
            mask_N = rejection_mask(olds_N, rollout_N, self.criteria, mask=trained_N, cu_seqlens=cu_seqlens).keep
            dropped["rejection"] = trained_N & ~mask_N
        kept_N = mask_N
        for name, marked_N in self._by_policy(policy, micros, mask_N, cu_seqlens).items():
            dropped[name] = mask_N & ~marked_N
            kept_N = kept_N & marked_N
        # Cut the masks as the minibatch is cut.
        counts = [len(micro.mask_N) for micro in micros]
        cut = {name: tokens_N.split(counts) for name, tokens_N in dropped.items()}
        columns = zip(parts, mask_N.split(counts), kept_N.split(counts), strict=True)
        for index, (part, own_mask_N, own_kept_N) in enumerate(columns):
            part.micro, part.kept_N = replace(part.micro, mask_N=own_mask_N), own_kept_N
            part.dropped = {name: tokens[index] for name, tokens in cut.items()}

    def _by_policy(
        self, policy: Policy | None, micros: Sequence[MicroBatch], mask_N: Tensor, cu_seqlens: Tensor
    ) -> dict[str, Tensor]:
        """Return the tokens ``[N]`` that each mask keeps which reads the current policy, in one more forward pass."""
        config, kept = self.config.masks, dict[str, Tensor]()
        if policy is None or all(
            each is None for each in (config.off_policy, config.second_moment, config.top_entropy)
        ):
            return {}
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
    key = f"loss.masks.rejection.{name}"
    level_and_estimator = CRITERIA.get(name.replace("_", "-"))  # overrides have underscores
    if level_and_estimator is None:
        known = ", ".join(CRITERIA)
        raise ValueError(f"unknown {problem(key, f'expected one of {known}')}")
    low, high = bounds if isinstance(bounds, tuple) else (None, bounds)
    try:
        return Rejection(*level_and_estimator, high=high, low=low)
    except ValueError as error:
        raise ValueError(problem(key, error, bounds)) from error
