"""RAE, role-conditioned advantage estimation: self-play without groups.

    A = r - b_k        k = (episode type, actor),  b_k as it was before this batch
    b_k <- decay * b_k + (1 - decay) * mean(r)     once per batch, b_k = 0 at first

In a zero-sum game the seats have different expected rewards. With a baseline per seat, the policy does not learn a
seat's advantage as skill (SPIRAL, https://arxiv.org/abs/2506.24119). All episodes of a batch use the same baseline, so
identical episodes get identical advantages. With ``per="trajectory"`` the baseline moves after each game, in the order
of the batch, as in SPIRAL's own code: each game uses the baseline that the games before it left, and a batch of n games
makes n updates. With ``bias_correction`` the rule divides the baseline by ``1 - decay^updates``, as Adam does, because
the baseline begins at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.credit.base import Credit
from turnwise.credit.grouping import tolerance
from turnwise.types import CreditCapabilities, Sample

Seat = tuple[str, str]
Game = tuple[Seat, tuple[str, int | None]]

ROUNDS: dict[str, Callable[[list[Game]], list[list[Game]]]] = {
    "batch": lambda games: [games],
    "trajectory": lambda games: [[game] for game in games],
}
"""Groups of games after which the baselines move, by ``RAECredit.per``."""


@dataclass(kw_only=True)
class RAECredit(Credit):
    """Subtracts a moving baseline per episode type and actor from ``r``, the rollout's reward of the actor.

    Each rollout counts once per actor, however many calls it has. So do the sub-agents of an attempt together.
    ``per``: baselines move after each ``"batch"``, by the mean of its rewards, or after each ``"trajectory"``.
    """

    capabilities = CreditCapabilities(step_rewards=False)
    decay: float = field(default=0.95, kw_only=False)
    per: str = "batch"
    bias_correction: bool = False
    _values: dict[Seat, float] = field(default_factory=dict, repr=False)
    _updates: dict[Seat, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r}: expected a number in [0, 1)")
        if self.per not in ROUNDS:
            raise ValueError(f"per={self.per!r}: expected one of {sorted(ROUNDS)}")

    def baseline(self, episode_type: str, actor: str) -> float:
        """Return the baseline that the next batch uses; 0 for a key that never occurred."""
        key = (episode_type, actor)
        value = self._values.get(key, 0.0)
        if self.bias_correction and key in self._updates:
            value /= 1 - self.decay ** self._updates[key]
        return value

    def compute_columns(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return advantages ``[B]`` float32 of ``samples``, in order, and move the baselines. Call once per batch."""
        advantages = np.zeros(len(samples), dtype=np.float32)
        calls: dict[Game, list[int]] = {}
        for index, sample in enumerate(samples):
            whole = sample.trajectory_key if sample.attempt_id is None else (sample.attempt_id, None)
            calls.setdefault(((sample.episode_type, sample.actor), whole), []).append(index)
        for games in ROUNDS[self.per](list(calls)):
            returns: dict[Seat, list[float]] = {}
            for game in games:
                seat, _ = game
                last = {samples[row].trajectory_key: samples[row].trajectory_reward for row in calls[game]}
                returns.setdefault(seat, []).append(sum(last.values()) / len(last))
                baseline = self.baseline(*seat)
                for row in calls[game]:
                    reward = last[samples[row].trajectory_key]
                    equal = abs(reward - baseline) <= tolerance([reward, baseline])
                    advantages[row] = 0.0 if equal else reward - baseline
            for seat, rewards in returns.items():
                mean = sum(rewards) / len(rewards)
                self._values[seat] = self.decay * self._values.get(seat, 0.0) + (1 - self.decay) * mean
                self._updates[seat] = self._updates.get(seat, 0) + 1
        return advantages

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"baselines": [[episode type, actor, value, updates], ...]}``, ready for JSON."""
        return {"baselines": [[*key, value, self._updates[key]] for key, value in self._values.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"baselines"}:
            raise ValueError(f"state has {sorted(state)}: expected 'baselines' alone")
        self._values = {(kind, actor): value for kind, actor, value, _ in state["baselines"]}
        self._updates = {(kind, actor): updates for kind, actor, _, updates in state["baselines"]}
