"""From results to samples, and from samples to the packed batch that a trainer takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnwise._C import pack_tokens
from turnwise.arena.filters import Filters
from turnwise.samples import collect_samples
from turnwise.types import CreditAssigner, GenerateResult, PolicyVersions, Sample, Step, TrainingBatch

Reason = Callable[[GenerateResult, Step], bool]

REASONS: dict[str, Reason] = {
    "failed": lambda result, step: result.rollout.error is not None or "error" in step.info,
    "zero_advantage": lambda result, step: result.rollout.meta.get("left_out") == "zero_advantage",
    "surplus": lambda result, step: result.rollout.meta.get("left_out") == "surplus",
    "reward_error": lambda result, step: "dropped" in result.rollout.meta,
    "untrainable": lambda result, step: not (result.is_trainable and step.trainable),
    "aborted": lambda result, step: step.finish_reason == "abort",
}
"""Why :func:`turnwise.samples.collect_samples` leaves a model call out; the first that holds is counted."""


def gather(results: Sequence[GenerateResult], filters: Filters) -> tuple[list[Sample], dict[str, int]]:
    """The rows that credit rules see, and how many model calls were left out, by reason.

    Failed and (if asked) truncated ones are gone before credit, so they enter no statistics. Judges count nowhere.
    """
    samples = collect_samples(results)
    nodes = [result for top in results for result in top.walk()]
    dropped: Counter[str] = Counter()
    if len(samples) < sum([len(result.rollout.steps) for result in nodes]):  # else there is nothing to look for
        places = {(sample.trajectory, sample.step_index) for sample in samples}
        for result in nodes:
            for index, step in enumerate(result.rollout.steps):
                if step.actor_id is not None and (result.rollout.id, index) not in places:
                    dropped[next((name for name, holds in REASONS.items() if holds(result, step)), "no_tokens")] += 1
    samples, filtered = filters.before_credit(samples)
    return samples, dict(dropped + Counter(filtered))


def advantages_of(
    samples: Sequence[Sample], credit: CreditAssigner | None, results: Sequence[GenerateResult] = ()
) -> np.ndarray:
    """What the rule says, ``[B]``, checked; without a rule the rewards. Raises ``ValueError`` for a wrong answer.

    A rule of one's own that has ``compute`` alone is asked for that of ``results``.
    """
    if credit is None or not samples:
        return np.array([sample.reward for sample in samples], dtype=np.float32)
    if getattr(type(credit), "compute_columns", None) in (None, CreditAssigner.compute_columns):
        table = credit.compute(results)
        places = [(sample.trajectory, sample.step_index) for sample in samples]
        if missing := [place for place in places if place not in table]:
            raise ValueError(f"{type(credit).__name__}.compute gave no advantage for (rollout id, step) {missing[0]!r}")
        advantages = np.array([table[place] for place in places], dtype=np.float32)
    else:
        advantages = np.asarray(credit.compute_columns(samples))
    if advantages.shape != (len(samples),) or not np.isfinite(advantages).all():
        raise ValueError(
            f"{type(credit).__name__}.compute_columns gave shape {advantages.shape}, all finite: "
            f"{bool(np.isfinite(advantages).all())}; expected {len(samples)} finite advantages"
        )
    return advantages


def check_credited(samples: Sequence[Sample]) -> None:
    """Raise ``ValueError`` for a sample without an advantage."""
    for sample in samples:
        if sample.advantage is None:
            raise ValueError(
                f"{_name(sample)} has no advantage: call assign_credit(results) before build_training_batch(results)"
            )


def penalize(samples: Sequence[Sample], penalties: Sequence[float]) -> None:
    """Take each sample's penalty from its reward, and their sum over its actor's samples from the trajectory's."""
    if len(penalties) != len(samples) or not np.isfinite(penalties).all():
        raise ValueError(f"penalties={penalties!r}: expected {len(samples)} finite numbers, one per sample")
    totals: defaultdict[tuple[Hashable, str], float] = defaultdict(float)
    for sample, penalty in zip(samples, penalties, strict=True):
        totals[sample.play, sample.actor] += float(penalty)
        sample.reward -= float(penalty)
    for sample in samples:
        sample.trajectory_reward -= totals[sample.play, sample.actor]


