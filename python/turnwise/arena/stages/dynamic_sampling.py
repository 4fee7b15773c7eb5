"""Dynamic sampling: replaces questions that give no gradient with new ones.

A question gives no gradient if all its samples have advantage 0: every attempt was right, or every attempt was wrong.
The arena draws more batches until as many questions are informative as the first batch had questions. It drops extra
questions, starting with the last one drawn (DAPO, https://arxiv.org/abs/2503.14476, section 3.2). Where a run has
several tasks, each keeps as many questions as it has in the first batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from turnwise.arena.runtime.user_code import hook
from turnwise.arena.stages.stage import Stage
from turnwise.samples.collect import collect_samples
from turnwise.samples.training_samples import advantages_of
from turnwise.types import CreditAssigner, EpisodeRequest, GenerateResult, Sample
from turnwise.types.protocols import ArenaRuntime


class DynamicSampling(Stage):
    """Samples with ``filters.dynamic_sampling_rounds`` further draws (:func:`sample_until_full`)."""

    name = "dynamic_sampling"
    always = True

    async def sample(
        self, arena: Any, requests: Sequence[EpisodeRequest], on_requests_fixed: Callable[[], None]
    ) -> list[GenerateResult] | None:
        if not arena.filters.dynamic_sampling_rounds:
            return None
        return await sample_until_full(arena, requests, on_requests_fixed)

    def selected(self, arena: Any, results: Sequence[GenerateResult], samples: Sequence[Sample]) -> Mapping[str, float]:
        return describe_draws(results, samples) if arena.filters.dynamic_sampling_rounds else {}


async def sample_until_full(
    arena: ArenaRuntime, requests: Sequence[EpisodeRequest], on_requests_fixed: Callable[[], None]
) -> list[GenerateResult]:
    """Run ``requests`` and up to ``filters.dynamic_sampling_rounds`` more draws. Return all results in draw order.

    As many questions stay trainable as ``requests`` has, or fewer if the draws had fewer informative ones. A question
    is the ``group_id`` of a top episode, with all episodes spawned below it. Other questions stay in the log;
    ``TrainingBatch.dropped`` counts their samples under ``resample`` and ``over_quota``. The function calls
    ``on_requests_fixed`` once no more draws can follow.
    """
    results: list[GenerateResult] = []
    draws, wanted, informative, kept = arena.filters.dynamic_sampling_rounds, Counter[Any](), [], set[Hashable]()
    # Draw until enough questions are informative, or no draws are left.
    for draw in range(draws + 1):
        if draw == draws:
            on_requests_fixed()
        more = await arena.generate_rollouts(requests)
        for top in more:
            top.rollout.facts.draw = draw
        results += more
        task_of = {top.group_id: top.rollout.facts.task for top in results}
        wanted = wanted or Counter(task_of.values())
        informative = informative_groups(arena, results)
        kept = {
            question
            for task, count in wanted.items()
            for question in [each for each in informative if task_of[each] == task][:count]
        }
        if draw == draws:
            break
        if len(kept) == wanted.total():
            on_requests_fixed()
            break
        requests = await arena.stages.draw(arena, await hook(arena.get_batch))
    # Questions outside the quota stay in the results, and do not train.
    over_quota = set(informative) - kept
    for top in results:
        if top.group_id not in kept:
            for result in top.walk():
                result.rollout.facts.drop_reason = "over_quota" if top.group_id in over_quota else "resample"
                result.is_trainable = False
    return results


def informative_groups(arena: ArenaRuntime, results: Sequence[GenerateResult]) -> list[Hashable]:
    """Return the questions with a trainable sample of nonzero advantage, in order of first appearance."""
    arena.shape_rewards(results)
    samples = collect_samples(results)
    advantages = advantages_of(samples, arena.credit, results)
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage = float(advantage)
    informative = [sample for sample in samples if sample.advantage != 0]
    causes = arena.filters.causes(informative)
    teaching = {
        s.root_result.group_id
        for s, cause in zip(informative, causes, strict=True)
        if cause is None and s.root_result is not None
    }
    return [group_id for group_id in dict.fromkeys(top.group_id for top in results) if group_id in teaching]


def check_stateless(credit: CreditAssigner | None) -> None:
    """Raise ``ValueError`` without a rule, and for one with state, which must not see a batch twice."""
    if credit is None:
        raise ValueError(
            "filters.dynamic_sampling_rounds needs credit=...: questions are dropped when all their advantages are 0"
        )
    if getattr(credit, "state_dict", dict)():
        raise ValueError(
            "filters.dynamic_sampling_rounds calls the credit rule before a batch is whole, and "
            f"{type(credit).__name__} learns from each batch. Use a rule without state, or dynamic_sampling_rounds=0"
        )


def describe_draws(results: Sequence[GenerateResult], trained: Sequence[Sample]) -> dict[str, float]:
    """Count the draws after the first (``extra_batches``) with their questions (``resampled_groups``), and the
    questions that train (``informative_groups``)."""
    later = {top.group_id for top in results if (top.rollout.facts.draw or 0)}
    first = {top.group_id for top in results if not (top.rollout.facts.draw or 0)}
    kept = {sample.root_result.group_id for sample in trained if sample.root_result is not None}
    extra = max(((top.rollout.facts.draw or 0) for top in results), default=0)
    return {"extra_batches": extra, "resampled_groups": len(later - first), "informative_groups": len(kept)}
