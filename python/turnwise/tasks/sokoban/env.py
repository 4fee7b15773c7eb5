"""The Sokoban environment: a player who pushes boxes, and what each action is worth. It knows nothing of agents."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwise.tasks.routes import Outcome, Scoring, StepResult, outcome_of
from turnwise.tasks.sokoban.level import Level, State, distances, farthest, format_level, is_solved, walk


@dataclass
class SokobanEnv:
    """A level, and in ``now`` all that changes: the player's cell, then the boxes' in ascending order.

    Raises ``ValueError`` for a level that has no solution.

    Example::

        env = SokobanEnv(parse_level("#####\\n#A..#\\n#.BG#\\n#...#\\n#####"))
        assert env.step("DR").done and env.observe() == "#####\\n#...#\\n#.A*#\\n#...#\\n#####"
    """

    level: Level
    scoring: Scoring = Scoring()  # noqa: RUF009 - frozen
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
        """The potential of the level as it stands: 1 when solved, falling with the moves that the shortest solution
        takes from here, 0 where none is left.
        """
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
        """Return the outcome of ``step(route)`` without moving. ``None`` is an action that could not be read."""
        walked = walk(self.level, self.state, route or "")
        made = len(walked.states)
        end = walked.states[-1] if walked.states else self.state
        goal = float(is_solved(self.level, end))
        return outcome_of(route, made, before=self.closeness, after=self._closeness(end), goal=goal)

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
        left = distances(self.level).get(state)
        # One more than the farthest: what is lost is worse than all that is not.
        return 0.0 if left is None else 1.0 - left / (farthest(self.level) + 1)
