"""From what the arena ran to what credit rules and the trainer look at: results in, samples out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from turnwise.types import GenerateResult, Rollout, Sample, Step


def collect_samples(results: Sequence[GenerateResult]) -> list[Sample]:
    """One :class:`Sample` per trainable model call of ``results`` and of all below them, parents first.

    Left out: failed rollouts, results with ``is_trainable=False`` (their children are asked for themselves), judges
    (``actor_id=None``), steps with ``trainable=False``, and calls that were aborted or gave no token.
    ``step_index`` is the place in ``rollout.steps``, so ``(trajectory, step_index)`` finds the step again.

    Raises ``ValueError`` for a trainable step with no reward of its own and none for its actor, and for a reward
    that is not finite.

    Example: a result with one rollout of two steps gives two samples, ``step_index`` 0 and 1.
    """
    return [sample for result in results for node in result.walk() for sample in _samples_of(node)]


def _samples_of(result: GenerateResult) -> Iterable[Sample]:
    rollout = result.rollout
    if rollout.error is not None or not result.is_trainable:
        return
    for index, step in enumerate(rollout.steps):
        if step.actor_id is None or not step.trainable:
            continue
        if step.finish_reason == "abort" or not step.completion_token_ids:
            continue
        reward = _reward(rollout, step, step.actor_id, index)
        yield Sample(
            uid=result.uid,
            episode_type=rollout.episode_type,
            actor=step.actor_id,
            turn=step.turn,
            branch=step.branch,
            parent=step.parent,
            trajectory=rollout.id,
            step_index=index,
            policy=step.policy,
            prompt_token_ids=step.prompt_token_ids,
            completion_token_ids=step.completion_token_ids,
            rollout_logprobs=step.completion_logprobs,
            policy_versions=step.policy_versions,
            reward=reward,
            trajectory_reward=float(rollout.rewards.get(step.actor_id, reward)),
            advantage=step.advantage,
            finish_reason=step.finish_reason,
            loss_mask=step.info.get("loss_mask"),
            temperature=float(step.info.get("temperature", 1.0)),
            parent_node=result.parent_id,
            group=step.group,
            scored=step.reward is not None,
            info=step.info,
        )


def _reward(rollout: Rollout, step: Step, actor: str, index: int) -> float:
    reward = step.reward if step.reward is not None else rollout.rewards.get(actor)
    where = f"step {index} (actor {actor!r}) of rollout {rollout.id!r}, episode type {rollout.episode_type!r}"
    if reward is None:
        raise ValueError(
            f"{where} has no reward: expected step.reward or rollout.rewards[{actor!r}]; "
            f"rewarded actors are {sorted(rollout.rewards)}"
        )
    for value in (reward, rollout.rewards.get(actor, reward)):
        if not math.isfinite(value):
            raise ValueError(f"{where} has reward {value!r}: expected a finite number")
    return float(reward)
