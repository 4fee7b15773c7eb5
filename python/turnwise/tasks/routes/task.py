"""The base of tasks that are games of routes, and their options."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from turnwise.arena import Episode, TreeSampler
from turnwise.tasks.base import Demonstration, Player
from turnwise.tasks.generated import texts_of
from turnwise.tasks.routes.demonstrations import RouteGame, demonstrate_routes, read_messages
from turnwise.tasks.routes.episode import TEAM, Role, RouteEpisode
from turnwise.tasks.routes.scoring import RouteScoring
from turnwise.tasks.routes.text import format_route
from turnwise.tasks.teams import TeamOptions, TeamTask
from turnwise.types import Messages


class RouteOptions(TeamOptions):
    """Options of every game of routes; ``actors = ["solver"]`` with ``max_turns = 1`` is the single agent.

    ``shaping`` rewards an action for leading closer to the end by the true distance, see :class:`RouteScoring`.
    ``answers`` is the number of demonstrations of each prompt. The first demonstrations, a share ``clean`` of them,
    have quality 1: with ``warm_start.shuffle = false`` a model first learns to play, then the faults.
    """

    actors: tuple[Role, ...] = Field(default=TEAM, min_length=1)
    max_turns: int = Field(default=3, ge=1)
    max_tokens: int = Field(default=64, ge=1)
    shaping: float = Field(default=RouteScoring().shaping, ge=0)
    answers: int = Field(default=1, ge=1)
    clean: float = Field(default=0.0, ge=0, le=1)

    @field_validator("actors")
    @classmethod
    def _a_walker_last(cls, actors: tuple[Role, ...]) -> tuple[Role, ...]:
        if actors[-1] == "tool" and len(actors) > 1:
            raise ValueError("expected the planner or the solver last, whose routes are walked, or the tool alone")
        return actors

    @property
    def scoring(self) -> RouteScoring:
        return RouteScoring(self.shaping)


class RouteTask(TeamTask):
    """A game of routes; see :class:`turnwise.tasks.base.Task` for what each method promises.

    A game sets ``game`` and ``episode_class`` and implements :meth:`draw`, :meth:`boards` and :meth:`random_player`.
    """

    game: ClassVar[RouteGame]
    episode_class: ClassVar[type[RouteEpisode]]
    options: Any

    @abstractmethod
    def boards(self, n: int, seed: str) -> Sequence[Any]:
        """Draw ``n`` training boards for demonstrations."""

    def episode(self, tree: TreeSampler | None = None) -> Episode:
        return self.episode_class(**self.options.of_episode(), scoring=self.options.scoring, sampler=tree)

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        options = self.options
        boards = self.boards(-(-n // options.answers), f"{seed}")
        return demonstrate_routes(
            self.game, boards, options.actors, seed, options.quality, options.max_turns, options.answers, options.clean
        )[:n]

    def texts(self) -> list[str]:
        """Every role's prompts and replies. They don't depend on the chosen actors, so one tokenizer serves all."""
        boards = self.boards(60, "texts")
        return texts_of(demonstrate_routes(self.game, boards, tuple(self.system_prompts), "texts"))

    def oracle(self) -> Player:
        def play(actor_id: str, messages: Messages) -> str:
            return format_route(self.game.best(read_messages(self.game, messages)[0]))

        return play
