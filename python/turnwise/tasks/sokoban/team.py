"""The Sokoban task (AT-GRPO): a tool agent suggests moves and a planner decides which to make, or one solver plays."""

from __future__ import annotations

from random import Random
from typing import Any

from pydantic import Field, model_validator

from turnwise.tasks.base import Player, Split
from turnwise.tasks.routes import MOVES, RouteEpisode, RouteOptions, RouteTask, format_route
from turnwise.tasks.sokoban.env import SokobanEnv
from turnwise.tasks.sokoban.level import (
    SIDES,
    Level,
    LevelDifficulty,
    check_difficulty,
    distances,
    draw_levels,
    format_level,
    parse_level,
)
from turnwise.tasks.sokoban.prompts import GAME, SYSTEM_PROMPTS
from turnwise.types import EpisodeState, Messages


class SokobanEpisode(RouteEpisode):
    """One level, played by ``actors`` in order for up to ``max_turns`` rounds, until every box is on a goal (AT-GRPO).

    The artifact is ``{"level": "#####\\n#A..#\\n..."}``. The player makes the moves up to the first impossible one. A
    solution is worth 1. For suggestions, rewards and the notes on failed routes see
    :class:`~turnwise.tasks.routes.RouteEpisode`.

    Example: ``SokobanEpisode(sampler=TreeSampler(branches=8))`` for the team,
    ``SokobanEpisode(actors=("solver",), max_turns=1)`` for one agent.
    """

    episode_type = "sokoban"

    def start(self, artifact: Any) -> dict[str, Any]:
        # "now" is the environment's own list, so forking the data forks the environment.
        return {"level": artifact["level"], "now": SokobanEnv(parse_level(artifact["level"])).now}

    def environment(self, state: EpisodeState) -> SokobanEnv:
        return SokobanEnv(parse_level(state.data["level"]), self.scoring, state.data["now"])

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """Add ``board`` and ``lost`` (no solution is left) to :class:`~turnwise.tasks.routes.RouteEpisode`'s extras."""
        env = self.environment(state)
        return {**super().get_extras(state), "lost": env.state not in distances(env.level), "board": env.observe()}


class SokobanOptions(RouteOptions):
    """Options of the task ``sokoban``. ``actors = ["solver"]`` with ``max_turns = 1`` is the single agent.

    ``side`` (with the walls around it), ``boxes`` and ``min_route`` (the fewest moves of a solution) set the
    difficulty. A solution earns 1. Every action earns ``shaping`` times the gain in closeness, by the length of the
    shortest solution. ``quality`` is the chance that a demonstrated route is the shortest solution.
    """

    side: int = Field(default=LevelDifficulty().side, ge=SIDES[0], le=SIDES[1])
    boxes: int = Field(default=LevelDifficulty().boxes, ge=1)
    min_route: int = Field(default=LevelDifficulty().min_route, ge=1)

    @model_validator(mode="after")
    def _can_be_drawn(self) -> SokobanOptions:
        check_difficulty(self.difficulty)
        return self

    @property
    def difficulty(self) -> LevelDifficulty:
        return LevelDifficulty(self.side, self.boxes, self.min_route)


class SokobanTask(RouteTask):
    """Push boxes onto goals.

    Example: ``SokobanTask(SokobanOptions(side=7, boxes=2, min_route=8))``
    """

    name = "sokoban"
    key = "level"
    system_prompts = SYSTEM_PROMPTS
    game = GAME
    episode_class = SokobanEpisode
    options_type = SokobanOptions
    options: SokobanOptions

    def draw(self, split: Split, n: int, seed: int | str) -> list[str]:
        return [format_level(level) for level in draw_levels(split, n, seed, self.options.difficulty)]

    def boards(self, n: int, seed: str) -> list[Level]:
        """Draw training levels, of which the smallest sizes have fewer than a warm start has demonstrations."""
        return draw_levels("train", n, f"demonstrations/{seed}", self.options.difficulty, repeats=True)

    def random_player(self, seed: int) -> Player:
        """A player that names 1 to ``2 * side`` random moves."""
        rng = Random(f"sokoban-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            return format_route("".join(rng.choices(list(MOVES), k=rng.randint(1, 2 * self.options.side))))

        return play