def set_advantages(results: Sequence[GenerateResult], samples: Sequence[Sample], advantages: np.ndarray) -> None:
    """Write ``advantages [B]`` into the steps that ``samples`` came from, nested episodes included."""
    steps_of = {result.rollout.id: result.rollout.steps for top in results for result in top.walk()}
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        steps_of[sample.trajectory][sample.step_index].advantage = float(advantage)


def pack(samples: Sequence[Sample], dropped: dict[str, int], metrics: dict[str, float]) -> TrainingBatch:
    """Samples as one packed token stream, see :class:`TrainingBatch`. No samples make an empty batch.

    All completion tokens train, the stop token included, unless a sample brings its own ``loss_mask [C]``.
    """
    actors, actor_index = _numbered([sample.actor for sample in samples])
    policies, policy_index = _numbered([sample.policy for sample in samples])
    token_ids, cu_seqlens, loss_mask, rollout_logprobs = pack_tokens(
        [sample.prompt_token_ids for sample in samples],
        [sample.completion_token_ids for sample in samples],
        [sample.rollout_logprobs for sample in samples],
        lambda row: _name(samples[row]),
    )
    for row, sample in enumerate(samples):
        if sample.loss_mask is not None:
            completion = slice(cu_seqlens[row + 1] - len(sample.completion_token_ids), cu_seqlens[row + 1])
            loss_mask[completion] = _own_mask(sample)
    return TrainingBatch(
        token_ids=token_ids,
        cu_seqlens=cu_seqlens,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        advantages=np.array([sample.advantage for sample in samples], dtype=np.float32),
        rewards=np.array([sample.reward for sample in samples], dtype=np.float32),
        temperatures=np.array([sample.temperature for sample in samples], dtype=np.float32),
        actor_index=actor_index,
        policy_index=policy_index,
        min_version=np.array(_oldest([sample.policy_versions for sample in samples]), dtype=np.int64),
        actors=actors,
        policies=policies,
        dropped=dropped,
        metrics=metrics,
    )


def _own_mask(sample: Sample) -> np.ndarray:
    """The mask that the sample brings, ``[C]`` uint8. Raises ``ValueError`` unless it has a 0 or a 1 for each token."""
    given = np.asarray(sample.loss_mask)
    completion = len(sample.completion_token_ids)
    if given.shape != (completion,):
        raise ValueError(
            f"{_name(sample)}: expected equal lengths, got {completion} completion tokens, "
            f"{len(sample.rollout_logprobs)} log-probabilities, loss_mask of {given.size}"
        )
    mask = np.equal(given, 1)
    if not (mask | np.equal(given, 0)).all():
        raise ValueError(f"{_name(sample)}: loss_mask={sample.loss_mask!r:.80}: expected 0 or 1 for each token")
    return mask.astype(np.uint8)


def _name(sample: Sample) -> str:
    """How errors call a sample."""
    return f"step {sample.step_index} of rollout {sample.trajectory!r}"


def _oldest(runs: Sequence[PolicyVersions]) -> list[int]:
    """Of each sample's versions the lowest."""
    return [run[0][1] if len(run) == 1 else min([version for _, version in run]) for run in runs]


