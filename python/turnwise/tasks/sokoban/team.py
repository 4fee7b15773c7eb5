"""The Sokoban task (AT-GRPO): a tool agent suggests moves, a planner decides what is pushed; or one solver alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from pydantic import Field, model_validator

from turnwise.arena import Episode, Rubric, TreeSampler
from turnwise.tasks.base import Demonstration, Player, Split
from turnwise.tasks.generated import GeneratedTask
from turnwise.tasks.rewards import mix_weights
from turnwise.tasks.routes import (
    MOVES,
    TEAM,
    RouteEpisode,
    RouteOptions,
    closeness,
    format_route,
    legal_moves,
    mean_of,
    solved,
    valid_format,
)
from turnwise.types import EpisodeState, Messages

from .demonstrations import demonstrations
from .env import Outcome, Scoring, SokobanEnv
from .level import (
    SIDES,
    Difficulty,
    Level,
    check_difficulty,
    distances,
    draw_levels,
    format_level,
    parse_level,
    shortest_route,
)
from .prompts import SYSTEM_PROMPTS, read_messages


class SokobanEpisode(RouteEpisode):
    """One level, played by ``actors`` in order for up to ``max_turns`` rounds, until every box is on a goal (AT-GRPO).

    The artifact is ``{"level": "#####\\n#A..#\\n..."}``. Moves are made up to the first impossible one; how suggestions
    go from one to the next is told at :class:`~turnwise.tasks.routes.RouteEpisode`. A step earns what ``scoring`` gives
    for its route, a suggestion what it would earn if it were made. ``rubric`` mixes the same two parts for the whole
    episode: the outcome for every actor, and the sum of what its actions earned by themselves.

    Example: ``SokobanEpisode(sampler=TreeSampler(branches=8))`` for the team,
    ``SokobanEpisode(actors=("solver",), max_turns=1)`` for one agent.
    """

    episode_type = "sokoban"

    def __init__(
        self,
        *,
        actors: Sequence[str] = TEAM,
        max_turns: int = 3,
        scoring: Scoring | None = None,
        sampler: TreeSampler | None = None,
    ) -> None:
        super().__init__(actors=actors, sampler=sampler, max_turns=max_turns)
        self.scoring = scoring or Scoring()
        alpha, mode = self.scoring.alpha, self.scoring.mode
        weights = [*mix_weights(alpha, mode), 0.0, 0.0, 0.0]
        self.rubric = Rubric([solved, own_part, closeness, valid_format, legal_moves], weights)

    def start(self, artifact: Any) -> dict[str, Any]:
        # "now" is the environment's own list: a fork of the data is a fork of the environment.
        return {"level": artifact["level"], "now": SokobanEnv(parse_level(artifact["level"])).now}

    def environment(self, state: EpisodeState) -> SokobanEnv:
        return SokobanEnv(parse_level(state.data["level"]), self.scoring, state.data["now"])

    def reward_of(self, outcome: Mapping[str, Any]) -> float:
        return self.scoring.reward(Outcome(**outcome))

    def get_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``solved`` of the team; ``own``, ``closeness``, ``valid`` and ``legal`` by actor; ``lost``, ``board``.

        ``own`` is the sum over an actor's actions; ``lost`` says that no solution was left.
        """
        env, outcomes = self.environment(state), state.data["outcomes"]
        own = {actor: sum(self.scoring.own(Outcome(**act)) for act in acted) for actor, acted in outcomes.items()}
        return {
            "solved": dict.fromkeys(self.actors, float(env.solved)),
            "own": own,
            "closeness": {actor: acted[-1]["closeness"] for actor, acted in outcomes.items()},
            "valid": {actor: mean_of(acted, "valid") for actor, acted in outcomes.items()},
            "legal": {actor: mean_of(acted, "legal") for actor, acted in outcomes.items()},
            "lost": env.state not in distances(env.level),
            "board": env.observe(),
            "rounds": 1 + max((step.turn for step in state.trajectory), default=0),
        }


def own_part(extras: dict[str, Any]) -> dict[str, float]:
    """What each actor's actions earned by themselves, in sum: minus the cost of each step, and the shaping if any."""
    return extras["own"]


class SokobanOptions(RouteOptions):
    """Options of the task ``sokoban``. ``actors = ["solver"]`` with ``max_turns = 1`` is the single agent.

    ``side`` (walls around it included), ``boxes`` and ``min_route``, the fewest moves of a solution, make a level hard.
    ``shaping`` rewards each action for leading closer to the solution, by default not at all: a solution earns 1 and
    every step costs ``step_cost``. ``quality`` is the chance that a demonstrated route is the shortest solution.
    """

    side: int = Field(default=Difficulty().side, ge=SIDES[0], le=SIDES[1])
    boxes: int = Field(default=Difficulty().boxes, ge=1)
    min_route: int = Field(default=Difficulty().min_route, ge=1)

    @model_validator(mode="after")
    def _can_be_drawn(self) -> SokobanOptions:
        check_difficulty(self.difficulty)
        return self

    @property
    def difficulty(self) -> Difficulty:
        return Difficulty(self.side, self.boxes, self.min_route)


class SokobanTask(GeneratedTask):
    """Boxes onto goals; see :class:`turnwise.tasks.base.Task` for what each method promises.

    Example: ``SokobanTask(SokobanOptions(side=7, boxes=2, min_route=8))``
    """

    name = "sokoban"
    key = "level"
    system_prompts = SYSTEM_PROMPTS
    options_type = SokobanOptions
    options: SokobanOptions

    def __init__(self, options: SokobanOptions | None = None) -> None:
        self.options = options or SokobanOptions()
        self.success_metric = f"solved/{self.options.actors[0]}"

    @property
    def roles(self) -> Sequence[str]:
        return self.options.actors

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        options = self.options
        scoring = Scoring(options.alpha, options.mode, options.invalid_cost, options.step_cost, shaping=options.shaping)
        episode = SokobanEpisode(actors=options.actors, max_turns=options.max_turns, scoring=scoring, sampler=tree)
        return {self.name: episode}

    def draw(self, split: Split, n: int, seed: int | str) -> list[str]:
        return [format_level(level) for level in draw_levels(split, n, seed, self.options.difficulty)]

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        return demonstrations(self._levels(n, f"{seed}"), self.options.actors, seed, self.options.quality)

    def texts(self) -> list[str]:
        """The words of every role's prompts, the same for each choice of actors: one tokenizer serves them all."""
        shown = demonstrations(self._levels(60, "texts"), tuple(SYSTEM_PROMPTS), "texts")
        return [text for _, messages, reply in shown for text in (*(m["content"] for m in messages), reply)]

    def oracle(self) -> Player:
        """The shortest solution; any move where none is left."""

        def play(actor_id: str, messages: Messages) -> str:
            level, _ = read_messages(messages)
            return format_route(shortest_route(level) if level.start in distances(level) else "U")

        return play

    def random_player(self, seed: int) -> Player:
        """Names up to two sides' worth of any moves."""
        rng = Random(f"sokoban-random/{seed}")

        def play(actor_id: str, messages: Messages) -> str:
            return format_route("".join(rng.choices(list(MOVES), k=rng.randint(1, 2 * self.options.side))))

        return play

    def _levels(self, n: int, seed: str) -> list[Level]:
        return draw_levels("train", n, f"demonstrations/{seed}", self.options.difficulty)
