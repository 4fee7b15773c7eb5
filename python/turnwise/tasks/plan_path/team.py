"""The Plan-Path task: a tool agent suggests a route, a planner decides what is walked; or one solver plays alone."""

from __future__ import annotations

from random import Random
from typing import Any

from pydantic import Field, model_validator

from turnwise.arena import Episode, TreeSampler
from turnwise.arena.context import derive_seed
from turnwise.tasks.base import Demonstration, Player, Split, check_counts
from turnwise.tasks.routes import MOVES, RouteEpisode, RouteOptions, format_route
from turnwise.types import Actor, EpisodeRequest, EpisodeState, Messages

from .demonstrations import demonstrations
from .env import Goal, PlanPathEnv, Scoring
from .maze import (
    MAX_WALLS,
    SIDES,
    Difficulty,
    Maze,
    check_difficulty,
    draw_mazes,
    format_maze,
    parse_maze,
    shortest_route,
)
from .prompts import SYSTEM_PROMPTS, read_messages


class PlanPathEpisode(RouteEpisode):
    """One maze, played by ``actors`` in order for up to ``max_turns`` rounds, until the goal is reached (AT-GRPO).

    The artifact is ``{"maze": "A#G\\n...\\n..#"}``. A route is walked up to the first move into a wall. Suggestions,
    rewards, and what is told of a failed route are those of :class:`~turnwise.tasks.routes.RouteEpisode`.

    Example: ``PlanPathEpisode(sampler=TreeSampler(branches=8))`` for the team,
    ``PlanPathEpisode(actors=("solver",), max_turns=1)`` for one agent.
    """

    episode_type = "plan_path"
    default_scoring = Scoring()
    scoring: Scoring

    def start(self, artifact: Any) -> dict[str, Any]:
        # "path" is the environment's own list: a fork of the data is a fork of the environment.
        return {"maze": artifact["maze"], "path": PlanPathEnv(parse_maze(artifact["maze"])).path}

    def environment(self, state: EpisodeState) -> PlanPathEnv:
        return PlanPathEnv(parse_maze(state.data["maze"]), self.scoring, state.data["path"])

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """Those of :class:`~turnwise.tasks.routes.RouteEpisode`, and ``path``, the cells walked, the start first."""
        return {**super().get_extras(state), "path": list(state.data["path"])}


class PlanPathOptions(RouteOptions):
    """Options of the task ``plan_path``. ``actors = ["solver"]`` with ``max_turns = 1`` is the single agent.

    ``side``, ``walls`` and ``min_route`` make a maze hard: its cells per side, the share of them that are walls, and
    the fewest moves from start to goal. The goal is worth the efficiency of the way there, with ``goal = "solved"`` 1;
    every action earns ``shaping`` times how much closer to the goal it led, by the true distance. ``quality`` is the
    chance that a demonstrated route is the shortest, ``max_tokens`` the limit of one completion (with the tiny model a
    token per move, and the end of turn).
    """

    side: int = Field(default=Difficulty().side, ge=SIDES[0], le=SIDES[1])
    walls: float = Field(default=Difficulty().walls, ge=0, le=MAX_WALLS)
    min_route: int = Field(default=Difficulty().min_route, ge=1)
    goal: Goal = Scoring().goal

    @model_validator(mode="after")
    def _can_be_drawn(self) -> PlanPathOptions:
        check_difficulty(self.difficulty)
        return self

    @property
    def difficulty(self) -> Difficulty:
        return Difficulty(self.side, self.walls, self.min_route)

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.alpha, self.mode, self.invalid_cost, self.shaping, self.goal)


class PlanPathTask:
    """Routes through mazes; see :class:`turnwise.tasks.base.Task` for what each method promises.

    Example: ``PlanPathTask(PlanPathOptions(side=6, min_route=3))``
    """

    name = "plan_path"
    options_type = PlanPathOptions

    def __init__(self, options: PlanPathOptions | None = None) -> None:
        self.options = options or PlanPathOptions()
        self.success_metric = f"solved/{self.options.actors[0]}"

    @property
    def actors(self) -> list[Actor]:
        limit = self.options.max_tokens
        return [Actor(actor, SYSTEM_PROMPTS[actor], max_tokens=limit) for actor in self.options.actors]

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        options = self.options
        episode = PlanPathEpisode(
            actors=options.actors, max_turns=options.max_turns, scoring=options.scoring, sampler=tree
        )
        return {self.name: episode}

    def requests(self, step: int, questions: int, copies: int) -> list[EpisodeRequest]:
        """Fresh mazes at every step, drawn from the 8 in 10 that belong to training."""
        check_counts(questions=questions, copies=copies)
        return [
            self._request(maze, f"{step}", derive_seed(self.name, self.options.seed, step, *maze, copy), True)
            for maze in self._draw("train", questions, f"{self.options.seed}/step-{step}")
            for copy in range(copies)
        ]

    def eval_requests(self, split: Split, n: int) -> list[EpisodeRequest]:
        """The same mazes whatever the task's seed, so that runs compare."""
        return [
            self._request(maze, split, derive_seed(self.name, split, *maze), False) for maze in self._draw(split, n, 0)
        ]

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        mazes = self._draw("train", n, f"demonstrations/{seed}")
        return demonstrations(mazes, self.options.actors, seed, self.options.quality, self.options.max_turns)

    def texts(self) -> list[str]:
        """The words of every role's prompts, the same for each choice of actors: one tokenizer serves them all."""
        shown = demonstrations(self._draw("train", 60, "texts"), tuple(SYSTEM_PROMPTS), "texts")
        # Replies stand as often as prompts, so that a move with its blank becomes one token.
        return [text for _, messages, reply in shown for text in (*(m["content"] for m in messages), reply)]

    def oracle(self) -> Player:
        def play(actor_id: str, messages: Messages) -> str:
            return format_route(shortest_route(read_messages(messages)[0]))

        return play

    def random_player(self, seed: int) -> Player:
        """Names up to two sides' worth of any moves."""
        rng = Random(f"plan-path-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            side = read_messages(messages)[0].side
            return format_route("".join(rng.choice(list(MOVES)) for _ in range(rng.randint(1, 2 * side))))

        return play

    def _draw(self, split: Split, n: int, seed: int | str) -> list[Maze]:
        return draw_mazes(split, n, seed, self.options.difficulty)

    def _request(self, maze: Maze, group: str, seed: int, is_trainable: bool) -> EpisodeRequest:
        board = format_maze(maze)
        group_id = f"{group}/{board}"
        return EpisodeRequest(self.name, {"maze": board}, group_id=group_id, seed=seed, is_trainable=is_trainable)
