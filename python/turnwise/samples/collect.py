"""Collects the trainable model calls of finished results as samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from turnwise.types import CHILD, Column, CompletionColumn, GenerateResult, Rollout, Sample, Step
from turnwise.types.columns import TOKEN_ADVANTAGES
from turnwise.types.prompts import prompt_tokens


def nodes_of(results: Sequence[GenerateResult]) -> list[GenerateResult]:
    """Return ``results`` and all results below them, parents first."""
    return [node for top in results for node in (top.walk() if top.children else (top,))]


def collect_samples(results: Sequence[GenerateResult], earlier: Sequence[Sample] = ()) -> list[Sample]:
    """Return one :class:`Sample` per trainable model call of ``results`` and of all results below them, parents first.

    It leaves out failed rollouts, results with ``is_trainable=False`` (but not their children), judges
    (``actor_id=None``), steps with ``trainable=False``, and calls that were aborted or have no token.
    ``step_index`` is the index in ``rollout.steps``, so ``(rollout_id, step_index)`` identifies the step.

    ``earlier`` are the samples of an earlier call with these results. Those of the steps that still train, up to the
    first that doesn't, are used again with the rewards, advantages, masks and columns that their steps have now.

    Raises ``ValueError`` for a trainable step if neither the step nor its actor has a reward, and for a reward that is
    not finite.

    Example: a result with one rollout of two steps gives two samples, ``step_index`` 0 and 1.
    """
    samples: list[Sample] = []
    known = iter(earlier)
    for top in results:
        for node in top.walk() if top.children else (top,):
            rollout = node.rollout
            if not node.is_trainable or rollout.error is not None:
                continue
            of_actors: dict[str, tuple[float, float]] = {}  # of steps without a reward of their own
            for index, step in enumerate(rollout.steps):
                actor = step.actor_id
                if actor is None or not step.trainable or step.finish_reason == "abort":
                    continue
                if not len(step.completion_token_ids):
                    continue
                if step.reward is None and "ends" not in step.info:
                    rewards = of_actors.get(actor) or of_actors.setdefault(actor, _rewards(rollout, index, step, actor))
                else:
                    rewards = _rewards(rollout, index, step, actor)
                sample = next(known, None)
                if sample is not None and sample.step is step:
                    _read_again(sample, step, rewards)
                else:
                    known = iter(())
                    sample = _sample_of(top, node, index, step, actor, rewards)
                samples.append(sample)
    _weigh_children(samples)
    return samples


def _weigh_children(samples: Sequence[Sample]) -> None:
    """Have all children of one actor in one attempt weigh as much as one: 1 / n each, if n of them train."""
    of_children = [sample for sample in samples if sample.attempt_id is not None]
    if not of_children:
        return
    trajectories = {(sample.attempt_id, sample.actor, sample.rollout_id) for sample in of_children}
    counts = Counter((attempt, actor) for attempt, actor, _ in trajectories)
    for sample in of_children:
        sample.weight = 1 / counts[sample.attempt_id, sample.actor]


def _sample_of(
    top: GenerateResult,
    node: GenerateResult,
    index: int,
    step: Step,
    actor: str,
    rewards: tuple[float, float],
) -> Sample:
    rollout = node.rollout
    # Positional arguments, in the order of the fields: keywords take 1.5 times as long.
    return Sample(
        node.group_id,
        rollout.episode_type,
        actor,
        step.turn,
        step.branch,
        step.tree_node,
        rollout.id,
        index,
        step.policy,
        prompt_tokens(step),
        step.completion_token_ids,
        step.completion_logprobs,
        step.policy_versions,
        *rewards,
        step.advantage,
        step.finish_reason,
        step.info.get("loss_mask") if step.info else None,
        1.0 if step.facts.temperature is None else float(step.facts.temperature),
        node.parent_id,
        step.group,
        step.reward is not None,
        step.info,
        top,
        _own_columns(step.info) if step.info else {},
        rollout.meta[CHILD]["attempt"] if CHILD in rollout.meta else None,
        1.0,
        step,
        facts=step.facts,
    )


def _read_again(sample: Sample, step: Step, rewards: tuple[float, float]) -> None:
    """Set what stages, the credit rule or an override may have changed, in the sample or in its step."""
    sample.reward, sample.trajectory_reward = rewards
    sample.has_step_reward = step.reward is not None
    sample.advantage, sample.weight = step.advantage, 1.0
    info = step.info
    sample.loss_mask, sample.columns = (info.get("loss_mask"), _own_columns(info)) if info else (None, {})


def _own_columns(info: Mapping[str, Any]) -> dict[str, Column]:
    advantages = info.get(TOKEN_ADVANTAGES)
    return {} if advantages is None else {TOKEN_ADVANTAGES: CompletionColumn(advantages)}


def _rewards(rollout: Rollout, index: int, step: Step, actor: str) -> tuple[float, float]:
    """Return a step's own reward and its actor's for the rollout. If one is missing, the other replaces it."""
    of_actor = rollout.rewards_of(step) if "ends" in step.info else rollout.rewards
    of_step, of_rollout = step.reward, of_actor.get(actor)
    if of_step is None:
        of_step = of_rollout
    if of_rollout is None:
        of_rollout = of_step
    if (
        of_step is not None
        and of_rollout is not None
        and isfinite(of_step)
        and (of_rollout is of_step or isfinite(of_rollout))  # nearly always, both are one
    ):
        return float(of_step), float(of_rollout)
    name = f"step {index} (actor {actor!r}) of rollout {rollout.id!r}, episode type {rollout.episode_type!r}"
    if of_step is None or of_rollout is None:
        raise ValueError(
            f"{name} has no reward: expected step.reward or rollout.rewards[{actor!r}]; "
            f"rewarded actors are {sorted(of_actor)}"
        )
    raise ValueError(f"{name} has reward {of_rollout if isfinite(of_step) else of_step!r}: expected a finite number")


def step_of(sample: Sample) -> Step:
    """Return the step of a sample of :func:`collect_samples`."""
    assert sample.step is not None
    return sample.step


def step_name(sample: Sample) -> str:
    """Return the name of the sample's step in an error."""
    return f"step {sample.step_index} of rollout {sample.rollout_id!r}"
