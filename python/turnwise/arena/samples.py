"""From results to samples, and from samples to the packed batch that a trainer takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from turnwise.samples import collect_samples
from turnwise.types import GenerateResult, Sample, Step, TrainingBatch

Reason = Callable[[GenerateResult, Step], bool]

REASONS: dict[str, Reason] = {
    "failed": lambda result, step: result.rollout.error is not None or "error" in step.info,
    "reward_error": lambda result, step: "dropped" in result.rollout.meta,
    "untrainable": lambda result, step: not (result.is_trainable and step.trainable),
    "aborted": lambda result, step: step.finish_reason == "abort",
}
"""Why :func:`turnwise.samples.collect_samples` leaves a model call out; the first that holds is counted."""


def gather(results: Sequence[GenerateResult], *, drop_truncated: bool) -> tuple[list[Sample], dict[str, int]]:
    """The rows that credit rules see, and how many model calls were left out, by reason.

    Failed and (if asked) truncated ones are gone before credit, so they enter no statistics. Judges count nowhere.
    """
    samples = collect_samples(results)
    places = {(sample.trajectory, sample.step_index) for sample in samples}
    dropped: Counter[str] = Counter()
    for top in results:
        for result in top.walk():
            for index, step in enumerate(result.rollout.steps):
                if step.actor_id is not None and (result.rollout.id, index) not in places:
                    dropped[next((name for name, holds in REASONS.items() if holds(result, step)), "no_tokens")] += 1
    if drop_truncated:
        whole = [sample for sample in samples if sample.finish_reason != "length"]
        dropped["truncated"] = len(samples) - len(whole)
        samples = whole
    return samples, {name: count for name, count in dropped.items() if count}


def steps_by_place(results: Sequence[GenerateResult]) -> dict[tuple[str, int], Step]:
    """``(rollout id, step index) -> step``, nested episodes included."""
    return {
        (result.rollout.id, index): step
        for top in results
        for result in top.walk()
        for index, step in enumerate(result.rollout.steps)
    }


def pack(samples: Sequence[Sample], dropped: dict[str, int], metrics: dict[str, float]) -> TrainingBatch:
    """Samples as one packed token stream, see :class:`TrainingBatch`. No samples make an empty batch.

    All completion tokens train, the stop token included, unless a sample brings its own ``loss_mask [C]``.
    """
    actors = list(dict.fromkeys(sample.actor for sample in samples))
    policies = list(dict.fromkeys(sample.policy for sample in samples))
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    lengths = [0]
    for sample in samples:
        completion = len(sample.completion_token_ids)
        row_mask = [1] * completion if sample.loss_mask is None else list(sample.loss_mask)
        if not len(row_mask) == len(sample.rollout_logprobs) == completion:
            raise ValueError(
                f"sample {sample.step_index} of {sample.trajectory!r}: expected equal lengths, got {completion} "
                f"completion tokens, {len(sample.rollout_logprobs)} log-probabilities, loss_mask of {len(row_mask)}"
            )
        prompt = len(sample.prompt_token_ids)
        tokens += [*sample.prompt_token_ids, *sample.completion_token_ids]
        mask += [0] * prompt + row_mask
        logprobs += [0.0] * prompt + list(sample.rollout_logprobs)
        lengths.append(prompt + completion)
    return TrainingBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        cu_seqlens=np.cumsum(np.array(lengths, dtype=np.int64)),
        loss_mask=np.array(mask, dtype=np.uint8),
        rollout_logprobs=np.array(logprobs, dtype=np.float32),
        advantages=np.array([sample.advantage for sample in samples], dtype=np.float32),
        rewards=np.array([sample.reward for sample in samples], dtype=np.float32),
        temperatures=np.array([sample.temperature for sample in samples], dtype=np.float32),
        actor_index=np.array([actors.index(sample.actor) for sample in samples], dtype=np.int64),
        policy_index=np.array([policies.index(sample.policy) for sample in samples], dtype=np.int64),
        min_version=np.array([min(v for _, v in sample.policy_versions) for sample in samples], dtype=np.int64),
        actors=actors,
        policies=policies,
        dropped=dropped,
        metrics=metrics,
    )


def select(batch: TrainingBatch, rows: np.ndarray) -> TrainingBatch:
    """The batch of ``rows`` (indices ``[b]``) alone; what it says of the whole step stays."""
    starts, ends = batch.cu_seqlens[:-1][rows], batch.cu_seqlens[1:][rows]
    tokens = np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)] or [np.empty(0, np.int64)])
    return replace(
        batch,
        cu_seqlens=np.concatenate([[0], np.cumsum(ends - starts)]),
        **{name: getattr(batch, name)[tokens] for name in ("token_ids", "loss_mask", "rollout_logprobs")},
        **{
            name: getattr(batch, name)[rows]
            for name in ("advantages", "rewards", "temperatures", "actor_index", "policy_index", "min_version")
        },
    )


def drop_stale(batch: TrainingBatch, oldest: Mapping[str, int]) -> TrainingBatch:
    """Leave out the rows with a token from before version ``oldest[policy]``, counted as ``dropped["stale"]``."""
    bounds = np.array([oldest[name] for name in batch.policies], dtype=np.int64)
    fresh = batch.min_version >= bounds[batch.policy_index] if len(batch) else np.empty(0, dtype=bool)
    if fresh.all():
        return batch
    kept = select(batch, np.flatnonzero(fresh))
    kept.dropped = {**batch.dropped, "stale": int((~fresh).sum())}
    return kept


def describe(results: Sequence[GenerateResult]) -> dict[str, float]:
    """Numbers of a whole step, nested episodes included; means leave failed episodes out.

    ``episodes``, ``episodes/failed``, ``episodes/retried``, ``sampled_tokens`` (all of them, trained on or not),
    ``reward/<actor>``, ``metric/<name>``, ``completion_tokens/<actor>``, ``truncated/<actor>``.
    """
    everything = [result for top in results for result in top.walk()]
    rollouts = [result.rollout for result in everything]
    steps = [step for rollout in rollouts for step in rollout.steps]
    means: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.error is not None:
            continue
        for actor, reward in rollout.rewards.items():
            means[f"reward/{actor}"].append(reward)
        for name, value in rollout.metrics.items():
            means[f"metric/{name}"].append(value)
    for step in steps:
        if step.actor_id is not None:
            means[f"completion_tokens/{step.actor_id}"].append(len(step.completion_token_ids))
            means[f"truncated/{step.actor_id}"].append(step.finish_reason == "length")
    counts: dict[str, float] = {
        "episodes": len(rollouts),
        "episodes/failed": sum(rollout.error is not None for rollout in rollouts),
        "episodes/retried": sum(rollout.meta.get("attempt", 0) for rollout in rollouts),
        "sampled_tokens": sum(len(step.completion_token_ids) for step in steps)
        + sum(rollout.meta.get("lost_tokens", 0) for rollout in rollouts),
    }
    return counts | {name: float(np.mean(values)) for name, values in means.items()}
