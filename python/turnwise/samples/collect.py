"""Collects the trainable steps of finished results as samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from turnwise import _C
from turnwise.types import GenerateResult, Sample, Step


@dataclass(slots=True)
class TrainableSteps:
    """Trainable model calls, column by column; every list is ``[B]``."""

    episodes: list[tuple[GenerateResult, GenerateResult]]
    """All results as ``(top, node)``: the result at the top of the tree of episodes, and the result itself."""
    owners: list[int]
    """Index of each step's result in ``episodes``."""
    places: list[int]
    """Index of each step in its rollout."""
    steps: list[Step]
    actors: list[str]
    rewards: list[float]
    """Each step's own reward, else its actor's by :meth:`Rollout.rewards_of`."""
    trajectory_rewards: list[float]
    """The actor's reward of each step, else the step's own."""
    others: int
    """Number of model calls that are not trainable."""


def trainable_steps(results: Sequence[GenerateResult]) -> TrainableSteps:
    """Collect the trainable model calls of ``results`` and of all results below them, parents first.

    It leaves out failed rollouts, results with ``is_trainable=False`` (but not their children), judges
    (``actor_id=None``), steps with ``trainable=False``, and calls that were aborted or have no token.

    Raises ``ValueError`` for a trainable step if neither the step nor its actor has a reward, and for a reward that is
    not finite.
    """
    episodes = [(top, node) for top in results for node in top.walk()]
    found = _C.trainable_steps([node for _, node in episodes])
    wrong, seen, owners, places, steps, actors, rewards, of_rollouts = found
    calls = TrainableSteps(episodes, owners, places, steps, actors, rewards, of_rollouts, others=seen - len(steps))
    if wrong is not None:
        raise ValueError(_wrong_reward(calls, *wrong))
    return calls


def collect_samples(results: Sequence[GenerateResult]) -> list[Sample]:
    """Return one :class:`Sample` for each of :func:`trainable_steps`.

    ``step_index`` is the index in ``rollout.steps``, so ``(rollout_id, step_index)`` identifies the step.

    Example: a result with one rollout of two steps gives two samples, ``step_index`` 0 and 1.
    """
    return samples_of(trainable_steps(results))


def samples_of(calls: TrainableSteps) -> list[Sample]:
    """Return one :class:`Sample` for each of ``calls``, see :func:`collect_samples`."""
    columns = calls.owners, calls.places, calls.steps, calls.actors, calls.rewards, calls.trajectory_rewards
    return [
        # Positional arguments, in the order of the fields: keywords take 1.5 times as long.
        Sample(
            node.group_id,
            node.rollout.episode_type,
            actor,
            step.turn,
            step.branch,
            step.tree_node,
            node.rollout.id,
            place,
            step.policy,
            step.prompt_token_ids,
            step.completion_token_ids,
            step.completion_logprobs,
            step.policy_versions,
            reward,
            trajectory_reward,
            step.advantage,
            step.finish_reason,
            step.info.get("loss_mask"),
            float(step.info.get("temperature", 1.0)),
            node.parent_id,
            step.group,
            step.reward is not None,
            step.info,
            top,
        )
        for owner, place, step, actor, reward, trajectory_reward in zip(*columns, strict=True)
        for top, node in (calls.episodes[owner],)
    ]


def _wrong_reward(
    calls: TrainableSteps, owner: int, place: int, actor: str, own: float | None, of_rollout: float | None
) -> str:
    rollout = calls.episodes[owner][1].rollout
    where = f"step {place} (actor {actor!r}) of rollout {rollout.id!r}, episode type {rollout.episode_type!r}"
    if own is None or of_rollout is None:
        return (
            f"{where} has no reward: expected step.reward or rollout.rewards[{actor!r}]; "
            f"rewarded actors are {sorted(rollout.rewards_of(rollout.steps[place]))}"
        )
    return f"{where} has reward {of_rollout if isfinite(own) else own!r}: expected a finite number"


def mixed_prompts(samples: Sequence[Sample], credit: Any) -> dict[str, float]:
    """Return the share of the groups that compare calls with different prompts, as ``groups/mixed_prompts``.

    It is reported for agents behind a gateway, which may call models in any situation, and for rules that compare in
    groups. A rule that compares whole attempts gives a high share, and means no harm by it.
    """
    key_of = getattr(credit, "key_of", None)
    if key_of is None or not any("call" in sample.info for sample in samples):
        return {}
    prompts: dict[Any, list[tuple[int, ...]]] = {}
    for sample in samples:
        prompts.setdefault(key_of(sample), []).append(tuple(sample.prompt_token_ids))
    compared = [group for group in prompts.values() if len(group) > 1]
    if not compared:
        return {}
    return {"groups/mixed_prompts": sum(len(set(group)) > 1 for group in compared) / len(compared)}
