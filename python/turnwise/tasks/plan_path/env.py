"""The Plan-Path environment: a walker in a maze, and what each action of it is worth. It knows nothing of agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from turnwise.tasks.rewards import MixMode, invalid_penalty, mix_rewards

from .maze import GOAL, Maze, distance, format_maze, walk

TRAIL = "+"


class Outcome(NamedTuple):
    """What one action came to.

    ``valid``: a route could be read. ``legal``: the share of its moves that were walked before a wall or the goal ended
    it; 1 where nothing was read. ``closeness``: 1 at the goal, falling to 0 where it is as far as from the start or
    farther. ``efficiency``: of the whole walk so far, see :attr:`PlanPathEnv.efficiency`. ``moves``: how many of them
    were walked now.
    """

    valid: bool
    legal: float
    closeness: float
    efficiency: float
    moves: int = 0


Goal = Literal["efficiency", "solved"]
_GOALS: dict[str, Callable[[Outcome], float]] = {
    "efficiency": lambda outcome: outcome.efficiency,
    "solved": lambda outcome: float(outcome.efficiency > 0.0),
}


@dataclass(frozen=True, slots=True)
class Scoring:
    """What an action earns: ``mix_rewards(efficiency, own, alpha, mode)``, less the costs of a bad row.

    ``own = shaping * closeness - step_cost * moves``. With ``goal="solved"`` the goal is worth 1 by any way, in the
    place of its efficiency. ``invalid_cost`` is taken from an action that can't be read, ``illegal_cost`` times the
    share of its moves that were not walked from one that can. Raises ``ValueError`` for an ``alpha`` that does not fit
    the mode, for another ``goal``, and for negative numbers.

    AT-GRPO's +1 for the goal and -0.01 for a step: ``Scoring(goal="solved", shaping=0.0, step_cost=0.01)``.

    Example: ``Scoring(alpha=0.5).reward(Outcome(True, legal=1.0, closeness=1.0, efficiency=1.0)) == 1.5``
    """

    alpha: float = 1.0
    mode: MixMode = "weighted_sum"
    invalid_cost: float = 0.25
    illegal_cost: float = 0.1
    goal: Goal = "efficiency"
    shaping: float = 1.0
    step_cost: float = 0.0

    def __post_init__(self) -> None:
        mix_rewards(0.0, 0.0, self.alpha, self.mode)
        if self.goal not in _GOALS:
            raise ValueError(f"goal={self.goal!r}: expected one of {sorted(_GOALS)}")
        for name in ("invalid_cost", "illegal_cost", "shaping", "step_cost"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number >= 0")

    def reward(self, outcome: Outcome) -> float:
        own = self.shaping * outcome.closeness - self.step_cost * outcome.moves
        mixed = mix_rewards(_GOALS[self.goal](outcome), own, self.alpha, self.mode)
        return mixed + invalid_penalty(outcome.valid, self.invalid_cost) - self.illegal_cost * (1.0 - outcome.legal)


class StepResult(NamedTuple):
    """What a step gives back: the board after it, its reward, whether the goal is reached, and its outcome."""

    observation: str
    reward: float
    done: bool
    outcome: Outcome


@dataclass
class PlanPathEnv:
    """A maze, and the cells walked so far in ``path``, the start first: all that changes.

    Raises ``ValueError`` for a maze without a route to the goal.

    Example::

        env = PlanPathEnv(parse_maze("A#G\\n...\\n..#"))
        observation, reward, done, outcome = env.step("DRR")
        assert observation == ".#G\\n..A\\n..#" and not done
    """

    maze: Maze
    scoring: Scoring = Scoring()
    path: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        distance(self.maze, self.maze.start)
        if not self.path:
            self.path.append(self.maze.start)

    @property
    def position(self) -> int:
        return self.path[-1]

    @property
    def solved(self) -> bool:
        return self.position == self.maze.goal

    @property
    def efficiency(self) -> float:
        """Fewest moves over moves walked once the goal is reached, before that 0.

        This is success weighted by path length (Anderson et al. 2018, arXiv:1807.06757).
        """
        return self._efficiency(self.position, 0)

    def reset(self) -> str:
        """Back to the start of the same maze; returns the board."""
        self.path = [self.maze.start]
        return self.observe()

    def observe(self) -> str:
        """The board as the players see it: the walker at its cell, the goal, walls; not where it came from."""
        return format_maze(self.maze, self.position)

    def render(self) -> str:
        """The board for people: ``+`` marks the cells walked, and a last line says how it stands."""
        side = self.maze.side
        board = list(self.observe().replace("\n", ""))
        for cell in self.path:
            board[cell] = TRAIL if board[cell] not in ("A", GOAL) else board[cell]
        rows = ["".join(board[row * side : (row + 1) * side]) for row in range(side)]
        walked, left = len(self.path) - 1, distance(self.maze, self.position)
        return "\n".join([*rows, f"walked {walked}, at least {left} to go"])

    def preview(self, route: str | None) -> Outcome:
        """What ``step(route)`` would come to; nothing moves. ``None`` is an action that could not be read."""
        walked = walk(self.maze, self.position, route or "")
        end = walked.cells[-1] if walked.cells else self.position
        away = distance(self.maze, end) / distance(self.maze, self.maze.start)
        return Outcome(
            valid=bool(route),
            legal=len(walked.cells) / walked.named if walked.named else 1.0,
            closeness=max(0.0, 1.0 - away),
            efficiency=self._efficiency(end, len(walked.cells)),
            moves=len(walked.cells),
        )

    def step(self, route: str | None) -> StepResult:
        """Walk ``route``, moves out of ``UDLR``, up to the goal or the first move into a wall or over the edge.

        ``None``, and a route without a move, is an action that could not be read: the walker stays. Raises
        ``ValueError`` for other letters, and where the goal is reached already.
        """
        if self.solved:
            raise ValueError(f"route={route!r}: the goal is reached, expected reset() before another step")
        outcome = self.preview(route)
        self.path.extend(walk(self.maze, self.position, route or "").cells)
        return StepResult(self.observe(), self.scoring.reward(outcome), self.solved, outcome)

    def _efficiency(self, end: int, more: int) -> float:
        """Of the path so far and ``more`` moves that lead to ``end``."""
        if end != self.maze.goal:
            return 0.0
        return distance(self.maze, self.maze.start) / (len(self.path) - 1 + more)
