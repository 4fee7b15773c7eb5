"""Turns results into samples with advantages, and packs samples into the trainer's batch."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, TypeVar

import numpy as np

from turnwise.samples.collect import collect_samples
from turnwise.samples.filters import Filters, StepKey
from turnwise.types import (
    CHILD,
    AllowedTokens,
    CreditAssigner,
    ExplainedCredit,
    GenerateResult,
    GroupedCredit,
    RoutedExperts,
    Sample,
    Step,
    TrainingBatch,
)

K = TypeVar("K", bound=Hashable)

Reason = Callable[[GenerateResult, Step], bool]

REASONS: dict[str, Reason] = {
    "failed": lambda result, step: result.rollout.error is not None or "error" in step.info,
    "resample": lambda result, step: result.rollout.meta.get("drop_reason") == "resample",
    "over_quota": lambda result, step: result.rollout.meta.get("drop_reason") == "over_quota",
    "reward_error": lambda result, step: "dropped" in result.rollout.meta,
    "greedy": lambda result, step: result.is_trainable and "greedy" in step.info,
    "not_trainable": lambda result, step: not (result.is_trainable and step.trainable),
    "aborted": lambda result, step: step.finish_reason == "abort",
}
"""Tests for the reasons why a model call is not trainable. The first reason that applies is counted."""

Drops = dict[tuple[str, str], int]
"""Number of model calls that don't train, by ``(actor, cause)``."""

GRAMMAR = "grammar"
"""Key of ``step.info``: the text of the grammar under which the step was sampled."""

ROUTED = "routed_experts"
"""Key of ``step.info``: the experts that its tokens took, as :class:`RoutedExperts`, if the client returns them."""

MAX_TOKEN_ID = 2**31 - 1


def training_samples(
    results: Sequence[GenerateResult],
    filters: Filters,
    zero_causes: Mapping[StepKey, str] | None = None,
    prepare: Callable[[Sample], str] = lambda sample: "constrained" if GRAMMAR in sample.info else "",
) -> tuple[list[Sample], Drops]:
    """Return the samples that train, and counts of the model calls that don't, without judges.

    ``prepare`` sets what the trainer needs of a sample, and returns the cause for which it can't train, if there is
    one. Raises ``ValueError`` for a sample without an advantage.
    """
    samples = collect_samples(results)
    for sample in samples:
        if sample.advantage is None:
            raise ValueError(
                f"{_name(sample)} has no advantage: call assign_credit(results) before build_training_batch(results)"
            )
    causes = filters.causes(samples, zero_causes)
    for row, sample in enumerate(samples):
        if causes[row] is None:
            causes[row] = prepare(sample) or None
    filtered = Counter((sample.actor, cause) for sample, cause in zip(samples, causes, strict=True) if cause)
    kept = [sample for sample, cause in zip(samples, causes, strict=True) if cause is None]
    return kept, dict(_count_excluded(results, samples) + filtered)


