"""Turns results into samples with advantages, and counts the model calls that don't train."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.samples.collect import collect_samples, nodes_of, step_name, step_of
from turnwise.samples.filters import Filters, StepKey
from turnwise.types import CreditAssigner, ExplainedCredit, GenerateResult, Sample, Step

Reason = Callable[[GenerateResult, Step], bool]

REASONS: dict[str, Reason] = {
    "unpaid": lambda result, step: result.rollout.error is None and step.facts.unpaid,
    "failed": lambda result, step: result.rollout.error is not None or step.facts.error is not None,
    "resample": lambda result, step: result.rollout.facts.drop_reason == "resample",
    "over_quota": lambda result, step: result.rollout.facts.drop_reason == "over_quota",
    "reward_error": lambda result, step: result.rollout.facts.dropped is not None,
    "greedy": lambda result, step: result.is_trainable and step.facts.greedy,
    "not_trainable": lambda result, step: not (result.is_trainable and step.trainable),
    "aborted": lambda result, step: step.finish_reason == "abort",
}
"""Tests for the reasons why a model call is not trainable. The first reason that applies is counted."""

Drops = dict[tuple[str, str], int]
"""Number of model calls that don't train, by ``(actor, cause)``."""

Prepare = Callable[[Sequence[Sample]], Mapping[int, str]]
"""Prepares samples for the trainer. Returns the causes for which some can't train, by their place."""


def constrained(samples: Sequence[Sample]) -> dict[int, str]:
    """Leave out samples from some tokens alone, as :data:`Prepare` does where no stage sets what they need."""
    return {place: "constrained" for place, sample in enumerate(samples) if not sample.facts.sampled_from_all}


def training_samples(
    results: Sequence[GenerateResult],
    filters: Filters,
    zero_causes: Mapping[StepKey, str] | None = None,
    prepare: Prepare = constrained,
    earlier: Sequence[Sample] = (),
) -> tuple[list[Sample], Drops]:
    """Return the samples that train, and counts of the model calls that don't, without judges.

    ``prepare`` sets what the trainer needs of samples, and returns the causes for which some can't train, by their
    place. ``earlier`` are samples to use again, see :func:`~turnwise.samples.collect.collect_samples`. Raises
    ``ValueError`` for a sample without an advantage.
    """
    samples = collect_samples(results, earlier)
    for sample in samples:
        if sample.advantage is None:
            raise ValueError(
                f"{step_name(sample)} has no advantage: "
                "call assign_credit(results) before build_training_batch(results)"
            )
    causes = filters.causes(samples, zero_causes)
    rows = [row for row, cause in enumerate(causes) if cause is None]
    for place, cause in prepare([samples[row] for row in rows]).items():
        causes[rows[place]] = cause
    dropped = _count_excluded(results, samples)
    dropped.update((sample.actor, cause) for sample, cause in zip(samples, causes, strict=True) if cause)
    return [sample for sample, cause in zip(samples, causes, strict=True) if cause is None], dict(dropped)


def _count_excluded(results: Sequence[GenerateResult], samples: Sequence[Sample]) -> Counter[tuple[str, str]]:
    """Count the model calls that are not trainable, by actor and reason, without judges."""
    nodes = nodes_of(results)
    calls = sum([step.actor_id is not None for node in nodes for step in node.rollout.steps])
    if calls == len(samples):
        return Counter()
    trainable = {(sample.rollout_id, sample.step_index) for sample in samples}
    return Counter(
        (step.actor_id, next((name for name, holds in REASONS.items() if holds(node, step)), "no_tokens"))
        for node in nodes
        for index, step in enumerate(node.rollout.steps)
        if step.actor_id is not None and (node.rollout.id, index) not in trainable
    )


def advantages_of(
    samples: Sequence[Sample], credit: CreditAssigner | None, results: Sequence[GenerateResult] = ()
) -> np.ndarray:
    """Return the credit rule's advantages ``[B]``, checked and times the samples' weights; without a rule, the
    rewards ``[B]`` float32.

    A rule that has only ``compute`` gets ``results``. Raises ``ValueError`` for missing or non-finite advantages.
    """
    if credit is None or not samples:
        return np.array([sample.reward for sample in samples], dtype=np.float32)
    if getattr(type(credit), "compute_columns", None) in (None, CreditAssigner.compute_columns):
        table = credit.compute(results)
        keys = [(sample.rollout_id, sample.step_index) for sample in samples]
        if missing := [key for key in keys if key not in table]:
            raise ValueError(f"{type(credit).__name__}.compute gave no advantage for (rollout id, step) {missing[0]!r}")
        advantages = np.array([table[key] for key in keys], dtype=np.float32)
    else:
        advantages = np.asarray(credit.compute_columns(samples))
    if advantages.shape != (len(samples),) or not np.isfinite(advantages).all():
        raise ValueError(
            f"{type(credit).__name__}.compute_columns gave shape {advantages.shape}, all finite: "
            f"{bool(np.isfinite(advantages).all())}; expected {len(samples)} finite advantages"
        )
    if any(sample.weight != 1 for sample in samples):
        advantages = advantages * np.array([sample.weight for sample in samples], dtype=np.float32)
    return advantages


def penalize(samples: Sequence[Sample], penalties: Sequence[float]) -> None:
    """Subtract each penalty from its sample's reward, and an actor's sum of penalties from its trajectory reward."""
    if len(penalties) != len(samples) or not np.isfinite(penalties).all():
        raise ValueError(f"penalties={penalties!r}: expected {len(samples)} finite numbers, one per sample")
    totals: defaultdict[tuple[Hashable, str], float] = defaultdict(float)
    for sample, penalty in zip(samples, penalties, strict=True):
        totals[sample.trajectory_key, sample.actor] += float(penalty)
        sample.reward -= float(penalty)
    for sample in samples:
        sample.trajectory_reward -= totals[sample.trajectory_key, sample.actor]


def set_advantages(
    results: Sequence[GenerateResult], samples: Sequence[Sample], credit: CreditAssigner | None
) -> dict[StepKey, str]:
    """Write the advantages into the steps of ``samples``, nested episodes included.

    Return the causes of advantages of 0; empty if the rule has no ``zero_causes``.
    """
    advantages = advantages_of(samples, credit, results)
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        step_of(sample).advantage = advantage
    zeros = np.flatnonzero(advantages == 0).tolist()
    if not isinstance(credit, ExplainedCredit) or not zeros:
        return {}
    keys = [(samples[row].rollout_id, samples[row].step_index) for row in zeros]
    return dict(zip(keys, credit.zero_causes(samples, zeros), strict=True))


def state_of(credit: CreditAssigner | None) -> dict[str, Any] | None:
    """Return ``credit.state_dict()``, ``{}`` if the rule has no such method, ``None`` without a rule."""
    return None if credit is None else getattr(credit, "state_dict", dict)()
