"""Turns results into samples with advantages, and packs samples into the trainer's batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np

from turnwise._C import pack_tokens, read_attributes, read_items
from turnwise.samples.collect import TrainableSteps, trainable_steps
from turnwise.samples.filters import Filters
from turnwise.types import CreditAssigner, GenerateResult, PolicyVersions, Sample, Step, TrainingBatch

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


STEP_COLUMNS = (
    "policy",
    "prompt_token_ids",
    "completion_token_ids",
    "completion_logprobs",
    "advantage",
    "policy_versions",
    "info",
)
"""Attributes of a step that :class:`BatchColumns` holds."""


@dataclass(slots=True)
class BatchColumns:
    """Columns from which a batch is packed; every list is ``[B]``."""

    name: Callable[[Any], str]
    """Returns the name of a row's call for error messages."""
    calls: list[Any] = field(default_factory=list)
    """Steps or samples of the rows."""
    actors: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    masks: list[list[int] | None] = field(default_factory=list)
    """Loss mask of each row; ``None`` for a row without one."""
    temperatures: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    advantages: list[float | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Oldest policy version that sampled a token of each row."""

    def where(self, kept: Sequence[bool]) -> BatchColumns:
        """Return the rows for which ``kept [B]`` is true."""
        if all(kept):
            return self
        columns = [name for name in self.__dataclass_fields__ if name != "name"]
        return BatchColumns(self.name, *(list(compress(getattr(self, column), kept)) for column in columns))


def training_rows(
    results: Sequence[GenerateResult], filters: Filters, zero_causes: Mapping[int, str] | None = None
) -> tuple[BatchColumns, Drops]:
    """Return the rows that train, and counts of the model calls that don't, without judges.

    ``zero_causes`` has the causes of advantages of 0, by ``id(step)``. Raises ``ValueError`` for a step without an
    advantage.
    """
    calls = trainable_steps(results)
    rows = _rows_of(calls)
    if None in rows.advantages:
        step = rows.calls[rows.advantages.index(None)]
        raise ValueError(
            f"{rows.name(step)} has no advantage: call assign_credit(results) before build_training_batch(results)"
        )
    causes = filters.causes(rows.calls, zero_causes)
    filtered = Counter((actor, cause) for actor, cause in zip(rows.actors, causes, strict=True) if cause is not None)
    return rows.where([cause is None for cause in causes]), dict(_count_excluded(calls) + filtered)


def _count_excluded(calls: TrainableSteps) -> Counter[tuple[str, str]]:
    """Count the model calls that are not trainable, by actor and reason, without judges."""
    if calls.others == 0:
        return Counter()
    trainable = set(map(id, calls.steps))
    return Counter(
        (step.actor_id, next((name for name, holds in REASONS.items() if holds(node, step)), "no_tokens"))
        for _, node in calls.episodes
        for step in node.rollout.steps
        if step.actor_id is not None and id(step) not in trainable
    )


def advantages_of(
    samples: Sequence[Sample], credit: CreditAssigner | None, results: Sequence[GenerateResult] = ()
) -> np.ndarray:
    """Return the credit rule's advantages ``[B]``, checked; without a rule, the rewards ``[B]`` float32.

    A rule that has only ``compute`` gets ``results``. Raises ``ValueError`` for missing or non-finite advantages.
    """
    if credit is None or not samples:
        return np.array([sample.reward for sample in samples], dtype=np.float32)
    if getattr(type(credit), "compute_columns", None) in (None, CreditAssigner.compute_columns):
        table = credit.compute(results)
        places = [(sample.rollout_id, sample.step_index) for sample in samples]
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
) -> dict[int, str]:
    """Write the advantages into the steps of ``samples``, nested episodes included.

    Return the causes of advantages of 0 by ``id(step)``; empty if the rule has no ``zero_causes``.
    """
    advantages = advantages_of(samples, credit, results)
    steps_of = {result.rollout.id: result.rollout.steps for top in results for result in top.walk()}
    steps = [steps_of[sample.rollout_id][sample.step_index] for sample in samples]
    for step, advantage in zip(steps, advantages.tolist(), strict=True):
        step.advantage = advantage
    zeros = np.flatnonzero(advantages == 0).tolist()
    tell: Callable[..., Sequence[str]] | None = getattr(credit, "zero_causes", None)
    if tell is None or not zeros:
        return {}
    return {id(steps[row]): cause for row, cause in zip(zeros, tell(samples, zeros), strict=True)}


def pack(samples: Sequence[Sample], drops: Drops, metrics: dict[str, float]) -> TrainingBatch:
    """Pack samples as one token stream, see :func:`pack_rows`."""
    rows = BatchColumns(
        name=lambda sample: _name(sample.step_index, sample.rollout_id),
        calls=list(samples),
        actors=[sample.actor for sample in samples],
        policies=[sample.policy for sample in samples],
        prompts=[sample.prompt_token_ids for sample in samples],
        completions=[sample.completion_token_ids for sample in samples],
        logprobs=[sample.rollout_logprobs for sample in samples],
        masks=[sample.loss_mask for sample in samples],
        temperatures=[sample.temperature for sample in samples],
        rewards=[sample.reward for sample in samples],
        advantages=[sample.advantage for sample in samples],
        versions=[_oldest(sample.policy_versions) for sample in samples],
    )
    return pack_rows(rows, drops, metrics)


def _rows_of(calls: TrainableSteps) -> BatchColumns:
    policies, prompts, completions, logprobs, advantages, versions, infos = read_attributes(calls.steps, STEP_COLUMNS)
    masks, temperatures = read_items(infos, {"loss_mask": None, "temperature": 1.0})

    def name(wanted: Step) -> str:
        row = next(row for row, step in enumerate(calls.steps) if step is wanted)
        return _name(calls.places[row], calls.episodes[calls.owners[row]][1].rollout.id)

    return BatchColumns(
        name,
        calls=calls.steps,
        actors=calls.actors,
        policies=policies,
        prompts=prompts,
        completions=completions,
        logprobs=logprobs,
        masks=masks,
        temperatures=temperatures,
        rewards=calls.rewards,
        advantages=advantages,
        versions=[of_call[0][1] if len(of_call) == 1 else _oldest(of_call) for of_call in versions],
    )


def pack_rows(rows: BatchColumns, drops: Drops, metrics: dict[str, float]) -> TrainingBatch:
    """Pack rows as one token stream, see :class:`TrainingBatch`. No rows give an empty batch.

    All completion tokens train, the stop token included, unless a row has a loss mask ``[C]`` of 0 and 1. Raises
    ``ValueError`` or ``TypeError`` with the step's name for an invalid token id, a log-probability that is not finite,
    and lengths that differ.
    """
    token_ids, cu_seqlens, loss_mask, rollout_logprobs = pack_tokens(
        rows.prompts, rows.completions, rows.logprobs, lambda row: rows.name(rows.calls[row])
    )
    # A row's own loss mask replaces the default, in which every completion token trains.
    for row, mask in enumerate(rows.masks):
        if mask is not None:
            end, length = cu_seqlens[row + 1], len(rows.completions[row])
            loss_mask[end - length : end] = _check_loss_mask(mask, length, rows.name(rows.calls[row]))
    actors, actor_index = _index_of_unique(rows.actors)
    policies, policy_index = _index_of_unique(rows.policies)
    return TrainingBatch(
        token_ids=token_ids,
        cu_seqlens=cu_seqlens,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        advantages=np.array(rows.advantages, dtype=np.float32),
        rewards=np.array(rows.rewards, dtype=np.float32),
        temperatures=np.array(rows.temperatures, dtype=np.float32),
        actor_index=actor_index,
        policy_index=policy_index,
        min_version=np.array(rows.versions, dtype=np.int64),
        actors=actors,
        policies=policies,
        drops=drops,
        metrics=metrics,
    )


def _name(place: int, rollout_id: str) -> str:
    return f"step {place} of rollout {rollout_id!r}"


def _oldest(versions: PolicyVersions) -> int:
    return min([version for _, version in versions])


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


def _index_of_unique(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the distinct ``names`` in order of appearance, and each name's index among them, ``[B]`` int64."""
    distinct = list(dict.fromkeys(names))
    place_of = {name: place for place, name in enumerate(distinct)}
    return distinct, np.fromiter(map(place_of.__getitem__, names), dtype=np.int64, count=len(names))


def select(batch: TrainingBatch, rows: Sequence[int] | np.ndarray) -> TrainingBatch:
    """Select rows of ``batch`` by indices, in their order, or by a mask ``[B]``.

    ``actors`` and ``policies`` stay whole, so that their indices stay valid. ``drops`` and ``metrics`` do not change.
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
    return replace(batch, **by_token, **by_row, cu_seqlens=cu_seqlens, drops=dict(batch.drops))


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


MEANS = ("reward", "raw_reward", "metric", "completion_tokens", "truncated", "overlong_penalty", "team_difference")
"""Keys that :func:`describe` reports by actor, and metrics by their names."""


def with_zero_counts(metrics: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """Return the ``metrics`` of episodes with 0 for each count of the gateway that others have.

    Means over episodes then add up: those of all causes are the mean of their total. Actors that took no part in an
    episode, which have no ``gateway/calls`` in it, get none.
    """
    counts = dict.fromkeys(name for of_one in metrics for name in of_one if name.startswith("gateway/"))
    if not counts:
        return metrics
    calls = {name: f"gateway/calls/{name.rpartition('/')[2]}" for name in counts}
    return [{**{name: 0.0 for name in counts if calls[name] in of_one}, **of_one} for of_one in metrics]


def describe(results: Sequence[GenerateResult]) -> dict[str, float]:
    """Return the metrics of a whole step, nested episodes included.

    ``episodes``, ``episodes/failed``, ``episodes/retried`` (number of retries), ``sampled_tokens`` (all of them,
    trained on or not), ``playout_tokens`` (the part of them in a tree's playouts); means ``reward/<actor>`` and
    ``metric/<name>`` over episodes without an error; means ``completion_tokens/<actor>`` and ``truncated/<actor>``, the
    share of calls that reached their token limit, over all calls; sums of what went wrong in episodes, such as
    ``tool_errors/<tool>`` and ``reward_errors/<function>``; ``ended/max_turns``, the share of finished multi-turn
    episodes that ended at ``max_turns``; ``ended/context``, the share of all finished ones that outgrew their context;
    with an overlong penalty, ``overlong_penalty/<actor>`` and
    ``raw_reward/<actor>``, the reward before the penalty; with ``reward.difference``, ``team_difference/<actor>``, the
    mean change of the team's value by an action.
    """
    # Rewards and metrics of episodes without an error.
    rollouts = [result.rollout for top in results for result in top.walk()]
    errors, metas, rewards, metrics = read_attributes(rollouts, ("error", "meta", "rewards", "metrics"))
    lost, groups, attempts, raw_rewards, ended, mishaps = read_items(
        metas, {"lost_tokens": 0, "group": {}, "attempt": 0, "raw_rewards": None, "ended": None, "mishaps": None}
    )
    means: dict[str, defaultdict[str, list[float]]] = {kind: defaultdict(list) for kind in MEANS}
    for kind, column in (("reward", rewards), ("metric", metrics), ("raw_reward", raw_rewards)):
        of_kind = means[kind]
        counted = with_zero_counts(column) if kind == "metric" else column
        for values, error in zip(counted, errors, strict=True):
            if values and error is None:
                for name, value in values.items():
                    of_kind[name].append(value)

    # Tokens, also of failed attempts, group functions, playouts and judges; lengths by actor.
    sampled = sum(lost) + sum([group.get("sampled_tokens", 0) for group in groups])
    played_out = int(sum([measured.get("tree/playout_tokens", 0) for measured in metrics]))
    lengths, truncated = means["completion_tokens"], means["truncated"]
    steps = [step for rollout in rollouts for step in rollout.steps]
    told = read_attributes(steps, ("actor_id", "completion_token_ids", "finish_reason", "info"))
    for actor, token_ids, finish, info in zip(*told, strict=True):
        if actor is None:
            sampled += 0 if "cached" in info else len(token_ids)
        else:
            lengths[actor].append(len(token_ids))
            truncated[actor].append(finish == "length")
            if "team_difference" in info:
                means["team_difference"][actor].append(info["team_difference"])
    for rollout in compress(rollouts, [raw is not None for raw in raw_rewards]):
        for step in rollout.steps:
            if step.actor_id is not None and "overlong_penalty" in step.info:
                means["overlong_penalty"][step.actor_id].append(step.info["overlong_penalty"])

    # Counts come first, then the means.
    counts: dict[str, float] = {
        "episodes": len(rollouts),
        "episodes/failed": len(errors) - errors.count(None),
        "episodes/retried": sum(attempts),
        "sampled_tokens": sampled + played_out + sum(map(sum, lengths.values())),
    }
    if played_out:
        counts["playout_tokens"] = played_out
    for counted in filter(None, mishaps):
        for name, count in counted.items():
            counts[name] = counts.get(name, 0) + count
    if ends := [how for how, error in zip(ended, errors, strict=True) if how is not None and error is None]:
        counts["ended/max_turns"] = ends.count("max_turns") / len(ends)
        counts["ended/context"] = ends.count("context") / errors.count(None)
    return counts | {f"{kind}/{name}": float(np.mean(values)) for kind in MEANS for name, values in means[kind].items()}
