"""The Plan-Path environment: a walker in a maze, and the value of each action. It is independent of agents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from turnwise.tasks.plan_path.maze import GOAL, Maze, distance, distances, format_maze, walk
from turnwise.tasks.routes import RouteOutcome, RouteScoring, StepResult, outcome_of

TRAIL = "+"
Goal = Literal["efficiency", "solved"]


@dataclass(frozen=True, slots=True)
class PlanPathScoring(RouteScoring):
    """Parts of an action's reward, see :class:`turnwise.tasks.routes.RouteScoring`.

    Reaching the goal is worth the efficiency of the path, or 1 for any path with ``goal="solved"``. Also raises
    ``ValueError`` for any other ``goal``.

    Example: ``PlanPathEnv(maze, PlanPathScoring(goal="solved", shaping=0.0))`` pays 1 for the goal and nothing else.
    """

    goal: Goal = "efficiency"

    def __post_init__(self) -> None:
        RouteScoring.__post_init__(self)
        if self.goal not in get_args(Goal):
            raise ValueError(f"goal={self.goal!r}: expected one of {sorted(get_args(Goal))}")


@dataclass
class PlanPathEnv:
    """A maze, and in ``path`` the cells walked so far, the start first. Only ``path`` changes.

    Raises ``ValueError`` for a maze without a route to the goal.

    Example::

        env = PlanPathEnv(parse_maze("A#G\\n...\\n..#"))
        observation, reward, done, outcome = env.step("DRR")
        assert observation == ".#G\\n..A\\n..#" and not done
    """

    maze: Maze
    scoring: PlanPathScoring = PlanPathScoring()
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
    def closeness(self) -> float:
        """The potential of the walker's cell: 1 at the goal, 0 on the cell that is farthest from it."""
        return self._closeness(self.position)

    @property
    def efficiency(self) -> float:
        """The fewest moves divided by the moves walked once the goal is reached; 0 before.

        This is success weighted by path length (Anderson et al. 2018, arXiv:1807.06757).
        """
        return self._efficiency(self.position, 0)

    def reset(self) -> str:
        """Move the walker back to the start of the same maze. Returns the board."""
        self.path = [self.maze.start]
        return self.observe()

    def observe(self) -> str:
        """Return the board that the players see: the walker, the goal and the walls, but not the path walked."""
        return format_maze(self.maze, self.position)

    def render(self) -> str:
        """Return the board for people: ``+`` marks the cells walked, and a last line counts the moves."""
        side = self.maze.side
        board = list(self.observe().replace("\n", ""))
        for cell in self.path:
            board[cell] = TRAIL if board[cell] not in ("A", GOAL) else board[cell]
        rows = ["".join(board[row * side : (row + 1) * side]) for row in range(side)]
        walked, left = len(self.path) - 1, distance(self.maze, self.position)
        return "\n".join([*rows, f"walked {walked}, at least {left} to go"])

    def preview(self, route: str | None) -> RouteOutcome:
        """Return the outcome of ``step(route)`` without moving. ``None`` stands for an action that can't be read."""
        cells = walk(self.maze, self.position, route or "")
        end, made = (cells or (self.position,))[-1], len(cells)
        efficiency = self._efficiency(end, made)
        goal = efficiency if self.scoring.goal == "efficiency" else float(efficiency > 0.0)
        return outcome_of(route, made, before=self.closeness, after=self._closeness(end), goal=goal)

    def step(self, route: str | None) -> StepResult:
        """Walk ``route`` up to the goal, or up to the first move into a wall or over the edge.

        Moves are the letters ``UDLR``. ``None`` or an empty route stands for an action that can't be read: the walker
        stays. Raises ``ValueError`` for other letters, and if the goal is already reached.
        """
        if self.solved:
            raise ValueError(f"route={route!r}: the goal is reached, expected reset() before another step")
        outcome = self.preview(route)
        self.path.extend(walk(self.maze, self.position, route or ""))
        return StepResult(self.observe(), self.scoring.reward(outcome), self.solved, outcome)

    def _closeness(self, cell: int) -> float:
        farthest = max(moves for moves in distances(self.maze) if moves is not None)
        return 1.0 - distance(self.maze, cell) / farthest

    def _efficiency(self, end: int, more: int) -> float:
        """Return the efficiency of the path so far followed by ``more`` moves that lead to ``end``."""
        if end != self.maze.goal:
            return 0.0
        return distance(self.maze, self.maze.start) / (len(self.path) - 1 + more)
