"""Turn-level returns: what an actor earns from one of its model calls on, later rewards discounted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.types import Sample


def discounted_returns(samples: Sequence[Sample], gamma: float) -> np.ndarray:
    """``[B]`` float64: ``G_t = sum over k >= t of gamma^(k - t) r_k``, over the calls of one actor in one rollout.

    ``r_k`` is the call's own reward. Calls without one earn nothing, save the actor's last, which then earns the
    rollout's reward of the actor. Raises ``ValueError`` for siblings of a tree: what came later is the selected one's.
    """
    calls: dict[tuple[str, str], list[int]] = {}
    for place, sample in enumerate(samples):
        if sample.parent is not None:
            raise ValueError(
                f"step {sample.step_index} of rollout {sample.trajectory!r} grew in a tree, of which only one branch "
                "was played on: returns need plain trajectories (rollout.branches = 1)"
            )
        calls.setdefault((sample.trajectory, sample.actor), []).append(place)
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
