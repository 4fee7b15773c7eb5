"""Turn-level returns: what an actor earns from one of its model calls on, later rewards discounted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from turnwise.types import Sample


def discounted_returns(samples: Sequence[Sample], gamma: float) -> np.ndarray:
    """``[B]`` float64: ``G_t = sum over k >= t of gamma^(k - t) r_k``, over the calls of one actor in one rollout.

    ``r_k`` is the call's own reward. Calls without one earn nothing, save the actor's last, which then earns the
    rollout's reward of the actor. Raises ``ValueError`` for siblings of a tree of which not all were played on alone,
    as ``select="none"`` does: what came later is not known, or not of one of them alone.
    """
    calls: dict[tuple[Hashable, str], list[int]] = {}
    for place, sample in enumerate(samples):
        ends = len(sample.info.get("ends", ()))
        if ends > 1 or (sample.parent is not None and not ends):
            raise ValueError(
                f"step {sample.step_index} of rollout {sample.trajectory!r} grew in a tree, of which only one branch "
                "was played on, or led to several ends: returns need plain trajectories (rollout.branches = 1, or "
                "rollout.tree.select = 'none')"
            )
        calls.setdefault((sample.play, sample.actor), []).append(place)
    returns = np.zeros(len(samples))
    for places in calls.values():
        places.sort(key=lambda place: samples[place].step_index)
        later = 0.0
        for place in reversed(places):
            sample = samples[place]
            own = sample.reward if sample.scored else sample.trajectory_reward * (place == places[-1])
            returns[place] = later = own + gamma * later
    return returns


def check_gamma(gamma: float) -> None:
    """Raise ``ValueError`` unless ``gamma`` is a discount."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma!r}: expected a number in [0, 1]")
