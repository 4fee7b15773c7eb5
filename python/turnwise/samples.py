"""From what the arena ran to what credit rules and the trainer look at: results in, samples out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

from turnwise.types import GenerateResult, Rollout, Sample, Step

Call = tuple[GenerateResult, GenerateResult, int, Step, str, float, float]
"""A trainable model call: ``(top, node, place, step, actor, reward, trajectory_reward)``.

Its ``step`` stands at ``place`` of ``node.rollout.steps``, in the tree of episodes below ``top``. ``reward`` is the
step's own, else what :meth:`Rollout.rewards_of` has for its actor; ``trajectory_reward`` the other way round.
"""


def trainable_calls(results: Sequence[GenerateResult]) -> Iterator[Call]:
    """The trainable model calls of ``results`` and of all below them, parents first.

    Left out: failed rollouts, results with ``is_trainable=False`` (their children are asked for themselves), judges
    (``actor_id=None``), steps with ``trainable=False``, and calls that were aborted or gave no token.

    Raises ``ValueError`` for a trainable step with no reward of its own and none for its actor, and for a reward
    that is not finite.
    """
    for top in results:
        for node in top.walk():
            rollout = node.rollout
            if rollout.error is not None or not node.is_trainable:
                continue
            rewards: Mapping[str, float] = rollout.rewards
            several_ends = "ends" in rollout.meta
            for place, step in enumerate(rollout.steps):
                actor = step.actor_id
                if (
                    actor is None
                    or not step.trainable
                    or step.finish_reason == "abort"
                    or not step.completion_token_ids
                ):
                    continue
                if several_ends:
                    rewards = rollout.rewards_of(step)
                of_rollout = rewards.get(actor)
                own = of_rollout if step.reward is None else step.reward
                of_rollout = own if of_rollout is None else of_rollout
                if own is None or of_rollout is None or not (isfinite(own) and isfinite(of_rollout)):
                    raise ValueError(_wrong_reward(rollout, place, actor, own, of_rollout))
                yield top, node, place, step, actor, float(own), float(of_rollout)


def collect_samples(results: Sequence[GenerateResult]) -> list[Sample]:
    """One :class:`Sample` for each of :func:`trainable_calls`, as it is now.

    ``step_index`` is the place in ``rollout.steps``, so ``(trajectory, step_index)`` finds the step again.

    Example: a result with one rollout of two steps gives two samples, ``step_index`` 0 and 1.
    """
    return [
        # By place, in the order of the fields: with names it takes half as long again.
        Sample(
            node.uid,
            node.rollout.episode_type,
            actor,
            step.turn,
            step.branch,
            step.parent,
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
        for top, node, place, step, actor, reward, trajectory_reward in trainable_calls(results)
    ]


def _wrong_reward(rollout: Rollout, place: int, actor: str, own: float | None, of_rollout: float | None) -> str:
    where = f"step {place} (actor {actor!r}) of rollout {rollout.id!r}, episode type {rollout.episode_type!r}"
    if own is None or of_rollout is None:
        return (
            f"{where} has no reward: expected step.reward or rollout.rewards[{actor!r}]; "
            f"rewarded actors are {sorted(rollout.rewards_of(rollout.steps[place]))}"
        )
    return f"{where} has reward {of_rollout if isfinite(own) else own!r}: expected a finite number"
