"""From what the arena ran to what credit rules and the trainer look at: results in, samples out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from turnwise.types import GenerateResult, Rollout, Sample


def collect_samples(results: Sequence[GenerateResult]) -> list[Sample]:
    """One :class:`Sample` per trainable model call of ``results`` and of all below them, parents first.

    Left out: failed rollouts, results with ``is_trainable=False`` (their children are asked for themselves), judges
    (``actor_id=None``), steps with ``trainable=False``, and calls that were aborted or gave no token.
    ``step_index`` is the place in ``rollout.steps``, so ``(trajectory, step_index)`` finds the step again.

    Raises ``ValueError`` for a trainable step with no reward of its own and none for its actor, and for a reward
    that is not finite.

    Example: a result with one rollout of two steps gives two samples, ``step_index`` 0 and 1.
    """
    samples: list[Sample] = []
    for top in results:
        for node in top.walk():
            if node.rollout.error is None and node.is_trainable:
                _add_samples(samples, node, top)
    return samples


def _add_samples(samples: list[Sample], result: GenerateResult, top: GenerateResult) -> None:
    rollout = result.rollout
    uid, parent_node, trajectory, episode_type = result.uid, result.parent_id, rollout.id, rollout.episode_type
    rewards: Mapping[str, float] = rollout.rewards
    several_ends = "ends" in rollout.meta
    for index, step in enumerate(rollout.steps):
        actor, completion, finish_reason = step.actor_id, step.completion_token_ids, step.finish_reason
        if actor is None or not step.trainable or finish_reason == "abort" or not completion:
            continue
        if several_ends:
            rewards = rollout.rewards_of(step)
        own, trajectory_reward = step.reward, rewards.get(actor)
        scored = own is not None
        if own is None:
            own = trajectory_reward
        elif trajectory_reward is None:
            trajectory_reward = own
        if own is None or trajectory_reward is None or not (isfinite(own) and isfinite(trajectory_reward)):
            raise ValueError(_no_reward(rollout, index, own, trajectory_reward))
        info = step.info
        # By place, in the order of the fields: with names it takes half as long again.
        samples.append(
            Sample(
                uid,
                episode_type,
                actor,
                step.turn,
                step.branch,
                step.parent,
                trajectory,
                index,
                step.policy,
                step.prompt_token_ids,
                completion,
                step.completion_logprobs,
                step.policy_versions,
                float(own),
                float(trajectory_reward),
                step.advantage,
                finish_reason,
                info.get("loss_mask"),
                float(info.get("temperature", 1.0)),
                parent_node,
                step.group,
                scored,
                info,
                top,
            )
        )


def _no_reward(rollout: Rollout, index: int, own: float | None, of_rollout: float | None) -> str:
    """Why step ``index`` of ``rollout`` makes no sample."""
    step = rollout.steps[index]
    actor = step.actor_id
    where = f"step {index} (actor {actor!r}) of rollout {rollout.id!r}, episode type {rollout.episode_type!r}"
    if own is None or of_rollout is None:
        return (
            f"{where} has no reward: expected step.reward or rollout.rewards[{actor!r}]; "
            f"rewarded actors are {sorted(rollout.rewards_of(step))}"
        )
    wrong = of_rollout if isfinite(own) else own
    return f"{where} has reward {wrong!r}: expected a finite number"
