"""The Sokoban environment: a player who pushes boxes, and the value of each action. It is independent of agents."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.tasks.routes import RouteOutcome, RouteScoring, StepResult, outcome_of
from turnwise.tasks.sokoban.level import Level, State, distances, farthest, format_level, is_solved, walk


@dataclass
class SokobanEnv:
    """A level, and in ``now`` the player's cell, then the boxes' cells in ascending order. Only ``now`` changes.

    Raises ``ValueError`` for a level that has no solution.

    Example::

        env = SokobanEnv(parse_level("#####\\n#A..#\\n#.BG#\\n#...#\\n#####"))
        assert env.step("DR").done and env.observe() == "#####\\n#...#\\n#.A*#\\n#...#\\n#####"
    """

    level: Level
    scoring: RouteScoring = RouteScoring()  # noqa: RUF009 - frozen
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
        """The potential of the current state: 1 if it is solved, 0 if it has no solution.

        In between it falls with the length of the shortest solution.
        """
        return self._closeness(self.state)

    def reset(self) -> str:
        """Return to the start of the same level. Returns the board."""
        self.now = [self.level.start.player, *self.level.start.boxes]
        return self.observe()

    def observe(self) -> str:
        """Return the board that the players see."""
        return format_level(self.level, self.state)

    def render(self) -> str:
        """Return the board for people. A last line counts the moves that a solution still takes."""
        left = distances(self.level).get(self.state)
        return f"{self.observe()}\n" + ("no solution is left" if left is None else f"at least {left} moves to go")

    def preview(self, route: str | None) -> RouteOutcome:
        """Return the outcome of ``step(route)`` without moving. ``None`` stands for an action that can't be read."""
        states = walk(self.level, self.state, route or "")
        end, made = (states or (self.state,))[-1], len(states)
        goal = float(is_solved(self.level, end))
        return outcome_of(route, made, before=self.closeness, after=self._closeness(end), goal=goal)

    def step(self, route: str | None) -> StepResult:
        """Make the moves of ``route``, up to the solution or the first impossible move.

        Moves are the letters ``UDLR``. ``None`` or an empty route stands for an action that can't be read: nothing
        moves. Raises ``ValueError`` for other letters, and if the level is already solved.
        """
        if self.solved:
            raise ValueError(f"route={route!r}: the level is solved, expected reset() before another step")
        outcome = self.preview(route)
        for state in walk(self.level, self.state, route or "")[-1:]:
            self.now[:] = [state.player, *state.boxes]
        return StepResult(self.observe(), self.scoring.reward(outcome), self.solved, outcome)

    def _closeness(self, state: State) -> float:
        left = distances(self.level).get(state)
        # Divide by one more than the largest distance, so that a lost state ranks below every other.
        return 0.0 if left is None else 1.0 - left / (farthest(self.level) + 1)
