"""Phase schedules decide which policies train in a step. Without phases all trainable policies train in every step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from turnwise.train.config.policies import PhaseConfig


def policies_at(step: int, phases: Sequence[PhaseConfig], trainable: Collection[str]) -> set[str]:
    """Return the policies of ``trainable`` that are updated in ``step``, counted from 0.

    Each phase lasts for its ``steps``; after the last phase the first one follows again.
    """
    if not phases:
        return set(trainable)
    place = step % sum(phase.steps for phase in phases)
    for phase in phases:
        if place < phase.steps:
            return set(phase.train) & set(trainable)
        place -= phase.steps
    raise AssertionError("a step lies in one of the phases")


def steps_in_training(policy: str, steps: int, phases: Sequence[PhaseConfig]) -> int:
    """Count the steps among the first ``steps`` that update ``policy``: the length of its learning-rate schedule."""
    if not phases:
        return steps
    rounds, rest = divmod(steps, sum(phase.steps for phase in phases))
    in_a_round = sum(phase.steps for phase in phases if policy in phase.train)
    return rounds * in_a_round + sum(policy in policies_at(step, phases, [policy]) for step in range(rest))
