"""Turn-level returns: the discounted rewards of an actor from one of its model calls to the end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from turnwise.types import Sample


def discounted_returns(samples: Sequence[Sample], gamma: float) -> np.ndarray:
    """Return ``[B]`` float64: ``G_t = sum over k >= t of gamma^(k - t) r_k``, over one actor's calls in one rollout.

    ``r_k`` is the call's own reward. A call without one gets 0, except the actor's last call, which gets the actor's
    reward of the rollout. Raises ``ValueError`` for a call that led to several ends, and for a sibling in a tree
    unless it led to an end, as with ``select="none"``: its later rewards are then shared or unknown.
    """
    # Collect the calls of each actor in each trajectory.
    calls: dict[tuple[Hashable, str], list[int]] = {}
    for place, sample in enumerate(samples):
        ends = len(sample.info.get("ends", ()))
        if ends > 1 or (sample.tree_node is not None and not ends):
            raise ValueError(
                f"step {sample.step_index} of rollout {sample.rollout_id!r} grew in a tree, of which only one branch "
                "was played on, or led to several ends: returns need plain trajectories (rollout.branches = 1, or "
                "rollout.tree.select = 'none')"
            )
        calls.setdefault((sample.trajectory_key, sample.actor), []).append(place)
    # Sum up from the last call backwards.
    returns = np.zeros(len(samples))
    for places in calls.values():
        places.sort(key=lambda place: samples[place].step_index)
        later = 0.0
        for place in reversed(places):
            sample = samples[place]
            own = sample.reward if sample.has_step_reward else sample.trajectory_reward * (place == places[-1])
            returns[place] = later = own + gamma * later
    return returns


def check_gamma(gamma: float) -> None:
    """Raise ``ValueError`` for an invalid discount."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma!r}: expected a number in [0, 1]")
