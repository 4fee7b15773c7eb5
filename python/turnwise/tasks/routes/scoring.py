"""The outcome of a route and its reward, and the environment that both come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from turnwise.arena import RewardMix, RewardParts


class RouteOutcome(NamedTuple):
    """Outcome of one action.

    ``valid``: a route could be read. ``legal``: the share of its moves that were made before one was blocked or the
    board was solved; 1 if nothing was read. ``closeness``: the potential of the resulting state, 1 for a solved board,
    falling to 0 with the true distance from it. ``gained``: the increase of closeness. ``goal``: the value of the
    solution, 0 without one. ``moves``: the number of moves made. ``blocked``: the blocked move, if one ended the route.
    """

    valid: bool
    legal: float
    closeness: float
    gained: float
    goal: float
    moves: int
    blocked: str = ""


def outcome_of(route: str | None, made: int, *, before: float, after: float, goal: float) -> RouteOutcome:
    """Compute the outcome of ``route``, of which ``made`` moves were made, from the closeness before and after."""
    named = len(route or "")
    return RouteOutcome(
        valid=named > 0,
        legal=made / named if named else 1.0,
        closeness=after,
        gained=after - before,
        goal=goal,
        moves=made,
        blocked=route[made] if route and made < named and not goal else "",
    )


@dataclass(frozen=True, slots=True)
class RouteScoring:
    """Parts of an action's reward: the solution's value for the team, ``shaping * gained`` for the actor.

    ``gained`` is potential-based shaping ``phi(s') - phi(s)`` over the true distance (Ng, Harada and Russell 1999,
    without discount). Its sum over a walk depends only on start and end, so a detour neither costs nor pays, and an
    action that leaves the distance unchanged earns 0. Moves have no price. In a group where no board is solved, a small
    price alone would decide, and dividing by the group's deviation would make it as large as success. ``gained`` is
    above -1, so by default a readable route never earns less than an unreadable one.
    ``mix`` weighs the parts in an environment's own rewards, where no arena does. Raises ``ValueError`` for a negative
    ``shaping``.

    Example: ``RouteScoring(shaping=0.5)`` pays 1.125 for a solution of value 1 that gains 0.25 of closeness.
    """

    shaping: float = 1.0
    mix: RewardMix = RewardMix(invalid_cost=1.0)  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not self.shaping >= 0:
            raise ValueError(f"shaping={self.shaping!r}: expected a number >= 0")

    def parts(self, outcome: RouteOutcome) -> RewardParts:
        return RewardParts(outcome.goal, self.shaping * outcome.gained, outcome.valid)

    def reward(self, outcome: RouteOutcome) -> float:
        return self.mix.of(self.parts(outcome))


class StepResult(NamedTuple):
    """Result of a step: the board after it, its reward, whether the board is solved, and its outcome."""

    observation: str
    reward: float
    done: bool
    outcome: RouteOutcome


class RouteEnv(Protocol):
    """The part of an environment that the players act on."""

    @property
    def solved(self) -> bool: ...

    @property
    def closeness(self) -> float: ...

    def observe(self) -> str: ...

    def preview(self, route: str | None) -> RouteOutcome: ...

    def step(self, route: str | None) -> StepResult: ...
