"""From what the arena ran to what credit rules and the trainer look at: results in, samples out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
    samples: list[Sample] = []
    for top in results:
        for node in top.walk():
            if node.rollout.error is None and node.is_trainable:
                samples.extend(_samples_of(node, top))
    return samples


def _samples_of(result: GenerateResult, top: GenerateResult) -> Iterator[Sample]:
    rollout = result.rollout
    for index, step in enumerate(rollout.steps):
        if step.actor_id is None or not step.trainable:
            continue
        if step.finish_reason == "abort" or not step.completion_token_ids:
            continue
        reward, trajectory_reward = _rewards(rollout, step, index)
        # By place, in the order of the fields: with names it takes half as long again.
        yield Sample(
            result.uid,
            rollout.episode_type,
            step.actor_id,
            step.turn,
            step.branch,
            step.parent,
            rollout.id,
            index,
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
            result.parent_id,
            step.group,
            step.reward is not None,
            step.info,
            top,
        )


def _rewards(rollout: Rollout, step: Step, index: int) -> tuple[float, float]:
    """What the step is paid, and what the rollout pays its actor."""
    actor = step.actor_id or ""
    of_rollout = rollout.rewards.get(actor)
    own = of_rollout if step.reward is None else step.reward
    of_rollout = own if of_rollout is None else of_rollout
    if own is not None and of_rollout is not None and math.isfinite(own) and math.isfinite(of_rollout):
        return float(own), float(of_rollout)
    where = f"step {index} (actor {actor!r}) of rollout {rollout.id!r}, episode type {rollout.episode_type!r}"
    if own is None:
        raise ValueError(
            f"{where} has no reward: expected step.reward or rollout.rewards[{actor!r}]; "
            f"rewarded actors are {sorted(rollout.rewards)}"
        )
    wrong = of_rollout if math.isfinite(own) else own
    raise ValueError(f"{where} has reward {wrong!r}: expected a finite number")
