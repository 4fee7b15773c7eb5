"""Dynamic sampling: where questions say nothing, others are asked in their place.

A question all of whose samples have advantage 0 (every attempt right, or every attempt wrong) gives no gradient, and
with too many of them a batch shrinks. More batches are drawn until as many questions say something as the first batch
held; what is over is trimmed, question by question, in the order in which they were drawn
(DAPO, https://arxiv.org/abs/2503.14476, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from turnwise.arena import samples as rows
from turnwise.arena.context import resolve
from turnwise.samples import collect_samples
from turnwise.types import CreditAssigner, EpisodeRequest, GenerateResult, Step

if TYPE_CHECKING:
    from turnwise.arena.arena import Arena


async def resample(arena: Arena, requests: Sequence[EpisodeRequest], drawn: Callable[[], None]) -> list[GenerateResult]:
    """Play ``requests`` and up to ``arena.filters.resample`` more draws; all results, in the order of the draws.

    As many questions stay trainable as ``requests`` have (fewer where the draws did not give them). The others are kept
    for the record and their tokens count; ``TrainingBatch.dropped`` has their samples under ``resample`` and
    ``surplus``. A question is the ``uid`` of a top episode with all that was spawned below it. ``drawn`` is called once
    no more draws can follow, so the next batch may have to wait for the results of this one.
    """
    results: list[GenerateResult] = []
    draws, wanted, telling = arena.filters.resample, 0, []
    for draw in range(draws + 1):
        if draw == draws:
            drawn()
        more = await arena.generate_rollouts(requests)
        for top in more:
            top.rollout.meta["draw"] = draw
        results += more
        wanted = wanted or len({top.uid for top in results})
        telling = telling_questions(arena, results)
        if draw == draws:
            break
        if len(telling) >= wanted:
            drawn()
            break
        requests = await resolve(arena.get_batch())
    kept, surplus = set(telling[:wanted]), set(telling[wanted:])
    for top in results:
        if top.uid not in kept:
            _leave_out(top, "surplus" if top.uid in surplus else "resample")
    return results


def telling_questions(arena: Arena, results: Sequence[GenerateResult]) -> list[Hashable]:
    """The questions with a sample that would train and whose advantage is not 0, in order of first appearance."""
    arena.shape_rewards(results)
    samples = collect_samples(results)
    advantages = rows.advantages_of(samples, arena.credit, results)
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantage = float(advantage)
    telling = [sample for sample in samples if sample.advantage != 0]
    causes = arena.filters.causes(telling)
    found = {s.top.uid for s, cause in zip(telling, causes, strict=True) if cause is None and s.top is not None}
    return [uid for uid in dict.fromkeys(top.uid for top in results) if uid in found]


def state_of(credit: CreditAssigner | None) -> dict[str, Any] | None:
    """What a checkpoint keeps of a rule; nothing of one that says nothing of it."""
    return None if credit is None else getattr(credit, "state_dict", dict)()


def check_stateless(credit: CreditAssigner | None) -> None:
    """Raise ``ValueError`` for a rule that can't be asked twice about one batch."""
    if credit is None:
        raise ValueError("resample needs a credit rule: without one, no question can be told to say nothing")
    if state_of(credit):
        raise ValueError(
            f"resample asks the credit rule about a batch before it is whole, and {type(credit).__name__} learns from "
            "each batch: use a rule without state, or resample=0"
        )


def describe_draws(results: Sequence[GenerateResult], trained: Sequence[Step]) -> dict[str, float]:
    """``resampled_questions``: how many were drawn after the first batch; ``kept_questions``: how many train."""
    later = {top.uid for top in results if top.rollout.meta.get("draw", 0)}
    first = {top.uid for top in results if not top.rollout.meta.get("draw", 0)}
    found = set(map(id, trained))
    kept = {top.uid for top in results if any(id(step) in found for node in top.walk() for step in node.rollout.steps)}
    return {"resampled_questions": len(later - first), "kept_questions": len(kept)}


def _leave_out(top: GenerateResult, reason: str) -> None:
    for result in top.walk():
        result.rollout.meta["left_out"] = reason
        result.is_trainable = False
