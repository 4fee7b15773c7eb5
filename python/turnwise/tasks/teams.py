"""Bases of team games: actors play in order, round by round, and share an outcome."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError, field_validator

from turnwise.arena import Episode, MultiTurnEpisode, RewardMix, RewardParts, Rubric, TreeSampler
from turnwise.arena.rewards.rubric import SHARE
from turnwise.tasks.base import TaskOptions
from turnwise.tasks.generated import GeneratedTask
from turnwise.types import EpisodeState


class TeamOptions(TaskOptions):
    """Options of games for a team; each game adds ``actors`` and ``max_turns``."""

    quality: float = Field(default=0.4, ge=0, le=1)

    @field_validator("actors", check_fields=False)
    @classmethod
    def _once_each(cls, actors: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(actors)) != len(actors):
            raise ValueError("expected each actor once")
        return actors

    def of_episode(self) -> dict[str, Any]:
        """The arguments that every :class:`TeamEpisode` takes."""
        return {name: getattr(self, name) for name in ("actors", "max_turns")}


def solved(extras: dict[str, Any]) -> dict[str, float]:
    """1.0 for every actor of the team if its last answer is right, even if the actor never acted."""
    return extras["solved"]


def valid_format(extras: dict[str, Any]) -> dict[str, float]:
    """The share of each actor's completions that could be read."""
    return extras["valid"]


class TeamEpisode(MultiTurnEpisode):
    """An episode in which ``actors`` act in order for up to ``max_turns`` rounds. ``team`` defaults to the actors.

    The arena mixes a step's outcome and own part, less a cost for a reply that can't be read (``mix``). ``rubric`` has
    the functions in ``outcomes`` and ``own_parts``, which are mixed in the same way for the whole episode. The
    functions in ``measures`` are only reported.
    """

    mix = RewardMix(invalid_cost=0.25)

    team: ClassVar[Sequence[str]]
    outcomes: ClassVar[Sequence[Callable[..., Any]]] = (solved,)
    own_parts: ClassVar[Sequence[Callable[..., Any]]]
    measures: ClassVar[Sequence[Callable[..., Any]]] = (valid_format,)

    def __init__(
        self,
        *,
        actors: Sequence[str] | None = None,
        max_turns: int = 2,
        sampler: TreeSampler | None = None,
    ) -> None:
        super().__init__(sampler=sampler, max_turns=max_turns)
        self.actors = tuple(self.team if actors is None else actors)
        paid = [*self.outcomes, *self.own_parts]
        weights = [*(1.0 for _ in paid), *(0.0 for _ in self.measures)]
        shares = [function for function in (*paid, *self.measures) if function in (solved, valid_format)]
        self.rubric = Rubric([*paid, *self.measures], weights, own=self.own_parts, ranges=dict.fromkeys(shares, SHARE))

    def rounds(self, state: EpisodeState) -> int:
        """Number of rounds."""
        return 1 + max((step.turn for step in state.trajectory), default=0)


class ActingEpisode(TeamEpisode):
    """A team episode that keeps every action in ``state.data["acts"]``, by actor.

    An action is a dict. ``valid`` is True if the reply could be read, and ``own`` is the actor's own part.
    """

    @abstractmethod
    def is_solved(self, state: EpisodeState) -> bool:
        """Return True if the team has solved its question."""

    def add_act(self, state: EpisodeState, act: dict[str, Any]) -> None:
        state.data["acts"].setdefault(state.current_actor, []).append(act)

    def is_unread(self, state: EpisodeState) -> bool:
        """Return True if the current actor's last reply could not be read."""
        return not all(act["valid"] for act in state.data["acts"].get(state.current_actor, [])[-1:])

    def reward_parts(self, state: EpisodeState, arena: Any, artifact: Any) -> RewardParts:
        act = state.data["acts"][state.current_actor][-1]
        return RewardParts(float(self.is_solved(state)), act["own"], act["valid"])

    def team_extras(self, state: EpisodeState) -> dict[str, Any]:
        """``solved`` by actor of the team; ``own`` and ``valid`` by actor that acted; ``rounds``."""
        acts = state.data["acts"]
        return {
            "solved": dict.fromkeys(self.actors, float(self.is_solved(state))),
            "own": {actor: done[-1]["own"] for actor, done in acts.items()},
            "valid": {actor: sum(act["valid"] for act in done) / len(done) for actor, done in acts.items()},
            "rounds": self.rounds(state),
        }


class TeamTask(GeneratedTask):
    """A team game with one episode type, which has the task's name. ``options.actors`` play in this order.

    A game implements :meth:`episode` and :meth:`draw`. Its success metric is ``solved`` of the first actor.
    """

    @property
    def success_metric(self) -> str:
        return f"solved/{self.roles[0]}"

    @property
    def roles(self) -> Sequence[str]:
        return tuple(self.options.actors)

    @abstractmethod
    def episode(self, tree: TreeSampler | None = None) -> Episode:
        """Make the episode from ``options``. With a tree sampler, training branches at each action."""

    def episodes(self, tree: TreeSampler | None = None) -> dict[str, Episode]:
        return {self.name: self.episode(tree)}

    def with_actors(self, actors: Sequence[str]) -> Self:
        """Return this task with ``actors`` in its options. Raises ``ValueError`` if its options don't take them."""
        given = self.options.model_dump(exclude_unset=True)
        try:
            return type(self)(self.options_type(**{**given, "actors": tuple(actors)}))
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"actors={tuple(actors)!r}: {reason}") from None