def _count_excluded(results: Sequence[GenerateResult], samples: Sequence[Sample]) -> Counter[tuple[str, str]]:
    """Count the model calls that are not trainable, by actor and reason, without judges."""
    trainable = {(sample.rollout_id, sample.step_index) for sample in samples}
    return Counter(
        (step.actor_id, next((name for name, holds in REASONS.items() if holds(node, step)), "no_tokens"))
        for top in results
        for node in top.walk()
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
    steps_of = {result.rollout.id: result.rollout.steps for top in results for result in top.walk()}
    keys = [(sample.rollout_id, sample.step_index) for sample in samples]
    for (rollout_id, index), advantage in zip(keys, advantages.tolist(), strict=True):
        steps_of[rollout_id][index].advantage = advantage
    zeros = np.flatnonzero(advantages == 0).tolist()
    if not isinstance(credit, ExplainedCredit) or not zeros:
        return {}
    return {keys[row]: cause for row, cause in zip(zeros, credit.zero_causes(samples, zeros), strict=True)}


def state_of(credit: CreditAssigner | None) -> dict[str, Any] | None:
    """Return ``credit.state_dict()``, ``{}`` if the rule has no such method, ``None`` without a rule."""
    return None if credit is None else getattr(credit, "state_dict", dict)()


def group_index(samples: Sequence[Sample], credit: CreditAssigner | None) -> np.ndarray | None:
    """Return the number ``[B]`` int64 of each sample's group in the credit rule; ``None`` without a rule.

    A rule without groups compares an actor's calls of the same turn at one question.
    """
    if credit is None:
        return None
    if isinstance(credit, GroupedCredit):
        return _index_of_unique([credit.key_of(sample) for sample in samples])[1]
    keys = [(sample.group_id, sample.episode_type, sample.actor, sample.turn) for sample in samples]
    return _index_of_unique(keys)[1]


def pack(
    samples: Sequence[Sample], drops: Drops, metrics: dict[str, float], credit: CreditAssigner | None = None
) -> TrainingBatch:
    """Pack samples as one token stream, see :class:`TrainingBatch`. No samples give an empty batch.

    ``credit`` is the rule that gave the advantages, of which the batch keeps the groups.

    All completion tokens train, the stop token included, unless a sample has a loss mask ``[C]`` of 0 and 1, or its
    grammar allowed only one token there. Raises
    ``ValueError`` or ``TypeError`` with the step's name for an invalid token id, a log-probability that is not finite,
    and lengths that differ.
    """
    token_ids, lengths, logprobs = _join(samples)
    is_completion = np.repeat(np.tile(np.array([False, True]), len(samples)), lengths.ravel())
    rollout_logprobs = np.zeros(len(token_ids), dtype=np.float32)
    rollout_logprobs[is_completion] = logprobs
    cu_seqlens = np.concatenate([np.zeros(1, dtype=np.int64), lengths.sum(axis=1).cumsum()])
    # A sample's own loss mask replaces the default, in which every completion token trains.
    loss_mask = is_completion.astype(np.uint8)
    for row, sample in enumerate(samples):
        if sample.loss_mask is not None:
            end, length = cu_seqlens[row + 1], lengths[row, 1]
            loss_mask[end - length : end] = _check_loss_mask(sample.loss_mask, length, _name(sample))
    token_advantages = _join_token_advantages(samples, cu_seqlens)
    allowed = _join_allowed(samples, cu_seqlens)
    if allowed is not None:  # a token without an alternative is no choice of the policy
        single = np.unpackbits(allowed.masks, axis=1).sum(axis=1) == 1
        loss_mask[(allowed.mask_index >= 0) & single[allowed.mask_index]] = 0
    actors, actor_index = _index_of_unique([sample.actor for sample in samples])
    policies, policy_index = _index_of_unique([sample.policy for sample in samples])
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
        min_version=np.array(
            [min([version for _, version in sample.policy_versions]) for sample in samples], dtype=np.int64
        ),
        actors=actors,
        policies=policies,
        drops=drops,
        metrics=metrics,
        allowed=allowed,
        token_advantages=token_advantages,
        routed_experts=_routed_experts(samples),
        group_index=group_index(samples, credit),
        observation_mask=_join_observations(samples, lengths, cu_seqlens),
    )


def _routed_experts(samples: Sequence[Sample]) -> list[RoutedExperts | None] | None:
    """Return the experts of each sample; ``None`` if no sample has any. Raises ``ValueError`` for a wrong length."""
    rows: list[RoutedExperts | None] = [sample.info.get(ROUTED) for sample in samples]
    if not any(rows):
        return None
    for sample, row in zip(samples, rows, strict=True):
        passed = len(sample.prompt_token_ids) + len(sample.completion_token_ids) - 1
        if row is not None and (row.ids.ndim != 3 or len(row.ids) != passed):
            raise ValueError(
                f"{_name(sample)}: routed_experts of shape {row.ids.shape}: expected [{passed}, layers, experts per "
                "token], one for each token but the last"
            )
    return rows


