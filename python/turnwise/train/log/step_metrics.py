"""Summarizes one training step as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from turnwise.arena import Episode
from turnwise.types import GenerateResult, TrainingBatch


def summarize(
    batch: TrainingBatch,
    results: Sequence[GenerateResult],
    metric: str | None,
    episodes: Mapping[str, Episode] | None = None,
) -> dict[str, float]:
    """Return the metrics of one step: the batch's own, rewards, success, and counts of samples.

    Rewards are means over steps, overall and by actor, with every branch of a tree. ``success`` is the mean of
    ``metric`` while sampling. It is named ``success_selected`` if a tree in ``episodes`` continues the branches with
    the highest rewards: then it measures the best of N at each node, not the policy itself. The counts are the samples
    that train, overall and by actor, and those that were dropped, by cause.
    """
    # Rewards of all steps, overall and by actor.
    trained = Counter(batch.actors[index] for index in batch.actor_index)
    steps = [step for top in results for result in top.walk() for step in result.rollout.steps]
    rewards: dict[str, list[float]] = {}
    for step in steps:
        if step.reward is not None and step.actor_id is not None:
            rewards.setdefault(step.actor_id, []).append(step.reward)
    summary = {f"step_reward/{actor}": float(np.mean(values)) for actor, values in rewards.items()}
    if rewards:
        summary["reward"] = float(np.mean([value for values in rewards.values() for value in values]))
    # Success, under another name if a tree selected the branches by reward.
    if f"metric/{metric}" in batch.metrics:
        measured = [node.rollout for top in results for node in top.walk() if metric in node.rollout.metrics]
        samplers = [getattr((episodes or {}).get(rollout.episode_type), "sampler", None) for rollout in measured]
        selected = any(sampler is not None and sampler.favours for sampler in samplers)
        summary["success_selected" if selected else "success"] = batch.metrics[f"metric/{metric}"]
    # Counts; an actor whose samples were all dropped counts as 0.
    summary |= {f"dropped/{cause}": count for cause, count in batch.dropped.items()}
    actors = dict.fromkeys([*batch.actors, *(actor for actor, cause in batch.drops if cause != "not_trainable")])
    summary |= {f"samples/{actor}": trained.get(actor, 0) for actor in actors}
    return {**batch.metrics, **summary, "samples": len(batch)}


def staleness(results: Sequence[GenerateResult], versions: Mapping[str, int]) -> dict[str, float]:
    """Return the mean and maximum number of versions that the sampled tokens are behind ``versions[policy]``."""
    runs = [
        (count, versions[step.policy] - version)
        for top in results
        for result in top.walk()
        for step in result.rollout.steps
        if step.policy in versions
        for count, version in step.policy_versions
    ]
    tokens = sum(count for count, _ in runs)
    if not tokens:
        return {}
    mean = sum(count * behind for count, behind in runs) / tokens
    return {"staleness": mean, "staleness_max": max(behind for _, behind in runs)}
