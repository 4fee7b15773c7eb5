"""The Plan-Path task: a tool agent suggests a route and a planner decides which one to walk, or one solver plays."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pydantic import Field, model_validator

from turnwise.tasks.base import Player, Split
from turnwise.tasks.plan_path.env import Goal, PlanPathEnv, PlanPathScoring
from turnwise.tasks.plan_path.maze import (
    MAX_WALLS,
    SIDES,
    Maze,
    MazeDifficulty,
    check_difficulty,
    draw_mazes,
    format_maze,
    parse_maze,
)
from turnwise.tasks.plan_path.prompts import GAME, SYSTEM_PROMPTS, read_messages
from turnwise.tasks.routes import MOVES, RouteEpisode, RouteOptions, RouteTask, format_route
from turnwise.types import EpisodeState, Messages


class PlanPathEpisode(RouteEpisode):
    """One maze, played by ``actors`` in order for up to ``max_turns`` rounds, until the goal is reached (AT-GRPO).

    The artifact is ``{"maze": "A#G\\n...\\n..#"}``. The walker follows a route up to the first move into a wall. For
    suggestions, rewards and the notes on failed routes see :class:`~turnwise.tasks.routes.RouteEpisode`.

    Example: ``PlanPathEpisode(sampler=TreeSampler(branches=8))`` for the team,
    ``PlanPathEpisode(actors=("solver",), max_turns=1)`` for one agent.
    """

    episode_type = "plan_path"
    default_scoring = PlanPathScoring()
    scoring: PlanPathScoring

    def start(self, artifact: Any) -> dict[str, Any]:
        # "path" is the environment's own list, so forking the data forks the environment.
        return {"maze": artifact["maze"], "path": PlanPathEnv(parse_maze(artifact["maze"])).path}

    def environment(self, state: EpisodeState) -> PlanPathEnv:
        return PlanPathEnv(parse_maze(state.data["maze"]), self.scoring, state.data["path"])

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """Add ``path``, the cells walked so far, to the extras of :class:`~turnwise.tasks.routes.RouteEpisode`."""
        return {**super().get_extras(state), "path": list(state.data["path"])}


class PlanPathOptions(RouteOptions):
    """Options of the task ``plan_path``. ``actors = ["solver"]`` with ``max_turns = 1`` is the single agent.

    ``side``, ``walls`` and ``min_route`` set the difficulty: cells per side, the share of all cells that are walls, and
    the fewest moves from start to goal. Reaching the goal is worth the efficiency of the path, or 1 with
    ``goal = "solved"``. Every action earns ``shaping`` times the gain in closeness to the goal, by the true distance.
    ``quality`` is the chance that a demonstrated route is the shortest. ``max_tokens`` limits one completion; the tiny
    model needs a token per move and one for the end of turn.
    """

    side: int = Field(default=MazeDifficulty().side, ge=SIDES[0], le=SIDES[1])
    walls: float = Field(default=MazeDifficulty().walls, ge=0, le=MAX_WALLS)
    min_route: int = Field(default=MazeDifficulty().min_route, ge=1)
    goal: Goal = PlanPathScoring().goal

    @model_validator(mode="after")
    def _can_be_drawn(self) -> PlanPathOptions:
        check_difficulty(self.difficulty)
        return self

    @property
    def difficulty(self) -> MazeDifficulty:
        return MazeDifficulty(self.side, self.walls, self.min_route)

    @property
    def scoring(self) -> PlanPathScoring:
        return PlanPathScoring(self.shaping, goal=self.goal)


class PlanPathTask(RouteTask):
    """Find routes through mazes.

    Example: ``PlanPathTask(PlanPathOptions(side=6, min_route=3))``
    """

    name = "plan_path"
    key = "maze"
    system_prompts = SYSTEM_PROMPTS
    game = GAME
    episode_class = PlanPathEpisode
    options_type = PlanPathOptions
    options: PlanPathOptions

    def draw(self, split: Split, n: int, seed: int | str) -> list[str]:
        return [format_maze(maze) for maze in draw_mazes(split, n, seed, self.options.difficulty)]

    def seed_parts(self, question: str) -> Sequence[Any]:
        return parse_maze(question)

    def boards(self, n: int, seed: str) -> list[Maze]:
        return draw_mazes("train", n, seed if seed == "texts" else f"demonstrations/{seed}", self.options.difficulty)

    def random_player(self, seed: int) -> Player:
        """A player that names 1 to ``2 * side`` random moves."""
        rng = Random(f"plan-path-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            side = read_messages(messages)[0].side
            return format_route("".join(rng.choice(list(MOVES)) for _ in range(rng.randint(1, 2 * side))))

        return play
