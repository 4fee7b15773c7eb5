"""Values of the states of a rollout, from the branches and playouts sampled there.

See :mod:`turnwise.credit.rules.vine` for the formulas. A state is identified by the action that led to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.credit.base import ALONE, CENTERED, EQUAL
from turnwise.credit.grouping import tolerance
from turnwise.types import PAID_LATER, PAID_OTHERS, Rollout, Sample, Step

Edge = tuple[int, int] | None
"""A branch as (node, index); ``None`` means before the first node."""

START = -1
"""Place of the first state, before any action."""


class StateValues:
    """Values of the states of one rollout, from the rewards of ``samples`` after penalties.

    ``A`` is the number of actors. Values are arrays ``[A]`` float64, or ``None`` if unknown.
    """

    def __init__(self, rollout: Rollout, samples: Sequence[Sample], *, gamma: float, team: bool) -> None:
        self.rollout, self.gamma, self.team = rollout, gamma, team
        self.steps = {
            index: step
            for index, step in enumerate(rollout.steps)
            if step.facts.env_response is not None and step.facts.error is None
        }
        paid = [actor for step in self.steps.values() for actor in step.info.get(PAID_OTHERS, {})]
        named = [*(str(step.actor_id) for step in self.steps.values()), *rollout.rewards, *self._playing_out(), *paid]
        self.actors = {actor: column for column, actor in enumerate(dict.fromkeys(named))}
        penalties = {sample.step_index: sample.reward - _reward_before(rollout, sample) for sample in samples}
        # What others' later actions brought an actor counts there, as the values of the states before contain it.
        later = {index: step.info.get(PAID_LATER, 0.0) for index, step in self.steps.items()}
        self.rewards = {
            index: (step.reward or 0.0) - later[index] + penalties.get(index, 0.0) for index, step in self.steps.items()
        }
        self.following, self.ends = self._links()
        self.was_sampled = any(len(actions) > 1 for actions in self.following.values()) or any(
            map(self._playouts, (START, *self.steps))
        )
        self.values: dict[int, np.ndarray | None] = {}
        self.advantages: dict[int, float] = {}
        for index in (*sorted(self.steps, reverse=True), START):  # backwards, because a value depends on later ones
            self._settle(index)

    def advantage(self, place: int) -> float:
        """Return the advantage of the step at ``place`` in the rollout; 0 if the step is no action."""
        return self.advantages.get(place, 0.0)

    def zero_cause(self, place: int) -> str:
        """Return the cause of the advantage 0 of the step at ``place``."""
        from_branch, siblings = next((pair for pair in self.following.items() if place in pair[1]), (START, []))
        if len(siblings) == 1:
            return CENTERED if self._playouts(from_branch) else ALONE
        return EQUAL if siblings and not any(map(self.advantage, siblings)) else CENTERED

    def _links(self) -> tuple[dict[int, list[int]], dict[int, np.ndarray]]:
        """Return the actions that follow each action, and the values of the ends by their last action."""
        by_origin: defaultdict[Edge, list[int]] = defaultdict(list)
        at: dict[Edge, int] = {None: START}
        for index, step in self.steps.items():
            by_origin[step.from_branch].append(index)
            if step.tree_node is not None:
                at[step.tree_node, step.branch] = index
        following: dict[int, list[int]] = {}
        last = dict(at)
        for edge, indices in by_origin.items():
            for index in indices:
                if self.steps[index].tree_node is None:
                    following[last[edge]], last[edge] = [index], index
                else:
                    following.setdefault(last[edge], []).append(index)
        ends = {last[edge]: self._outcome(edge, rewards, at) for edge, rewards in self._ends() if edge in last}
        return following, ends

    def _ends(self) -> list[tuple[Edge, Mapping[str, float]]]:
        """Return the ends of the rollout with the rubric's rewards. A single end is that of the own trajectory."""
        several = self.rollout.meta.get("ends")
        if several is not None:
            return [(end["from_branch"] and tuple(end["from_branch"]), end["rewards"]) for end in several]
        own = [step for step in self.steps.values() if step.selected]
        edge = (
            None
            if not own
            else (own[-1].tree_node, own[-1].branch)
            if own[-1].tree_node is not None
            else own[-1].from_branch
        )
        return [(edge, self.rollout.rewards)]

    def _outcome(self, edge: Edge, rewards: Mapping[str, float], at: Mapping[Edge, int]) -> np.ndarray:
        last: dict[str, Step] = {}
        while True:
            for step in (
                step for step in reversed(self.steps.values()) if step.tree_node is None and step.from_branch == edge
            ):
                last.setdefault(str(step.actor_id), step)
            if edge is None:
                break
            step = self.steps[at[edge]]
            last.setdefault(str(step.actor_id), step)
            edge = step.from_branch
        return self._earned({actor: rewards.get(actor, 0.0) for actor, step in last.items() if step.reward is None})

    def _earned(self, rewards: Mapping[str, float]) -> np.ndarray:
        """Return ``[A]``: the rewards that count for each actor, its own or with ``team`` all."""
        counted = np.zeros(len(self.actors))
        for actor, reward in rewards.items():
            counted[slice(None) if self.team else self.actors[actor]] += reward
        return counted

    def _before(self, actor: str, reward: float, after: np.ndarray) -> np.ndarray:
        """Return ``r + gamma V(s')`` for an action of ``actor``, ``[A]``."""
        discount = np.ones(len(self.actors))
        discount[slice(None) if self.team else self.actors[actor]] = self.gamma
        return self._earned({actor: reward}) + discount * after

    def _playouts(self, place: int) -> Sequence[Mapping[str, Any]]:
        found = self.rollout.facts.playouts if place == START else self.steps[place].info.get("playouts")
        return found or ()

    def _playing_out(self) -> list[str]:
        """Return the actors that act in playouts."""
        found = [one for index in (START, *self.steps) for one in self._playouts(index)]
        return [str(actor) for one in found for actor in (*(actor for actor, _ in one["rewards"]), *one["outcome"])]

    def _played_out(self, place: int) -> np.ndarray | None:
        """Return the mean return of the playouts after ``place``."""
        returns = []
        for one in self._playouts(place):
            value = self._earned(one["outcome"])
            for actor, reward in reversed(one["rewards"]):
                value = self._before(actor, reward, value)
            returns.append(value)
        return np.mean(returns, axis=0) if returns else None

    def _settle(self, place: int) -> None:
        """Set the value of the state after ``place``, and the advantages of the actions taken there."""
        actions, played_out = self.following.get(place, []), self._played_out(place)
        after = {action: self.values[action] for action in actions}
        values = [value for value in after.values() if value is not None]
        guess = np.mean(values, axis=0) if values else np.zeros(len(self.actors))
        worth = {
            action: self._before(str(self.steps[action].actor_id), self.rewards[action], guess if to is None else to)
            + self._earned(self.steps[action].info.get(PAID_OTHERS, {}))
            for action, to in after.items()
        }
        if len(actions) > 1:
            value = base = np.mean([worth[action] for action in actions], axis=0)
        else:
            value = played_out if played_out is not None else worth[actions[0]] if actions else None
            base = value if values else None  # without a known next value, the advantage is 0
        for action in actions:
            column = self.actors[str(self.steps[action].actor_id)]
            if base is None:
                self.advantages[action] = 0.0
                continue
            advantage = float(worth[action][column] - base[column])
            equal = abs(advantage) <= tolerance([base[column], *(one[column] for one in worth.values())])
            self.advantages[action] = 0.0 if equal else advantage
        if place in self.ends:
            value = self.ends[place]
        elif not values:
            value = played_out  # without a known later value, only playouts give one
        self.values[place] = value


def _reward_before(rollout: Rollout, sample: Sample) -> float:
    """Return the sample's reward before penalties."""
    step = rollout.steps[sample.step_index]
    return rollout.rewards_of(step).get(sample.actor, 0.0) if step.reward is None else step.reward
