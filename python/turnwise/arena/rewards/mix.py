"""The mix of a reward: the team's outcome, the actor's own part, its difference, turns and costs.

    r = f(turn) * m + difference * (V' - V) - invalid_cost * (1 - valid)
    m = alpha * team + own                    mode "weighted_sum" (AT-GRPO, https://arxiv.org/abs/2510.11062)
    m = alpha * team + (1 - alpha) * own      mode "convex"
    f = 1, (turn + 1) / max_turns ("ramp"), or gamma ** (last turn - turn) ("discount")

With a ``threshold``, an ``m`` that reaches it becomes 1, any other 0. ``V`` is the value of the team's present
answer, before and after the action (:meth:`MultiTurnEpisode.team_value`). The difference of two values is a potential
(Ng, Harada and Russell 1999, without discount): an actor that fixes the answer gains what the one that broke it lost.

Steps and rollouts mix alike. A step's parts come from :meth:`MultiTurnEpisode.reward_parts`, a rollout's from the
rubric (``Rubric(..., own=[...], valid=[...])``). Turns are shaped when the batch is complete, before credit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from turnwise.arena.rewards.invalid_action import INVALID
from turnwise.arena.rewards.token_rewards import TOKEN_REWARDS, check_reward, is_by_token, set_reward
from turnwise.types import Rollout, Step
from turnwise.utils.registry import did_you_mean

MixMode = Literal["weighted_sum", "convex"]
TurnShaping = Literal["none", "ramp", "discount"]

WEIGHTS: dict[str, Callable[[float], tuple[float, float]]] = {
    "weighted_sum": lambda alpha: (alpha, 1.0),
    "convex": lambda alpha: (alpha, 1.0 - alpha),
}
"""Weights of the team's and the own part, by ``mode``."""

TURN_FACTORS: dict[str, Callable[[RewardMix, int, int, int], float]] = {
    "none": lambda mix, turn, last, max_turns: 1.0,
    "ramp": lambda mix, turn, last, max_turns: (turn + 1) / max_turns,
    "discount": lambda mix, turn, last, max_turns: (mix.gamma or 1.0) ** (last - turn),
}
"""Factor of ``turn``, by ``turn_shaping``. Turns count from 0; ``last`` is the last turn that was played."""


class RewardParts(NamedTuple):
    """The parts of an action's reward. Example: ``RewardParts(team=1.0, own=0.5, valid=False)``"""

    team: float
    """Outcome that the whole team shares."""
    own: float = 0.0
    """The acting actor's own part."""
    valid: float = 1.0
    """1 if the completion could be read, else 0."""