def _numbered(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The different ones of ``names [B]`` in order of appearance, and where each stands among them, ``[B]`` int64."""
    distinct = list(dict.fromkeys(names))
    place_of = {name: place for place, name in enumerate(distinct)}
    return distinct, np.array([place_of[name] for name in names], dtype=np.int64)


def select(batch: TrainingBatch, rows: Sequence[int] | np.ndarray) -> TrainingBatch:
    """The rows of ``batch`` with these indices, or where this mask ``[B]`` is true, in the order given.

    ``actors`` and ``policies`` stay whole, so indices into them keep their meaning; ``dropped`` and ``metrics`` stay.
    """
    chosen = np.arange(len(batch))[np.asarray(rows, dtype=None if len(rows) else np.int64)]
    spans = [slice(batch.cu_seqlens[row], batch.cu_seqlens[row + 1]) for row in chosen]
    lengths = np.diff(batch.cu_seqlens)[chosen]
    by_token: dict[str, Any] = {
        name: np.concatenate([column[:0], *(column[span] for span in spans)])
        for name in ("token_ids", "loss_mask", "rollout_logprobs")
        for column in (getattr(batch, name),)
    }
    names = ("advantages", "rewards", "temperatures", "actor_index", "policy_index", "min_version")
    by_row: dict[str, Any] = {name: getattr(batch, name)[chosen] for name in names}
    cu_seqlens = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    return replace(batch, **by_token, **by_row, cu_seqlens=cu_seqlens, dropped=dict(batch.dropped))


def drop_stale(batch: TrainingBatch, oldest: Mapping[str, int]) -> TrainingBatch:
    """Without the rows of which a token was sampled by weights older than ``oldest[policy]``, counted as ``stale``.

    Policies that are not in ``oldest`` have no bound. A batch with no such row comes back as it is.

    Example: ``drop_stale(batch, {"default": trainer_version - max_staleness})``
    """
    unbounded = np.iinfo(np.int64).min
    bounds = np.array([oldest.get(policy, unbounded) for policy in batch.policies], dtype=np.int64)
    fresh = batch.min_version >= bounds[batch.policy_index]
    if fresh.all():
        return batch
    kept = select(batch, fresh)
    kept.dropped["stale"] = kept.dropped.get("stale", 0) + int((~fresh).sum())
    return kept


def describe(results: Sequence[GenerateResult]) -> dict[str, float]:
    """Numbers of a whole step, nested episodes included; means leave failed episodes out.

    ``episodes``, ``episodes/failed``, ``episodes/retried``, ``sampled_tokens`` (all of them, trained on or not), of
    which ``playout_tokens`` are those of a tree's playouts, ``reward/<actor>``, ``metric/<name>``,
    ``completion_tokens/<actor>``, ``truncated/<actor>``; where an overlong penalty is set,
    ``overlong_penalty/<actor>`` and ``raw_reward/<actor>``, the reward without it.
    """
    rollouts = [result.rollout for top in results for result in top.walk()]
    means: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.error is None:
            for actor, reward in rollout.rewards.items():
                means["reward", actor].append(reward)
            for actor, reward in rollout.meta.get("raw_rewards", {}).items():
                means["raw_reward", actor].append(reward)
            for name, value in rollout.metrics.items():
                means["metric", name].append(value)
    sampled = sum(rollout.meta.get("lost_tokens", 0) for rollout in rollouts)
    sampled += sum(rollout.meta.get("group", {}).get("sampled_tokens", 0) for rollout in rollouts)
    played_out = int(sum(rollout.metrics.get("tree/playout_tokens", 0) for rollout in rollouts))
    sampled += played_out
    for rollout in rollouts:
        penalized = "raw_rewards" in rollout.meta
        for step in rollout.steps:
            actor_id, tokens = step.actor_id, len(step.completion_token_ids)
            if actor_id is None:
                sampled += 0 if "cached" in step.info else tokens
                continue
            sampled += tokens
            means["completion_tokens", actor_id].append(tokens)
            means["truncated", actor_id].append(step.finish_reason == "length")
            if penalized and "overlong_penalty" in step.info:
                means["overlong_penalty", actor_id].append(step.info["overlong_penalty"])
    counts: dict[str, float] = {
        "episodes": len(rollouts),
        "episodes/failed": sum(rollout.error is not None for rollout in rollouts),
        "episodes/retried": sum(rollout.meta.get("attempt", 0) for rollout in rollouts),
        "sampled_tokens": sampled,
    }
    if played_out:
        counts["playout_tokens"] = played_out
    return counts | {f"{kind}/{name}": float(np.mean(values)) for (kind, name), values in means.items()}