def _join_observations(samples: Sequence[Sample], lengths: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray | None:
    """Return a mask ``[N]`` uint8 of the observed tokens; ``None`` if no sample's are marked."""
    if all(sample.observed is None for sample in samples):
        return None
    mask = np.zeros(cu_seqlens[-1], dtype=np.uint8)
    for sample, start, length in zip(samples, cu_seqlens[:-1], lengths[:, 0], strict=True):
        mask[start + length - (sample.observed or 0) : start + length] = 1
    return mask


def _join_token_advantages(samples: Sequence[Sample], cu_seqlens: np.ndarray) -> np.ndarray | None:
    """Return the advantages of single tokens ``[N]`` float32, 0 on prompts; ``None`` if no sample has any."""
    if all(sample.token_advantages is None for sample in samples):
        return None
    joined = np.zeros(cu_seqlens[-1], dtype=np.float32)
    for sample, end in zip(samples, cu_seqlens[1:], strict=True):
        if sample.token_advantages is not None:
            values, length = np.asarray(sample.token_advantages, dtype=np.float32), len(sample.completion_token_ids)
            if values.shape != (length,) or not np.isfinite(values).all():
                raise ValueError(
                    f"{_name(sample)}: token_advantages={sample.token_advantages!r:.80}: expected {length} finite "
                    "numbers, one per completion token"
                )
            joined[end - length : end] = values
    return joined


def _join_allowed(samples: Sequence[Sample], cu_seqlens: np.ndarray) -> AllowedTokens | None:
    """Return the masks of the packed stream; ``None`` if no sample has any."""
    if all(sample.allowed is None for sample in samples):
        return None
    mask_index = np.full(cu_seqlens[-1], -1, dtype=np.int64)
    rows: dict[bytes, int] = {}
    for sample, end in zip(samples, cu_seqlens[1:], strict=True):
        if sample.allowed is not None:
            places = np.array([rows.setdefault(mask.tobytes(), len(rows)) for mask in sample.allowed.masks])
            mask_index[end - len(sample.allowed.mask_index) : end] = places[sample.allowed.mask_index]
    masks = np.frombuffer(bytearray().join(rows), dtype=np.uint8).reshape(len(rows), -1)
    return AllowedTokens(mask_index, masks)


def _join(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the token ids ``[N]`` int64 of all prompts and completions in turn, the lengths ``[B, 2]`` of each prompt
    and completion, and the float32 log-probabilities of all completion tokens."""
    tokens: list[int] = []
    values: list[float] = []
    lengths: list[tuple[int, int]] = []
    try:
        for sample in samples:
            tokens.extend(sample.prompt_token_ids)
            tokens.extend(sample.completion_token_ids)
            values.extend(sample.rollout_logprobs)
            lengths.append((len(sample.prompt_token_ids), len(sample.completion_token_ids)))
            if len(sample.rollout_logprobs) != lengths[-1][1]:
                _check_lists(sample)
        # array() takes less time than NumPy, and rejects floats as token ids.
        token_ids, logprobs = np.array(array("q", tokens), np.int64), np.array(array("f", values), np.float32)
        valid = bool(((token_ids >= 0) & (token_ids <= MAX_TOKEN_ID)).all() and np.isfinite(logprobs).all())
    except (TypeError, OverflowError):
        valid = False
    if not valid:
        for sample in samples:
            _check_lists(sample)
        raise RuntimeError("a sample's token ids or log-probabilities changed while they were packed")
    return token_ids, np.array(lengths, np.int64).reshape(-1, 2), logprobs


def _check_lists(sample: Sample) -> None:
    """Raise an error for the first of the sample's token ids and log-probabilities that is invalid."""
    name = _name(sample)
    prompt, completion, logprobs = sample.prompt_token_ids, sample.completion_token_ids, sample.rollout_logprobs
    columns: dict[str, Sequence[float]] = {
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "logprobs": logprobs,
    }
    for column, values in columns.items():
        if not hasattr(values, "__len__"):
            raise TypeError(f"{name}: {column}={values!r:.80}: expected a list")
    if len(completion) != len(logprobs):
        raise ValueError(
            f"{name}: expected equal lengths, "
            f"got {len(completion)} completion tokens, {len(logprobs)} log-probabilities"
        )
    for column, values in columns.items():
        code, expected = "q", f"a token id, a whole number from 0 to {MAX_TOKEN_ID}"
        if column == "logprobs":
            code, expected = "f", "a log-probability, a finite number"
        for index, value in enumerate(values):
            error: type[Exception] | None = None
            try:
                [number] = array(code, [value])
                if not (isfinite(number) if code == "f" else 0 <= number <= MAX_TOKEN_ID):
                    error = ValueError
            except TypeError:
                error = TypeError
            except OverflowError:
                error = ValueError
            if error is not None:
                raise error(f"{name}: {column}[{index}]={value!r:.80}: expected {expected}")


def _name(sample: Sample) -> str:
    return f"step {sample.step_index} of rollout {sample.rollout_id!r}"


def _check_loss_mask(mask: Any, length: int, name: str) -> np.ndarray:
    """Return the loss mask of a row as ``[C]`` uint8. Raises ``ValueError`` unless it has a 0 or 1 per token."""
    given = np.asarray(mask)
    if given.shape != (length,):
        raise ValueError(
            f"{name}: expected equal lengths, got {length} completion tokens and log-probabilities, "
            f"loss_mask of shape {given.shape}"
        )
    trains = np.equal(given, 1)
    if not (trains | np.equal(given, 0)).all():
        raise ValueError(f"{name}: loss_mask={mask!r:.80}: expected 0 or 1 for each token")
    return trains.astype(np.uint8)


def _index_of_unique(names: Sequence[K]) -> tuple[list[K], np.ndarray]:
    """Return the distinct ``names`` in order of appearance, and each name's index among them, ``[B]`` int64."""
    distinct = list(dict.fromkeys(names))
    index_of = {name: index for index, name in enumerate(distinct)}
    return distinct, np.fromiter(map(index_of.__getitem__, names), dtype=np.int64, count=len(names))


def select(batch: TrainingBatch, rows: Sequence[int] | np.ndarray) -> TrainingBatch:
    """Select rows of ``batch`` by indices, in their order, or by a mask ``[B]``.

    ``actors`` and ``policies`` stay whole, so that their indices stay valid. ``drops`` and ``metrics`` do not change.
    """
    chosen = np.arange(len(batch))[np.asarray(rows, dtype=None if len(rows) else np.int64)]
    spans = [slice(batch.cu_seqlens[row], batch.cu_seqlens[row + 1]) for row in chosen]
    lengths = np.diff(batch.cu_seqlens)[chosen]
    by_token: dict[str, Any] = {
        name: np.concatenate([column[:0], *(column[span] for span in spans)])
        for name in ("token_ids", "loss_mask", "rollout_logprobs", "token_advantages", "observation_mask")
        if (column := getattr(batch, name)) is not None
    }
    names = ("advantages", "rewards", "temperatures", "actor_index", "policy_index", "min_version")
    by_row: dict[str, Any] = {name: getattr(batch, name)[chosen] for name in names}
    if batch.group_index is not None:
        by_row["group_index"] = batch.group_index[chosen]
    cu_seqlens = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    allowed = batch.allowed
    if allowed is not None:
        mask_index = np.concatenate([allowed.mask_index[:0], *(allowed.mask_index[span] for span in spans)])
        allowed = replace(allowed, mask_index=mask_index)
    if batch.routed_experts is not None:
        by_row["routed_experts"] = [batch.routed_experts[row] for row in chosen]
    return replace(batch, **by_token, **by_row, cu_seqlens=cu_seqlens, drops=dict(batch.drops), allowed=allowed)


def drop_stale(batch: TrainingBatch, oldest: Mapping[str, int]) -> TrainingBatch:
    """Drop the rows with a token sampled by weights older than ``oldest[policy]``, and count them as ``stale``.

    Example: ``drop_stale(batch, {"default": trainer_version - max_staleness})``

    Policies that are not in ``oldest`` have no bound. A batch without stale rows is returned as it is.
    """
    unbounded = np.iinfo(np.int64).min
    bounds = np.array([oldest.get(policy, unbounded) for policy in batch.policies], dtype=np.int64)
    fresh = batch.min_version >= bounds[batch.policy_index]
    if fresh.all():
        return batch
    kept = select(batch, fresh)
    stale = Counter((batch.actors[index], "stale") for index in batch.actor_index[~fresh])
    kept.drops = dict(Counter(kept.drops) + stale)
    return kept


SHORTENED = "shortened"
"""Key of the info of a step whose chat was shortened to fit the context (``Episode.on_context``)."""

MEANS = (
    "reward",
    "raw_reward",
    "metric",
    "completion_tokens",
    "truncated",
    "overlong_penalty",
    "team_difference",
    "teacher_kl",
)
"""Keys that :func:`describe` reports by actor, and metrics by their names."""


def with_zero_counts(metrics: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """Return the ``metrics`` of episodes with 0 for each count of the gateway and of tools that others have.

    Means over episodes then add up: those of all causes are the mean of their total. Actors that took no part in an
    episode, which have no ``gateway/calls`` or ``tool_calls/ok`` in it, get none.
    """
    of_all = dict.fromkeys(name for of_one in metrics for name in of_one)
    firsts = {"gateway": "gateway/calls", "tool_calls": "tool_calls/ok"}
    counts = {name: firsts[name.partition("/")[0]] for name in of_all if name.partition("/")[0] in firsts}
    if not counts:
        return metrics
    calls = {name: f"{first}/{name.rpartition('/')[2]}" for name, first in counts.items()}
    return [{**{name: 0.0 for name in counts if calls[name] in of_one}, **of_one} for of_one in metrics]


def describe(results: Sequence[GenerateResult]) -> dict[str, float]:
    """Return the metrics of a whole step, nested episodes included.

    ``episodes``, ``episodes/failed``, ``episodes/retried`` (number of retries), ``sampled_tokens`` (all of them,
    trained on or not), ``playout_tokens`` (the part of them in a tree's playouts); means ``reward/<actor>`` and
    ``metric/<name>`` over episodes without an error, where a reward that sub-agents take from their attempt counts
    once; means ``completion_tokens/<actor>`` and ``truncated/<actor>``, the
    share of calls that reached their token limit, over all calls; sums of what went wrong in episodes, such as
    ``tool_errors/<tool>`` and ``reward_errors/<function>``; ``shortened/<actor>``, the calls whose chat ``on_context``
    had shortened; ``ended/max_turns``, the share of finished multi-turn
    episodes that ended at ``max_turns``; ``ended/context``, the share of all finished ones that outgrew their context;
    with an overlong penalty, ``overlong_penalty/<actor>`` and
    ``raw_reward/<actor>``, the reward before the penalty; with ``reward.difference``, ``team_difference/<actor>``, the
    mean change of the team's value by an action; with a teacher, ``teacher_kl/<actor>``, the mean of the sampled
    tokens' log-probabilities minus the teacher's, which estimates the reverse KL per token.
    """
    # Rewards and metrics of episodes without an error.
    rollouts = [result.rollout for top in results for result in top.walk()]
    means: dict[str, defaultdict[str, list[float]]] = {kind: defaultdict(list) for kind in MEANS}
    for rollout, metrics in zip(rollouts, with_zero_counts([rollout.metrics for rollout in rollouts]), strict=True):
        if rollout.error is None:
            rewards, raw_rewards = rollout.rewards, rollout.meta.get("raw_rewards") or {}
            if rollout.meta.get(CHILD, {}).get("inherits", False):
                rewards, raw_rewards = {}, {}  # counted with its attempt
            for kind, values in (("reward", rewards), ("metric", metrics), ("raw_reward", raw_rewards)):
                for name, value in values.items():
                    means[kind][name].append(value)

    # Tokens, also of failed attempts, group functions, playouts and judges; lengths by actor.
    metas = [rollout.meta for rollout in rollouts]
    sampled = sum(meta.get("lost_tokens", 0) + meta.get("group", {}).get("sampled_tokens", 0) for meta in metas)
    shortened = Counter[str]()
    playout_tokens = int(sum(rollout.metrics.get("tree/playout_tokens", 0) for rollout in rollouts))
    for step in (step for rollout in rollouts for step in rollout.steps):
        actor, info, length = step.actor_id, step.info, len(step.completion_token_ids)
        sampled += 0 if actor is None and "cached" in info else length
        if actor is not None:
            means["completion_tokens"][actor].append(length)
            means["truncated"][actor].append(step.finish_reason == "length")
            shortened[f"shortened/{actor}"] += SHORTENED in info
            for kind in ("team_difference", "overlong_penalty", "teacher_kl"):
                if kind in info:
                    means[kind][actor].append(info[kind])

    # Counts come first, then the means.
    counts: dict[str, float] = {
        "episodes": len(rollouts),
        "episodes/failed": sum(rollout.error is not None for rollout in rollouts),
        "episodes/retried": sum(meta.get("attempt", 0) for meta in metas),
        "sampled_tokens": sampled + playout_tokens,
    }
    if playout_tokens:
        counts["playout_tokens"] = playout_tokens
    counts |= {name: count for name, count in shortened.items() if count}
    for meta in metas:
        for name, count in (meta.get("mishaps") or {}).items():
            counts[name] = counts.get(name, 0) + count
    finished = [rollout.meta.get("ended") for rollout in rollouts if rollout.error is None]
    if ends := [end for end in finished if end is not None]:
        counts["ended/max_turns"] = ends.count("max_turns") / len(ends)
        counts["ended/context"] = ends.count("context") / len(finished)
    return counts | {f"{kind}/{name}": float(np.mean(values)) for kind in MEANS for name, values in means[kind].items()}
