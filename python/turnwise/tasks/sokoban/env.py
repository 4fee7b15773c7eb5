"""The Sokoban environment: a player who pushes boxes, and what each action is worth. It knows nothing of agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from turnwise.tasks.rewards import MixMode, invalid_penalty, mix_rewards

from .level import Level, State, distances, format_level, is_solved, walk


class Outcome(NamedTuple):
    """What one action came to.

    ``valid``: a route could be read. ``legal``: the share of its moves that were made before one was impossible or the
    level solved; 1 where nothing was read. ``moves``: how many were made. ``solved``: every box is on a goal.
    ``closeness``: 1 when solved, falling to 0 where the shortest solution is as long as the start's, or longer, or
    none is left. ``gained``: how much closer it is than before.
    """

    valid: bool
    legal: float
    moves: int
    solved: bool
    closeness: float
    gained: float


@dataclass(frozen=True, slots=True)
class Scoring:
    """What an action earns: ``mix_rewards(solved, own, alpha, mode)``, less ``invalid_cost`` if it can't be read.

    ``own = shaping * gained - step_cost * moves - illegal_cost * (1 - legal)``. The defaults give AT-GRPO's +1 for the
    solution and -0.01 for a step. With ``shaping`` each action earns how much closer to the solution it led, which adds
    up to the same for every way there (Ng, Harada and Russell 1999). Raises ``ValueError`` for an ``alpha`` that does
    not fit the mode, and for negative numbers.

    Example: ``Scoring().reward(Outcome(True, 1.0, moves=5, solved=True, closeness=1.0, gained=1.0)) == 0.95``
    """

    alpha: float = 1.0
    mode: MixMode = "weighted_sum"
    invalid_cost: float = 0.25
    step_cost: float = 0.01
    illegal_cost: float = 0.1
    shaping: float = 0.0

    def __post_init__(self) -> None:
        mix_rewards(0.0, 0.0, self.alpha, self.mode)
        for name in ("invalid_cost", "step_cost", "illegal_cost", "shaping"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number >= 0")

    def own(self, outcome: Outcome) -> float:
        """An action's own part, without the team's outcome and the cost of what can't be read."""
        costs = self.step_cost * outcome.moves + self.illegal_cost * (1.0 - outcome.legal)
        return self.shaping * outcome.gained - costs

    def reward(self, outcome: Outcome) -> float:
        mixed = mix_rewards(float(outcome.solved), self.own(outcome), self.alpha, self.mode)
        return mixed + invalid_penalty(outcome.valid, self.invalid_cost)


class StepResult(NamedTuple):
    """What a step gives back: the board after it, its reward, whether the level is solved, and its outcome."""

    observation: str
    reward: float
    done: bool
    outcome: Outcome


@dataclass
class SokobanEnv:
    """A level, and in ``now`` all that changes: the player's cell, then the boxes' in ascending order.

    Raises ``ValueError`` for a level that has no solution.

    Example::

        env = SokobanEnv(parse_level("#####\\n#A..#\\n#.BG#\\n#...#\\n#####"))
        assert env.step("DR").done and env.observe() == "#####\\n#...#\\n#.A*#\\n#...#\\n#####"
    """

    level: Level
    scoring: Scoring = Scoring()
    now: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.level.start not in distances(self.level):
            raise ValueError(f"level: expected one that can be solved, got\n{format_level(self.level)}")
        if not self.now:
            self.now.extend((self.level.start.player, *self.level.start.boxes))

    @property
    def state(self) -> State:
        return State(self.now[0], tuple(self.now[1:]))

    @property
    def solved(self) -> bool:
        return is_solved(self.level, self.state)

    @property
    def closeness(self) -> float:
        return self._closeness(self.state)

    def reset(self) -> str:
        """Back to the start of the same level; returns the board."""
        self.now = [self.level.start.player, *self.level.start.boxes]
        return self.observe()

    def observe(self) -> str:
        """The board as the players see it."""
        return format_level(self.level, self.state)

    def render(self) -> str:
        """The board for people; a last line says how it stands."""
        left = distances(self.level).get(self.state)
        return f"{self.observe()}\n" + ("no solution is left" if left is None else f"at least {left} moves to go")

    def preview(self, route: str | None) -> Outcome:
        """What ``step(route)`` would come to; nothing moves. ``None`` is an action that could not be read."""
        walked = walk(self.level, self.state, route or "")
        end = walked.states[-1] if walked.states else self.state
        return Outcome(
            valid=bool(route),
            legal=len(walked.states) / walked.named if walked.named else 1.0,
            moves=len(walked.states),
            solved=is_solved(self.level, end),
            closeness=self._closeness(end),
            gained=self._closeness(end) - self._closeness(self.state),
        )

    def step(self, route: str | None) -> StepResult:
        """Make the moves of ``route`` out of ``UDLR``, up to the solution or the first impossible one.

        ``None``, and a route without a move, is an action that could not be read: nobody moves. Raises ``ValueError``
        for other letters, and where the level is solved already.
        """
        if self.solved:
            raise ValueError(f"route={route!r}: the level is solved, expected reset() before another step")
        outcome = self.preview(route)
        for state in walk(self.level, self.state, route or "").states[-1:]:
            self.now[:] = [state.player, *state.boxes]
        return StepResult(self.observe(), self.scoring.reward(outcome), self.solved, outcome)

    def _closeness(self, state: State) -> float:
        known = distances(self.level)
        if state not in known:
            return 0.0
        return max(0.0, 1.0 - known[state] / known[self.level.start])