@dataclass(frozen=True, slots=True)
class RewardMix:
    """Weights of a reward's parts; the config's ``[reward]`` has the same keys. Raises ``ValueError`` for wrong ones.

    Example: ``RewardMix(0.4).of(RewardParts(1.0, 0.5)) == 0.9``; with ``mode="convex"`` it is 0.7.
    """

    alpha: float = 1.0
    """Weight of the team's part; in [0, 1] under ``"convex"``."""
    mode: MixMode = "weighted_sum"
    """``alpha * team + own``, or ``alpha * team + (1 - alpha) * own``."""
    difference: float = 0.0
    """Weight of the action's change in the value of the team's answer."""
    threshold: float | None = None
    """A mix of at least this value counts as 1, any other as 0; ``None`` keeps the mix."""
    turn_shaping: TurnShaping = "none"
    """Factor of the mix by turn."""
    gamma: float | None = None
    """Base of ``turn_shaping="discount"``, in (0, 1]."""
    invalid_cost: float = 0.0
    """Cost of a completion that can't be read."""

    def __post_init__(self) -> None:
        for name, choices in (("mode", WEIGHTS), ("turn_shaping", TURN_FACTORS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {sorted(choices)}")
        for name in ("alpha", "difference", "invalid_cost"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number >= 0")
        if self.mode == "convex" and self.alpha > 1:
            raise ValueError(f"alpha={self.alpha!r}: expected a number in [0, 1] with mode='convex'")
        if self.turn_shaping == "discount" and not 0 < (self.gamma or 0) <= 1:
            raise ValueError(f"gamma={self.gamma!r}: expected a number in (0, 1] with turn_shaping='discount'")
        if self.turn_shaping != "discount" and self.gamma is not None:
            raise ValueError(f"gamma={self.gamma!r}: has no effect without turn_shaping='discount'")

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the team's and the own part."""
        return WEIGHTS[self.mode](self.alpha)

    def binary(self, mixed: float) -> float:
        """Return 1 or 0 by the threshold, or ``mixed`` without one."""
        return mixed if self.threshold is None else float(mixed >= self.threshold)

    def cost(self, valid: float) -> float:
        """Return the cost of an action, or of a share ``valid`` of valid actions."""
        return self.invalid_cost * (1.0 - valid)

    def of(self, parts: RewardParts, difference: float = 0.0) -> float:
        """Return the reward of an action that changed the team's value by ``difference``, before turn shaping."""
        return self._mixed(parts) + (self.difference * difference - self.cost(parts.valid))

    def _mixed(self, parts: RewardParts) -> float:
        team, own = self.weights
        return self.binary(team * parts.team + own * parts.own)

    def pay(self, step: Step, earned: Any, difference: float, where: str) -> None:
        """Set the reward of ``step`` from ``earned``: parts, a number, one per token, or ``None`` for the rubric's.

        Raises ``TypeError`` or ``ValueError`` with a message that begins with ``where``.
        """
        if self.difference:
            step.facts.team_difference = difference
        if earned is None:
            return
        if is_by_token(earned) and not isinstance(earned, RewardParts):
            if self.difference or self.threshold is not None:
                raise ValueError(f"{where}: got rewards by token, expected a number to add a difference or a threshold")
            set_reward(step, earned, where)
            return
        # Turn shaping leaves the difference and the cost alone.
        left = self.difference * difference
        if isinstance(earned, RewardParts):
            parts = RewardParts(*(check_reward(part, where) for part in earned))
            shaped, left = self._mixed(parts), left - self.cost(parts.valid)
        else:
            shaped = self.binary(check_reward(earned, where))
        if left and self.turn_shaping != "none":
            step.facts.unshaped_reward = left
        set_reward(step, shaped + left, where)


def as_parts(value: Any, where: str) -> RewardParts | None:
    """Return the value of ``reward_parts`` as :class:`RewardParts`, from a tuple ``(team, own)`` too, or ``None``."""
    if value is None or isinstance(value, RewardParts):
        return value
    if isinstance(value, tuple) and 1 <= len(value) <= len(RewardParts._fields):
        return RewardParts(*value)
    raise TypeError(f"{where}: got {value!r}, expected RewardParts(team, own, valid), such a tuple, or None")


def shape_turns(rollout: Rollout, mix: RewardMix, max_turns: int) -> None:
    """Multiply the rewards of trainable steps by their turn's factor. A step that was seen before keeps its reward.

    A step without its own reward gets its share of its actor's. An invalid action that ended the episode keeps its
    cost.
    """
    if mix.turn_shaping == "none":
        return
    acted = [step for step in rollout.steps if step.actor_id is not None]
    last = max((step.turn for step in acted), default=0)
    for step in acted:
        reward = rollout.rewards_of(step).get(str(step.actor_id)) if step.reward is None else step.reward
        if reward is None or not step.trainable or INVALID in step.info or step.facts.turn_factor is not None:
            continue
        factor = TURN_FACTORS[mix.turn_shaping](mix, step.turn, last, max_turns)
        left = step.facts.unshaped_reward or 0.0
        step.facts.turn_factor = factor
        step.reward = factor * (reward - left) + left
        if TOKEN_REWARDS in step.info:
            step.info[TOKEN_REWARDS] = [factor * one for one in step.info[TOKEN_REWARDS]]


def add_differences(rewards: dict[str, float], steps: Iterable[Step], weight: float) -> None:
    """Add the weighted differences of ``steps``, a path through the episode, to their actors' ``rewards``."""
    for step in steps:
        if weight and step.actor_id in rewards and step.facts.team_difference is not None:
            rewards[step.actor_id] += weight * step.facts.team_difference


def check_keys(reward: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``reward`` as a dict. Raises ``ValueError`` for a name that is no field of :class:`RewardMix`."""
    names = [field.name for field in fields(RewardMix)]
    if unknown := [name for name in reward if name not in names]:
        raise ValueError(f"reward={dict(reward)!r}: unknown {unknown[0]!r}; {did_you_mean(unknown[0], names)}")
    return dict(reward)
